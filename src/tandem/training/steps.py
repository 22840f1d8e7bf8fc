"""The step loop, the same for RL and SFT except for the loss. It knows no files, processes or
offloading.

In an optimizer step each rank runs its micro steps, one row each. Gradients are then summed over
data-parallel ranks, checked, clipped and applied. Losses are divided by the denominator of all
ranks' rows before the backward pass, so that the sum is the gradient of the whole step's loss.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tandem.data.packed_format import PackedBatch, PackedRow
from tandem.errors import InvalidInput, NothingToLearn
from tandem.model import graphs, recompute
from tandem.model.device import memory
from tandem.model.parallel import Topology
from tandem.model.policy import ItemOutputs, Policy
from tandem.model.rows import RowTensors
from tandem.spool.schema import JobSpec, PreferenceLoss, RLJob, RLLoss, RunSpec, SFTLoss
from tandem.training.losses import MAX_NATS, Items, LossOutput, preference_loss, rl_loss, sft_loss
from tandem.training.optimizer import AdapterOptimizer, NonFinite
from tandem.training.phases import Phases, item_metrics, reduce_values, reward_metrics, staleness
from tandem.training.schedule import advantage_divisor, denominators, make_schedule, row_weights
from tandem.training.sharded_adam import ShardedAdam


def row_tensors(row: PackedRow, device: torch.device) -> RowTensors:
    """Copies of a packed row's arrays on `device`; none keeps the memory map alive."""
    names = {field.name for field in fields(RowTensors)} - {"slot_experts", "deal"}
    arrays: dict[str, Any] = {
        name: torch.tensor(getattr(row, name), dtype=torch.int64) for name in names
    }
    if row.slot_experts.size:
        arrays["slot_experts"] = torch.tensor(row.slot_experts)
    for name in arrays.keys() - {"subtree_end"}:
        arrays[name] = memory.copy_to(arrays[name], device)
    return RowTensors(**arrays)


