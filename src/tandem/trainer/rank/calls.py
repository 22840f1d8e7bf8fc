"""Applies a session's requests to the model and the optimizer. Each method is a collective
operation of all ranks."""

import sys
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tandem.data.packed_format import PackedBatch
from tandem.errors import InvalidInput
from tandem.families.arch import Arch
from tandem.model import parallel
from tandem.model.device import memory
from tandem.model.parallel import Topology
from tandem.spool import Spool
from tandem.spool.schema import LoadRequest, OptimizerSettings, PassRequest, RunSpec, StepRequest
from tandem.trainer.rank import checkpoint
from tandem.trainer.rank.model_loader import LoadedModel
from tandem.trainer.rank.probe import JobProbe
from tandem.training.optimizer import AdapterOptimizer, NonFinite
from tandem.training.phases import Phases
from tandem.training.rows import Fit, RowLosses, Totals
from tandem.training.schedule import RowSchedule


@dataclass
class ModelCalls:
    """The model of one run between requests: its weights, Adam's state, and the gradients of the
    passes since the last optimizer step."""

    spool: Spool
    run: RunSpec
    arch: Arch
    model: LoadedModel
    topology: Topology
    device: torch.device
    phases: Phases
    fit: Fit
    # The numbers of the pass requests whose gradients are in memory.
    passes: list[int] = field(default_factory=list)
    loss: float = 0.0  # sum of the passes' losses
    items: float = 0.0
    # `probe`: token sequences from the first pass since the last checkpoint. `previous`: the
    # log-probs of the probe's sequences under the weights of the last checkpoint.
    probe: JobProbe | None = None
    previous: list[list[float]] = field(default_factory=list)

    @property
    def optimizer(self) -> AdapterOptimizer:
        assert isinstance(self.model.optimizer, AdapterOptimizer)
        return self.model.optimizer

    def compute(self, seq: int, request: PassRequest) -> tuple[dict[str, float], bytes]:
        """Computes a pass. Returns the request's metrics, and on rank 0 the log-probs as
        `RequestLog.answer` expects them.

        Raises InvalidInput if the request's arrays have been removed. Raises NonFinite if the loss
        is not finite. After InvalidInput or NonFinite, the accumulated gradients are unchanged.
        """
        with self._opened(seq) as batch:
            if self.probe is None:
                self.probe = JobProbe.choose(batch, self.arch.vocab_size, self.device)
                self.previous = self.probe.logprobs(self.model.policy)
            backward = request.kind == "forward_backward"
            with self.phases.phase("forward_backward"):
                self.phases.watch.begin_step()
                passed = self._with_gradients(seq) if backward else self._add(seq, backward=False)
                sums = passed.rows.over_rows(passed.totals.sums, dist.ReduceOp.SUM)
                parts = parallel.gather_objects(passed.logprobs)
            if not np.isfinite(loss := sums["loss"]):
                if backward:
                    self._repeat()
                raise NonFinite(f"the loss is {loss}; its gradients are not kept")
            if backward:
                self.passes.append(seq)
                self.loss += loss
                self.items += sums["items"]
            tokens = float(request.num_tokens)
            metrics = {"loss:sum": loss, "items:sum": sums["items"], "tokens:sum": tokens}
            return metrics, _by_datum(batch, {r: of for part in parts for r, of in part.items()})

    def step(self, request: StepRequest) -> dict[str, float]:
        """Takes an optimizer step. Raises NonFinite if the gradient is not finite; the weights are
        then unchanged. The gradients are zero afterwards, even after NonFinite."""
        optimizer = self.optimizer
        optimizer.settings = OptimizerSettings(
            beta1=request.beta1,
            beta2=request.beta2,
            eps=request.eps,
            weight_decay=request.weight_decay,
            max_grad_norm=request.max_grad_norm or sys.float_info.max,
        )
        with self.phases.phase("optimizer"):
            optimizer.reduce_gradients()
            norm = optimizer.gradient_norm()
            if finite := bool(np.isfinite(norm)):
                optimizer.step(norm, request.learning_rate)
            passed = {"loss": self.loss, "trainable_tokens": self.items}
            self.forget()
        if not finite:
            raise NonFinite(
                f"the norm of the gradient is {norm}; the step was not applied, and the gradients"
                " are zero now. Look for extreme weights, advantages or log-probs in the data"
            )
        steps = float(optimizer.steps)
        return {
            **passed,
            "grad_norm": norm,
            "learning_rate": request.learning_rate,
            "optimizer_step": steps,
        }

    def load(self, request: LoadRequest) -> None:
        """Loads the weights of a checkpoint. The gradients are zero afterwards. Raises NotFound or
        CheckpointDamaged if the checkpoint can't be read. Raises InvalidInput if the checkpoint's
        run has another base model or LoRA shape. If the checkpoint can't be used, the model stays
        unchanged."""
        assert self.run.lora is not None
        source = self.spool.runs.get(request.run)
        for name in ("base_model", "lora"):
            if (theirs := getattr(source, name)) != (ours := getattr(self.run, name)):
                raise InvalidInput(f"{request.run!r} has {theirs}, not {ours}", field=name)
        checked = checkpoint.check_checkpoint(
            self.spool, request.run, request.step, self.arch, self.run.lora
        )
        if not request.optimizer:
            checked = checkpoint.Contents(checked.adapter, None)
        self.optimizer.reset()
        checkpoint.load(checked, self.model.policy, self.optimizer)
        self.forget()

    def forget(self) -> None:
        """Sets the gradients to zero, and forgets the passes that they came from."""
        self.optimizer.zero_grad()
        self.passes, self.loss, self.items = [], 0.0, 0.0

    def saved(self) -> None:
        """Records that a checkpoint now contains the weights and Adam's state."""
        self.probe, self.previous = None, []

    def _opened(self, seq: int) -> PackedBatch:
        logged = self.spool.requests.get(self.run.name, seq)
        return PackedBatch.open(self.spool.requests.data_dir(self.run.name, seq), logged.sha256)

    def _with_gradients(self, seq: int) -> "_Passed":
        """Runs `_add`. If this rank runs out of memory, runs `_add` again with layers that keep
        fewer activations in memory. The number of kept activations does not change any bit of the
        results."""
        while True:
            try:
                return self._add(seq, backward=True)
            except torch.OutOfMemoryError:
                if not self.fit.lower():
                    raise
            self._repeat()

    def _repeat(self) -> None:
        """Computes the gradients of the passes in `passes` again."""
        while True:
            memory.release_cached()
            self.optimizer.zero_grad()
            try:
                for seq in self.passes:
                    self._add(seq, backward=True)
                return
            except torch.OutOfMemoryError:
                if not self.fit.lower():
                    raise

    def _add(self, seq: int, *, backward: bool) -> "_Passed":
        """Computes the losses of this rank's rows of a pass. With `backward`, adds the losses'
        gradients to the accumulated gradients. A rank that shares no layers may have to repeat this
        method alone, after running out of memory. For ranks that share no layers, the method
        therefore has no collective operation."""
        request = self.spool.requests.get(self.run.name, seq).request
        assert isinstance(request, PassRequest)
        kept: dict[int, np.ndarray] = {}

        def keep(row: int, logprobs: Tensor) -> None:
            kept[row] = logprobs.float().cpu().numpy()

        with self._opened(seq) as batch:
            rows = RowLosses(
                batch,
                request.loss,
                self.model.policy,
                self.topology,
                self.device,
                self.phases,
                self.fit,
                keep=keep,
            )
            schedule = RowSchedule((tuple(range(len(batch))),), self.topology.sizes.data)
            steps = schedule.micro_steps(0, self.topology.place.data)
            compute = rows.add_gradients if backward else rows.values
            return _Passed(rows, compute(steps, 1.0), kept)


@dataclass(frozen=True)
class _Passed:
    rows: RowLosses
    totals: Totals
    logprobs: dict[int, np.ndarray]  # row number -> log-probs, float32 [items]


def _by_datum(batch: PackedBatch, logprobs: dict[int, np.ndarray]) -> bytes:
    """The items' log-probs, ordered by the client's data and by position within each datum."""
    order = np.argsort(
        np.concatenate([batch.row(row).item_trajectory for row in range(len(batch))]),
        kind="stable",
    )
    values = np.concatenate([logprobs[row] for row in range(len(batch))])
    return values[order].astype("<f4").tobytes()
