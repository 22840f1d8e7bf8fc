"""What a rank needs for a job, and what it keeps for the next one where it stays (`launch=resident`).

A rank that exits after its job makes everything once. One that stays keeps its process groups and the model, whose
device memory it gives back between jobs (`offload`): a job that needs something else than is kept begins anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.config import Settings, resolve_model
from tandem.families.arch import Arch
from tandem.model import parallel
from tandem.model.build import build_policy
from tandem.model.device import device
from tandem.model.logprobs import item_logprobs
from tandem.model.mcore import parallel_state
from tandem.model.parallel import Topology
from tandem.model.policy import Policy
from tandem.model.weights.base import BaseWeights, load_weights, model_directory
from tandem.spool import Spool
from tandem.spool.schema import LoraShape, RLJob, RunSpec, SFTJob
from tandem.trainer.rank import checkpoint
from tandem.trainer.rank.rendezvous import Assignment, Files
from tandem.training.optimizer import AdamState, AdapterOptimizer
from tandem.training.phases import Phases

_libc = ctypes.CDLL(None)

# What a thread has of the interpreter, if others want it, while weights are read.
TURN_SECONDS = 1e-4


@dataclass(frozen=True)
class Need:
    """All that decides whether what is kept serves a job: nothing of it may differ. It is the same on every rank."""

    model: str  # directory of the base model
    files: Files
    lora: LoraShape
    stall_seconds: float  # the bound that process groups are made with

    @classmethod
    def of(cls, spool: Spool, assignment: Assignment) -> Need:
        run = assignment.run
        model = str(model_directory(resolve_model(spool.root, run.base_model)))
        return cls(model, assignment.files, run.lora, assignment.job.stall_seconds)


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """For readers, who want the interpreter thousands of times and for an instant each: beside a thread that computes
    each of them would wait for 5 ms every time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@torch.no_grad()
def _first_uses() -> None:
    """What takes a process a tenth of a second or more at its first use, most of it without the interpreter: to load
    cuBLAS; to connect tensor-parallel ranks. Leaves no memory."""
    square = torch.ones(16, 16, dtype=device.default_dtype(), device=device.device())
    parallel.all_reduce(square @ square, group=parallel_state.get_tensor_model_parallel_group())
    device.synchronize()
    device.release_workspaces()


def _rehearse(rehearse: Callable[[Policy], None], policy: Policy) -> None:
    rehearse(policy)
    device.release_workspaces()


@torch.no_grad()
def _load_softmax(vocabulary: int) -> None:
    """Another such: the kernels that make log-probs of logits. Without a collective, so it may go on beside any."""
    hidden = torch.zeros(16, 16, dtype=device.default_dtype(), device=device.device())
    alone = parallel_state.get_context_parallel_group()
    item_logprobs(
        hidden, torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device),
        lambda hidden: hidden.new_zeros(len(hidden), vocabulary),
        vocab_start=0, vocab_size=vocabulary, temperature=1.0, group=alone,
    )  # fmt: skip


def _read_state(checking: Future[checkpoint.Checked | None]) -> checkpoint.State | None:
    checked = checking.result()
    return None if checked is None else checkpoint.read(checked)


def _load_state(
    reading: list[Future[checkpoint.State | None]], policy: Policy, optimizer: AdapterOptimizer, was: AdamState | None
) -> None:
    """`reading` is emptied: a pool keeps its arguments for a moment longer than the result, and with them memory."""
    if (saved := reading.pop().result()) is not None:
        checkpoint.load(saved, policy, optimizer)
    else:
        assert was is not None, "the state is to be in memory, and the model that had it is not"
        optimizer.load_state(was)


