"""Computes the losses of a batch's rows, and adds up their gradients.

The module does not deal with optimizer steps, because a session's requests also use the module.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tandem.data.packed_format import PackedBatch, PackedRow
from tandem.model import graphs, recompute
from tandem.model.device import memory
from tandem.model.parallel import Topology
from tandem.model.policy import ItemOutputs, Policy
from tandem.model.rows import RowTensors
from tandem.spool.schema import Loss, PreferenceLoss, RLLoss, SFTLoss
from tandem.training.losses import Items, LossOutput, rl_loss, sft_loss
from tandem.training.phases import Phases, reduce_values
from tandem.training.preference_loss import preference_loss
from tandem.training.schedule import advantage_divisor, row_weights

MicroSteps = Sequence[tuple[int, bool]]
"""`(row, counts)` pairs as in `RowSchedule.micro_steps`."""


def row_tensors(row: PackedRow, device: torch.device) -> RowTensors:
    """A packed row's arrays, copied to `device`. The copies do not keep the file mapped."""
    names = {field.name for field in fields(RowTensors)} - {"slot_experts", "deal"}
    arrays: dict[str, Any] = {
        name: torch.tensor(getattr(row, name), dtype=torch.int64) for name in names
    }
    if row.slot_experts.size:
        arrays["slot_experts"] = torch.tensor(row.slot_experts)
    for name in arrays.keys() - {"subtree_end"}:
        arrays[name] = memory.copy_to(arrays[name], device)
    return RowTensors(**arrays)


class Fit:
    """Chooses how many tensors the layers keep for the backward pass, according to the device's
    memory (`tandem.model.recompute`)."""

    def __init__(self, policy: Policy, device: torch.device, *, on: bool) -> None:
        """Prepares the choice of tensors for the layers of this policy.

        Args:
            device: the device of the rows' tensors.
            on: if False, the layers' settings stay as they are.
        """
        self._policy, self._device, self._on = policy, device, on
        self._slots = 0

    def to(self, row: PackedRow) -> None:
        """Choose which tensors the layers keep for rows as long as `row`. Does nothing if an
        earlier call had a row of at least this length. A collective operation of all ranks."""
        if self._on and len(row.tokens) > self._slots:
            self._slots = len(row.tokens)
            recompute.fit(self._policy, row_tensors(row, self._device))

    def lower(self) -> bool:
        """Makes layers keep fewer tensors for the backward pass. Call this method after memory ran
        out. Returns False if the layers can't keep fewer tensors."""
        return self._slots > 0 and recompute.lower(self._policy)


