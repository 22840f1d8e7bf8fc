"""Loads a job's model: base weights, adapter and optimizer state. The parts are loaded in parallel
where possible.

For a new model on a GPU:

- The main thread builds the model in host memory, moves it to the allocated memory, and makes the
  optimizer.
- The pool waits for CUDA, allocates the base weights, and reads them from files.
- The pool loads the softmax's kernels.
- Once the optimizer is made, the pool reads the checkpoint's state into model and optimizer.
- Once the base weights are allocated, the pool connects this rank's weights to the weights of the
  ranks that have the same base weights.
- The pool loads cuBLAS. On a rank that shares no layers, the warm-up thread loads cuBLAS instead.
- The warm-up thread connects the ranks that share layers, and then runs one layer on the model.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tandem.errors import InvalidInput, NotFound
from tandem.families.arch import Arch
from tandem.model import device, parallel
from tandem.model.build import build_policy
from tandem.model.device import memory, on_device
from tandem.model.logprobs import item_logprobs
from tandem.model.parallel import Topology
from tandem.model.policy import Policy
from tandem.model.weights.base_memory import BaseWeights
from tandem.model.weights.base_weights import load_weights
from tandem.model.weights.safetensors_reader import StoredTensor
from tandem.spool import Spool
from tandem.system import liveness
from tandem.trainer.launch import RankSettings
from tandem.trainer.rank import checkpoint, model_checkpoint
from tandem.trainer.rank.rendezvous import Assignment
from tandem.training.optimizer import AdapterOptimizer
from tandem.training.phases import Phases
from tandem.training.sharded_adam import ShardedAdam

type Checked = checkpoint.Contents[StoredTensor] | model_checkpoint.Found
"""The checkpoint to start from, whose files have been checked: a checkpoint of an adapter, or of
all weights."""


@dataclass(frozen=True)
class LoadedModel:
    policy: Policy
    optimizer: AdapterOptimizer | ShardedAdam
    base: BaseWeights


@dataclass
class ModelLoader:
    """Loads the model of one job."""

    settings: RankSettings
    arch: Arch
    assignment: Assignment
    topology: Topology
    checked: Future[Checked | None]
    """The future result of the check of the checkpoint's files. The result is None if the kept
    model already has the checkpoint's state, so that the files need not be read."""
    rehearse: Callable[[Policy], None] | None
    """Runs a short pass before the training, because a process's first pass is slow. None: the
    model is loaded without such a pass and without loading kernels in advance."""

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(4)
        # The warm-up has a single thread, because ranks that share layers must run the warm-up's
        # collective operations in the same order. The warm-up thread ends when loading ends,
        # because each living thread keeps a cuBLAS handle.
        self._warm_up_thread = ThreadPoolExecutor(1)
        self._weights_tasks: list[Future[None]] = []
        self._warm_ups: list[Future[None]] = []

    def load(self, kept: LoadedModel | None, phases: Phases) -> LoadedModel:
        """The model on the device, in the state of the checkpoint that the job starts from. `kept`:
        the model of an earlier job, which is used again; None: a new model is built. Raises
        InvalidInput if the base model is wrong, CheckpointDamaged if the checkpoint is damaged.
        """
        with self._pool, self._warm_up_thread, _short_switch_interval():
            with phases.phase("build"):
                # The check of the checkpoint's files decides which weights are read.
                if kept is not None and self.assignment.run.lora is None:
                    _wait([self.checked], lambda: phases.announce("build"))
                model = self._build() if kept is None else self._restore(kept)
            state_loaded = self._pool.submit(on_device(self._load_state), model)
            if self._warm_ups:
                with phases.phase("rehearsal"):
                    for task in self._warm_ups:
                        task.result()
            with phases.phase("base_weights"):
                _wait(self._weights_tasks, lambda: phases.announce("base_weights"))
                # `exchange` returns the weights that other ranks could not share, and this rank
                # reads these weights from the files. If no weights were read, nothing is exchanged,
                # because the handles of the other ranks' memory have been closed since the previous
                # job.
                if self._weights_tasks and (unread := model.base.exchange()):
                    again = self._pool.submit(self._read_weights, lambda: unread)
                    _wait([again], lambda: phases.announce("base_weights"))
            with phases.phase("state"):
                _wait([state_loaded], lambda: phases.announce("state"))
                # loading and the warm-up leave unused memory in the allocators
                memory.release_cached()
        # CUBLAS_WORKSPACE_CONFIG is no longer needed, because the first matrix product has read it.
        # In torch 2.11, each matrix product parses the variable, which takes longer than launching
        # the product.
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        return model

    def _build(self) -> LoadedModel:
        arch, sizes, run, settings = (
            self.arch,
            self.topology.sizes,
            self.assignment.run,
            self.settings,
        )
        dtype = (
            device.default_dtype() if settings.dtype == "auto" else getattr(torch, settings.dtype)
        )
        # Reading the base weights starts as soon as their memory is allocated.
        allocated = self._pool.submit(
            on_device(lambda: BaseWeights(arch, dtype, sizes, groups=parallel.reading_groups()))
        )
        self._weights_tasks.append(
            self._pool.submit(self._read_weights, lambda: allocated.result().own_share())
        )
        if self.rehearse is not None:
            self._weights_tasks.append(
                self._pool.submit(on_device(_load_softmax_kernels), arch.vocab_size // sizes.tensor)
            )
            if sizes.layers_shared:
                self._warm_ups.append(self._warm_up_thread.submit(on_device(_connect)))
            # A rank that shares no layers loads cuBLAS in the warm-up thread. So the warm-up pass
            # in the same thread needs no second cuBLAS handle.
            thread = self._pool if sizes.layers_shared else self._warm_up_thread
            self._warm_ups.append(thread.submit(on_device(_load_cublas)))
        policy = build_policy(
            arch,
            run.lora,
            dtype=dtype,
            recompute=settings.recompute,
            base=lambda: allocated.result().parameters,
        )
        base = allocated.result()
        self._weights_tasks.append(self._pool.submit(on_device(base.connect)))
        if self.rehearse is not None:
            self._warm_ups.append(self._warm_up_thread.submit(on_device(self.rehearse), policy))
        if run.lora is None:
            return LoadedModel(policy, ShardedAdam(policy, base, self.assignment.optimizer), base)
        return LoadedModel(policy, AdapterOptimizer(policy, self.assignment.optimizer), base)

    def _restore(self, kept: LoadedModel) -> LoadedModel:
        """Undoes `RankState.offload`. `offload` dropped the frozen weights, so they are read from
        their files again."""
        kept.policy.restore()
        if self.assignment.run.lora is not None or self.checked.result() is not None:
            self._weights_tasks.append(self._pool.submit(self._read_weights, kept.base.own_share))
            self._weights_tasks.append(self._pool.submit(on_device(kept.base.connect)))
        kept.optimizer.restore()
        kept.optimizer.settings = self.assignment.optimizer
        return kept

    def _read_weights(self, parameters: Callable[[], Mapping[str, Tensor]]) -> None:
        """Reads weights into `parameters`: frozen weights from the base model, trained weights from
        the checkpoint."""
        directory = Path(self.assignment.model)
        if self.assignment.run.lora is None and isinstance(
            found := self.checked.result(), model_checkpoint.Found
        ):
            directory = found.directory
        load_weights(directory, self.arch, parameters, self.topology.sizes, self.topology.place)

    def _load_state(self, model: LoadedModel) -> None:
        if (checked := self.checked.result()) is None:
            return
        optimizer = model.optimizer
        optimizer.reset()
        if isinstance(optimizer, ShardedAdam):
            assert isinstance(checked, model_checkpoint.Found)
            model_checkpoint.load_state(checked, self.arch, optimizer, self.topology)
        else:
            assert isinstance(checked, checkpoint.Contents)
            checkpoint.load(checked, model.policy, optimizer)


def _wait(tasks: Iterable[Future[Any]], beat: Callable[[], None]) -> None:
    """Waits until the tasks have ended, and raises their errors. Calls `beat` about once a second,
    because tasks on a slow volume may take longer than a heartbeat's limit."""
    for task in tasks:
        liveness.result_of(task, beat, seconds=1.0)


@contextlib.contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Shortens Python's switch interval, because reader threads need the GIL often and briefly. By
    default, each reader would wait 5 ms for a thread that computes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@torch.no_grad()
def _load_cublas() -> None:
    """Loads cuBLAS by a first matrix product. Leaves no device memory allocated."""
    square = torch.ones(16, 16, dtype=device.default_dtype(), device=device.device())
    torch.mm(square, square)
    device.synchronize()
    memory.release_workspaces()


@torch.no_grad()
def _connect() -> None:
    """Make NCCL connect the groups that compute a layer together: once for all-reduce, and once
    more for all-to-all."""
    topology = parallel.current()
    for group, exchanges in (
        (topology.tensor, topology.sizes.sequence),
        (topology.context, True),
        (topology.expert_group, True),
    ):
        zeros = torch.zeros(group.size(), device=device.device())
        parallel.all_reduce(zeros, group=group)
        if exchanges:
            parallel.scatter_sum(zeros, group)
    device.synchronize()


@torch.no_grad()
def _load_softmax_kernels(vocabulary: int) -> None:
    """Load the kernels that compute log-probs from logits. The function contains no collective
    operation, so it may run in parallel with any other work."""
    hidden = torch.zeros(16, 16, dtype=device.default_dtype(), device=device.device())
    item_logprobs(
        hidden,
        torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device),
        hidden.new_zeros(vocabulary, 16),
        vocab_start=0,
        temperature=1.0,
        group=None,
    )