class Kept:
    """One per process."""

    def __init__(self) -> None:
        self._need: Need | None = None
        self._topology: Topology | None = None
        self._model: tuple[Policy, AdapterOptimizer, BaseWeights] | None = None
        self.holds: tuple[str, int, str] | None = None
        """Run, step and job of the checkpoint whose state policy and optimizer are in."""

    def join(self, need: Need, settings: Settings, connect: Callable[[], None]) -> Topology:
        """The process groups: those there are, or new ones, in which case nothing else is kept either."""
        if need != self._need or self._topology is None:
            self.leave()
            connect()
            self._topology = parallel.init_parallel(settings.tensor_parallel, timeout_seconds=need.stall_seconds)
            self._need = need
        return self._topology

    def checking(
        self, need: Need, spool: Spool, run: RunSpec, step: int, arch: Arch
    ) -> Callable[[], checkpoint.Checked | None]:
        """What checks checkpoint `step` of `run`: `checkpoint.check`; or, where its state is in memory,
        hashes alone (None).

        Asked before `join`. The check itself needs no model and no device, so it may go on beside their making.
        """
        holds, self.holds = self.holds, None
        if need != self._need or holds != (run.name, step, spool.checkpoints.manifest(run.name, step).job):
            return lambda: checkpoint.check(spool, run.name, step, arch, run.lora)

        def in_memory() -> None:
            spool.checkpoints.verify(run.name, step)

        return in_memory

    def load(
        self,
        settings: Settings,
        arch: Arch,
        job: RLJob | SFTJob,
        checking: Future[checkpoint.Checked | None],
        phases: Phases,
        rehearse: Callable[[Policy], None] | None = None,
    ) -> tuple[Policy, AdapterOptimizer]:
        """Policy and optimizer on the device, in the state of the checkpoint that the job starts from.

        `checking`: the result of what `self.checking` gave. `rehearse(policy)`, if given, is called with a new policy,
        in a thread while its weights are read: for what a process's first pass over a device takes and later ones
        don't.
        """
        assert self._need is not None
        assert self._topology is not None
        model, tp, tp_rank = Path(self._need.model), self._topology.tp, self._topology.tp_rank
        dtype = device.default_dtype() if settings.dtype == "auto" else getattr(torch, settings.dtype)
        was: AdamState | None = None
        warmed: list[Future[None]] = []
        # `warming` ends here, since a thread keeps what it has of cuBLAS. Of one thread: tensor-parallel ranks have
        # collectives in it, in the same order.
        with ThreadPoolExecutor(4) as beside, ThreadPoolExecutor(1) as warming, _short_turns():

            def read(share: Callable[[], Mapping[str, Tensor]]) -> Future[None]:
                return beside.submit(load_weights, model, arch, share, tp=tp, tp_rank=tp_rank)

            with phases.phase("build"):
                if self._model is None:
                    # Base weights are read from when there is memory for them; the model is made meanwhile.
                    allocating = beside.submit(
                        device.bound(lambda: BaseWeights(arch, dtype, tp=tp, group=parallel.reading_group()))
                    )
                    awaited = [read(lambda: allocating.result().share())]
                    if rehearse is not None:
                        awaited.append(beside.submit(device.bound(_load_softmax), arch.vocab_size // tp))
                        warmed.append(warming.submit(device.bound(_first_uses)))
                    policy = build_policy(
                        arch, self._need.lora, dtype=dtype, recompute=settings.recompute,
                        base=lambda: allocating.result().parameters,
                    )  # fmt: skip
                    reading = beside.submit(device.bound(_read_state), checking)
                    base = allocating.result()
                    awaited.append(beside.submit(device.bound(base.connect)))
                    if rehearse is not None:
                        warmed.append(warming.submit(device.bound(_rehearse), rehearse, policy))
                    optimizer = AdapterOptimizer(policy, job.optimizer)
                else:
                    policy, optimizer, base = self._model
                    reading = beside.submit(device.bound(_read_state), checking)
                    policy.restore()
                    awaited = [read(base.share), beside.submit(device.bound(base.connect))]
                    optimizer.reload()
                    was = optimizer.state()
                    optimizer.begin(job.optimizer)
            loading = beside.submit(device.bound(_load_state), [reading], policy, optimizer, was)
            del reading, was
            if warmed:
                with phases.phase("rehearsal"):  # what is left of it
                    for each in warmed:
                        each.result()
            with phases.phase("base_weights"):
                for each in awaited:
                    each.result()
                if left := base.exchange():
                    read(lambda: left).result()
            with phases.phase("state"):
                loading.result()
                device.release_cached()  # what files and the rehearsal went through
        self._model = policy, optimizer, base
        return policy, optimizer

    def offload(self) -> None:
        """Give back the device's memory, all but what a process can't give back while it lives."""
        if self._model is not None and not self._model[0].offloaded:
            policy, optimizer, _ = self._model
            policy.offload()
            optimizer.offload()
        gc.collect()  # graphs and buffers in cycles
        device.release_cached()
        if hasattr(_libc, "malloc_trim"):
            _libc.malloc_trim(0)  # what the heap has left in pieces, in which each job's threads leave more: 4 ms

    def leave(self) -> None:
        """Keep nothing: no model, and no process groups, which all ranks leave together (R3)."""
        if self._model is not None:
            self._model = self.holds = None
            gc.collect()
            device.release_cached()
        self._need = self._topology = None
        parallel.destroy()