@dataclass
class Totals:
    """`sums` and `maxima` of `LossOutput`, over several rows."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, output: LossOutput, *, counts: bool) -> None:
        for name, value in output.sums.items():
            part = value if counts else 0.0
            self.sums[name] = self.sums.get(name, torch.zeros_like(value)) + part
        for name, value in output.maxima.items():
            least = torch.full_like(value, -torch.inf)
            part = value if counts else least
            self.maxima[name] = torch.maximum(self.maxima.get(name, least), part)


def _ignore(_row: int, _logprobs: Tensor) -> None: ...


@dataclass
class RowLosses:
    """The rows of one batch, computed with one loss."""

    batch: PackedBatch
    loss: Loss
    policy: Policy
    topology: Topology
    device: torch.device
    phases: Phases
    fit: Fit
    base_step: int = 0
    # Row -> log-probs computed before training, float32 [items].
    old_logprobs: dict[int, Tensor] = field(default_factory=dict)
    reference_logprobs: dict[int, Tensor] = field(default_factory=dict)
    # The mean over the job's items of `old - reference`: the log-prob before training minus the
    # reference's log-prob, in nats.
    mean_kl: float = 0.0
    keep: Callable[[int, Tensor], None] = _ignore
    """`keep(row, logprobs)` is called for each row that counts, with the log-probs of the row's
    items, on the ranks with `reports`."""
    passes: int = 0
    """Number of passes with gradients that this rank still has to compute. All of them are over
    rows of the same length, as in a job. `graphs.repeat` is called after the first pass."""

    def __post_init__(self) -> None:
        self._advantage_divisor = advantage_divisor(self.batch, self.loss)
        # All context-parallel ranks and all pipeline stages compute parts of the same row. Only the
        # first context-parallel rank of the last stage counts the row.
        self.reports = self.topology.place.context == 0 and self.policy.stage.last

    def add_gradients(self, steps: MicroSteps, denominator: float) -> Totals:
        """Adds the gradients of this rank's rows to the buffers. Each loss is divided by
        `denominator`."""
        totals = Totals()
        with self.policy.adapter_fixed():
            self.policy.stage.backward(self._losses(steps, denominator, totals))
        return totals

    @torch.no_grad()
    def values(self, steps: MicroSteps, denominator: float) -> Totals:
        """Like `add_gradients`, but without gradients."""
        totals = Totals()
        with self.policy.adapter_fixed():
            for _ in self._losses(steps, denominator, totals):
                pass
        return totals

    def _losses(self, steps: MicroSteps, denominator: float, totals: Totals) -> Iterator[Tensor]:
        for index, counts in steps:
            self.phases.announce("forward_backward")
            row = self.batch.row(index)
            if torch.is_grad_enabled():
                self.fit.to(row)
            outputs = self.forward(row)
            output = self.of_row(row, outputs, denominator if counts else None)
            totals.add(output, counts=counts and self.reports)
            if counts and self.reports:
                self.keep(index, outputs.logprobs.detach())
            yield output.loss
            # Graphs can be captured now, because the first pass has loaded all kernels.
            if self.passes and torch.is_grad_enabled():
                others, self.passes = self.passes - 1, 0
                graphs.repeat(self.policy, row_tensors(row, self.device), others)

    def forward(self, row: PackedRow) -> ItemOutputs:
        temperature = self.loss.temperature if isinstance(self.loss, RLLoss) else 1.0
        return self.policy(row_tensors(row, self.device), temperature=temperature)

    def of_row(self, row: PackedRow, outputs: ItemOutputs, denominator: float | None) -> LossOutput:
        """The row's loss.

        Args:
            outputs: the policy's outputs for the row, [items].
            denominator: the divisor of the loss; None: all of the row's weights are zero.
        """
        loss, tensor = self.loss, self._tensor
        weights = np.zeros(len(row.item_target))
        if denominator is not None:
            weights = row_weights(self.batch, row, loss)[0] / denominator
        sequence = row.item_sequence - row.item_sequence[0]
        items = Items(
            outputs.logprobs,
            outputs.entropy,
            tensor(weights),
            tensor(sequence, torch.int64),
            num_sequences=int(sequence[-1]) + 1,
            mean_kl=self.mean_kl,
        )
        if isinstance(loss, SFTLoss):
            return sft_loss(items)
        if isinstance(loss, PreferenceLoss):
            group = self.batch.trajectory_group[row.item_trajectory]
            items.pair = tensor(np.unique(group, return_inverse=True)[1], torch.int64)
            items.rejected = tensor(row.item_rejected, torch.bool)
            items.reference_logprobs = self.reference_logprobs.get(row.index)
            return preference_loss(items, loss)
        items.advantages = tensor(row.item_weight / self._advantage_divisor)
        items.old_logprobs = items.sampler_logprobs = tensor(row.item_logprob)
        if loss.old_logprobs == "trainer":
            # A job with a single optimizer step needs no pass before training, because the old
            # policy is the current policy.
            items.old_logprobs = self.old_logprobs.get(row.index, outputs.logprobs.detach())
        behind = self.base_step - row.item_policy_step
        items.steps_behind = tensor(np.where(row.item_policy_step < 0, -1, behind), torch.int64)
        items.reference_logprobs = self.reference_logprobs.get(row.index)
        return rl_loss(items, loss)

    def _tensor(self, values: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
        return memory.copy_to(torch.tensor(values, dtype=dtype), self.device)

    def mean_log_ratio(self, rows: Sequence[int]) -> float:
        """The mean of the difference `old - reference`, in nats, over the items of all ranks. All
        ranks get the same mean. `rows`: this rank's rows."""
        sums = {
            "items": torch.zeros((), dtype=torch.float64),
            "nats": torch.zeros((), dtype=torch.float64),
        }
        for index in rows if self.policy.stage.last else ():
            old = self.old_logprobs.get(index)
            if old is None:
                old = self._tensor(self.batch.row(index).item_logprob)
            sums["items"] += len(old)
            sums["nats"] += (old.double() - self.reference_logprobs[index].double()).sum().cpu()
        totals = self.over_rows(sums, dist.ReduceOp.SUM)
        return totals["nats"] / totals["items"]

    def over_rows(self, values: dict[str, Tensor], op: dist.ReduceOp.RedOpType) -> dict[str, float]:
        """Name -> value of this rank's rows, reduced by `op` over the rows of all ranks."""
        totals = reduce_values(values, op, self.topology.data, self.device)
        return reduce_values(totals, op, self.topology.pipeline, torch.device("cpu"))