@dataclass
class Training:
    """One job's optimizer steps, on a model that is loaded. Raises InvalidInput as `make_schedule`
    does."""

    run: RunSpec
    job: JobSpec
    batch: PackedBatch
    policy: Policy
    optimizer: AdapterOptimizer | ShardedAdam
    topology: Topology
    device: torch.device
    phases: Phases
    reference: Callable[[int | Literal["base"]], AbstractContextManager[None]]
    """Within it the policy computes as that reference does; afterwards it is exactly what it was
    before."""
    fit: bool = False
    """Choose what layers keep for the backward pass by the device's memory
    (`tandem.model.recompute`)."""

    def __post_init__(self) -> None:
        self.schedule = make_schedule(
            self.batch,
            self.job.optimizer,
            self.run.seed,
            self.job.base_step,
            self.topology.sizes.data,
        )
        self._steps_before = self.optimizer.steps  # of earlier jobs
        # Row -> log-probs computed before training, float32 [items].
        self._old_logprobs: dict[int, Tensor] = {}
        self._reference_logprobs: dict[int, Tensor] = {}
        # Of the log-probs before training to the reference, over the job's items, in nats.
        self._mean_kl = 0.0
        self._advantage_divisor = advantage_divisor(self.batch, self.job.loss)
        self._fitted = self._repeated = False
        # Of the context-parallel ranks that share a row the first counts it, of pipeline stages the
        # last.
        self._reports = self.topology.place.context == 0 and self.policy.stage.last

    def train(self, report: Callable[[int, dict[str, float]], None]) -> dict[str, float]:
        """Run all optimizer steps, numbered from 1, and `report(step, metrics)` each; returns the
        last one's metrics, which are the same on every rank.

        Raises NonFinite, and InvalidInput for log-probs that no sampler gives, before such a step
        is applied; NothingToLearn if no step moved the policy.
        """
        totals, loss = denominators(self.batch, self.schedule.steps, self.job.loss), self.job.loss
        if isinstance(loss, RLLoss):
            if loss.old_logprobs == "trainer" and (len(totals) > 1 or loss.kl_in == "advantage"):
                self._old_logprobs = self._logprobs("old_logprobs", nullcontext())
            if loss.kl_coef or loss.kl_metric:
                self._reference_logprobs = self._logprobs(
                    "reference", self.reference(loss.kl_reference)
                )
            if loss.kl_in == "advantage":
                self._mean_kl = self._mean_log_ratio()
        if isinstance(loss, PreferenceLoss) and loss.kind != "simpo":
            start = nullcontext() if loss.reference == "start" else self.reference(loss.reference)
            self._reference_logprobs = self._logprobs("reference", start)
        metrics: dict[str, float] = {}
        largest = 0.0
        for step, total in enumerate(totals):
            metrics = self._optimizer_step(step, total)
            largest = max(largest, metrics["grad_norm"])
            report(step + 1, metrics)
        graphs.drop(self.policy)
        if isinstance(loss, RLLoss):
            self._check_learned(largest, metrics)
        return metrics

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The loss of the held-out rows, `held_out_<metric>`; the same on every rank. Empty if
        there are none."""
        if not self.schedule.held_out:
            return {}
        [denominator] = denominators(self.batch, [self.schedule.held_out], self.job.loss)
        names = ["loss", "items", "pairs", "accuracy", "margin"]
        sums = dict.fromkeys(names, torch.zeros((), dtype=torch.float64, device=self.device))
        with self.phases.phase("evaluate"), self.policy.adapter_fixed():
            for index, counts in self._passes(self.schedule.rank_held_out):
                self.phases.announce("evaluate")
                # For the collectives alone: this rank may have no reference log-probs of it.
                if not counts:
                    self._forward(self.batch.row(index))
                    continue
                row_sums = self._loss(self.batch.row(index), denominator).sums
                if self._reports:
                    sums = {name: value + row_sums.get(name, 0.0) for name, value in sums.items()}
            totals = self._over_rows(sums, dist.ReduceOp.SUM)
        metrics = {"held_out_loss": totals["loss"], "held_out_tokens": totals["items"]}
        if totals["pairs"]:
            metrics |= {
                f"held_out_pair_{name}": totals[name] / totals["pairs"]
                for name in ("accuracy", "margin")
            }
        return metrics

    def _logprobs(self, phase: str, policy: AbstractContextManager[None]) -> dict[int, Tensor]:
        """Log-probs of every row that this rank will visit, without gradients."""
        logprobs: dict[int, Tensor] = {}
        with self.phases.phase(phase), policy, torch.no_grad(), self.policy.adapter_fixed():
            for row, _ in self._passes(self.schedule.visited_rows):
                self.phases.announce(phase)
                logprobs[row] = self._forward(self.batch.row(row)).logprobs
        return logprobs

    def _passes(self, rank_rows: Callable[[int], list[int]]) -> list[tuple[int, bool]]:
        """This data-parallel rank's rows, `(row, True)`. Where ranks compute experts for one
        another, all have equally many: more are of rank 0's first row, with False."""
        sizes = self.topology.sizes
        counted = [(row, True) for row in rank_rows(self.topology.place.data)]
        if sizes.expert_ranks == 1:
            return counted
        most = max(len(rank_rows(rank)) for rank in range(sizes.data))
        return counted + [(rank_rows(0)[0], False)] * (most - len(counted))

    def _mean_log_ratio(self) -> float:
        """Mean over the job's items of old - reference, in nats; the same on all ranks."""
        sums = {
            "items": torch.zeros((), dtype=torch.float64),
            "nats": torch.zeros((), dtype=torch.float64),
        }
        rows = self.schedule.rank_rows(self.job.optimizer.epochs, self.topology.place.data)
        for index in rows if self.policy.stage.last else ():
            old = self._old_logprobs.get(index)
            if old is None:
                old = self._tensor(self.batch.row(index).item_logprob)
            sums["items"] += len(old)
            sums["nats"] += (old.double() - self._reference_logprobs[index].double()).sum().cpu()
        totals = self._over_rows(sums, dist.ReduceOp.SUM)
        return totals["nats"] / totals["items"]

    def _over_rows(
        self, values: dict[str, Tensor], op: dist.ReduceOp.RedOpType
    ) -> dict[str, float]:
        """Values of this rank's rows, reduced over all rows."""
        totals = reduce_values(values, op, self.topology.data, self.device)
        return reduce_values(totals, op, self.topology.pipeline, torch.device("cpu"))

    def _optimizer_step(self, step: int, denominator: float) -> dict[str, float]:
        phases, optimizer = self.phases, self.optimizer
        with phases.phase("forward_backward"):
            optimizer.zero_grad()
            phases.watch.begin_step()
            sums, maxima = self._gradients(step, denominator)
        with phases.phase("optimizer"):
            optimizer.reduce_gradients()
            norm = optimizer.gradient_norm()
            means = item_metrics(
                self._over_rows(sums, dist.ReduceOp.SUM), self._over_rows(maxima, dist.ReduceOp.MAX)
            )
            self._check_finite(step, means, norm)
            self._check_sampler(step, means)
            optimizer.step(norm, rate := self.job.optimizer.rate(step))
        seconds, memory = phases.take()
        slowest = reduce_values({**seconds, **memory}, dist.ReduceOp.MAX, None, torch.device("cpu"))
        rows = self.schedule.steps[step]
        tokens = float(self.batch.row_num_tokens[list(rows)].sum())
        return {
            **means,
            "grad_norm": norm,
            "learning_rate": rate,
            "optimizer_step": float(self._steps_before + step + 1),
            **reward_metrics(self.batch, rows),
            **staleness(self.job),
            "rows": float(len(rows)),
            "tokens": tokens,
            "tokens_per_second": (
                tokens / max(slowest["forward_backward"] + slowest["optimizer"], 1e-9)
            ),
            **{f"seconds_{name}": slowest[name] for name in seconds},
            **{f"memory_{name}_bytes": slowest[name] for name in memory},
        }

    def _gradients(
        self, step: int, denominator: float
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """`_micro_steps`, which begin again if the memory runs out: without graphs, or with layers
        that keep less; to the same bits."""
        while True:
            try:
                return self._micro_steps(step, denominator)
            except torch.OutOfMemoryError:
                if not (
                    graphs.drop(self.policy) or (self._fitted and recompute.lower(self.policy))
                ):
                    raise
            # Outside of `except`, whose error holds the tensors of the frames that it left.
            self.optimizer.zero_grad()
            memory.release_cached()

    def _micro_steps(
        self, step: int, denominator: float
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Accumulate the gradients of this rank's rows; returns the `sums` and `maxima` of
        `LossOutput` over them."""
        sums: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}

        def losses() -> Iterator[Tensor]:
            for index, counts in self.schedule.micro_steps(step, self.topology.place.data):
                self.phases.announce("forward_backward")
                if self.fit:
                    self.fit, self._fitted = False, True
                    recompute.fit(self.policy, row_tensors(self.batch.row(index), self.device))
                output = self._loss(self.batch.row(index), denominator if counts else None)
                reports = counts and self._reports
                for name, value in output.sums.items():
                    part = value if reports else 0.0
                    sums[name] = sums.get(name, torch.zeros_like(value)) + part
                for name, value in output.maxima.items():
                    least = torch.full_like(value, -torch.inf)
                    part = value if reports else least
                    maxima[name] = torch.maximum(maxima.get(name, least), part)
                yield output.loss
                if not self._repeated:  # the first one has loaded all kernels
                    self._repeated = True
                    row = row_tensors(self.batch.row(index), self.device)
                    graphs.repeat(self.policy, row, self._num_micro_steps() - 1)

        with self.policy.adapter_fixed():
            self.policy.stage.backward(losses())
        return sums, maxima

    def _num_micro_steps(self) -> int:
        """Of this rank in the job."""
        steps, rank = range(len(self.schedule.steps)), self.topology.place.data
        return sum(len(self.schedule.micro_steps(step, rank)) for step in steps)

    def _loss(self, row: PackedRow, denominator: float | None) -> LossOutput:
        """The row's loss divided by `denominator`; None: all weights are zero."""
        outputs, loss, tensor = self._forward(row), self.job.loss, self._tensor
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
            mean_kl=self._mean_kl,
        )
        if isinstance(loss, SFTLoss):
            return sft_loss(items)
        if isinstance(loss, PreferenceLoss):
            group = self.batch.trajectory_group[row.item_trajectory]
            items.pair = tensor(np.unique(group, return_inverse=True)[1], torch.int64)
            items.rejected = tensor(row.item_rejected, torch.bool)
            items.reference_logprobs = self._reference_logprobs.get(row.index)
            return preference_loss(items, loss)
        items.advantages = tensor(row.item_weight / self._advantage_divisor)
        items.old_logprobs = items.sampler_logprobs = tensor(row.item_logprob)
        if loss.old_logprobs == "trainer":
            # A job of one optimizer step computes none before training: the old policy is the
            # current one.
            items.old_logprobs = self._old_logprobs.get(row.index, outputs.logprobs.detach())
        behind = self.job.base_step - row.item_policy_step
        items.steps_behind = tensor(np.where(row.item_policy_step < 0, -1, behind), torch.int64)
        items.reference_logprobs = self._reference_logprobs.get(row.index)
        return rl_loss(items, loss)

    def _tensor(self, values: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
        return memory.copy_to(torch.tensor(values, dtype=dtype), self.device)

    def _forward(self, row: PackedRow) -> ItemOutputs:
        temperature = self.job.loss.temperature if isinstance(self.job, RLJob) else 1.0
        return self.policy(row_tensors(row, self.device), temperature=temperature)

    def _check_finite(self, step: int, means: dict[str, float], norm: float) -> None:
        wrong = [name for name, value in means.items() if not np.isfinite(value)]
        if not np.isfinite(norm):
            names = self.optimizer.non_finite()
            listed = ", ".join(names[:3]) + (
                f" and {len(names) - 3} more" if len(names) > 3 else ""
            )
            wrong.append(f"the gradient of {listed or 'a parameter on another rank'}")
        if wrong:
            raise NonFinite(
                f"optimizer step {step + 1} of {len(self.schedule.steps)}: not finite:"
                f" {'; '.join(wrong)}. The step was not applied and no checkpoint is made. Look for"
                " extreme log-probs, rewards or advantages in the job's data, or lower the"
                " learning rate"
            )

    def _check_sampler(self, step: int, means: dict[str, float]) -> None:
        """Only in the first epoch: in later ones the policy may have learned what its sampler found
        impossible."""
        nats = means.get("above_sampler_max", 0.0)
        if nats > MAX_NATS and step * self.job.optimizer.epochs < len(self.schedule.steps):
            raise InvalidInput(
                f"optimizer step {step + 1} of {len(self.schedule.steps)}: the log-prob of a"
                f" trained token is {nats:.1f} nats above the one given with it. No sampler draws a"
                f" token that is more than {MAX_NATS:.0f} nats too rare. The step was not applied"
                " and no checkpoint is made. Give the log-probs that vLLM returned with the tokens,"
                " not a placeholder",
                field="groups.*.trajectories.*.turns.*.logprobs",
            )

    def _check_learned(self, norm: float, metrics: dict[str, float]) -> None:
        """Adam moves no parameter by more than about `learning_rate * gradient / eps`."""
        if norm < 1e-3 * (eps := self.job.optimizer.eps):
            shown = (
                "clip_fraction",
                "masked_fraction",
                "ratio_mean",
                "advantage_mean",
                "advantage_std",
            )
            raise NothingToLearn(
                f"the policy did not move: of {len(self.schedule.steps)} optimizer steps the"
                f" largest gradient has the norm {norm:.3g}, and optimizer.eps is {eps:.3g}. No"
                " checkpoint is made. In the last step "
                + ", ".join(f"{name} is {metrics[name]:.3g}" for name in shown if name in metrics)
                + ". Look for advantages near 0 and for log-probs of another policy, whose tokens"
                " are clipped or masked"
            )