@contextlib.contextmanager
def reference_policy(
    spool: Spool,
    run: str,
    base_model: Path,
    policy: Policy,
    field: str,
    beat: Callable[[], None],
    reference: int | Literal["base"],
) -> Iterator[None]:
    """Within the `with` block, `policy` computes with the weights of the reference policy. The
    policy's trained tensors are kept in host memory and restored afterwards, bit for bit.

    Raises InvalidInput, whose field is `field`, if the reference's checkpoint does not exist.
    Raises CheckpointDamaged if the checkpoint is damaged.

    Args:
        base_model: the base model's directory.
        field: the setting that names the reference, for errors.
        beat: called regularly while files are hashed and read.
        reference: "base", or the step of one of the run's checkpoints.
    """
    full = policy.lora is None
    if reference == "base" and not full:
        with policy.adapter_disabled():
            yield
        return

    def beating[T](action: Callable[[], T]) -> T:
        return liveness.in_thread(on_device(action), beat, seconds=1.0)

    directory = base_model
    try:
        if reference != "base" and full:
            directory = (
                beating(lambda: model_checkpoint.check_model(spool, run, reference)) or base_model
            )
        elif reference != "base":
            beating(lambda: spool.checkpoints.verify(run, reference))
            directory = spool.checkpoints.path(run, reference)
    except NotFound as error:
        raise InvalidInput(f"{error.message}; take one of those, or 'base'", field=field) from error
    trained = policy.base() if full else policy.lora_parameters()
    own = {name: parameter.detach().to("cpu", copy=True) for name, parameter in trained.items()}
    try:
        topology = policy.topology
        if full:
            beating(
                lambda: load_weights(
                    directory, policy.arch, policy.base, topology.sizes, topology.place
                )
            )
        else:
            beating(lambda: policy.load_adapter(directory))
        yield
    finally:
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(own[name])
