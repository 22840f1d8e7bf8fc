"""The step loop. RL, SFT and preference training have the same loop, except for the loss. The loop
deals with no files, processes or offloading.

In an optimizer step each rank runs its micro steps; a micro step computes one row. After the micro
steps, gradients are summed over data-parallel ranks, checked, clipped and applied. Before the
backward pass, each loss is divided by the denominator of all ranks' rows. The sum of all ranks'
gradients is the gradient of the whole step's loss.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tandem.data.packed_format import PackedBatch
from tandem.errors import InvalidInput, NothingToLearn
from tandem.model import graphs
from tandem.model.device import memory
from tandem.model.parallel import Topology
from tandem.model.policy import Policy
from tandem.spool.schema import BatchJob, PreferenceLoss, RLLoss, RunSpec
from tandem.training.losses import MAX_NATS
from tandem.training.optimizer import AdapterOptimizer, NonFinite
from tandem.training.phases import Phases, item_metrics, reduce_values, reward_metrics, staleness
from tandem.training.rows import Fit, RowLosses, Totals
from tandem.training.schedule import denominators, make_schedule
from tandem.training.sharded_adam import ShardedAdam


@dataclass
class Training:
    """The optimizer steps of one job, on a model that is loaded. Raises InvalidInput as
    `make_schedule` does."""

    run: RunSpec
    job: BatchJob
    batch: PackedBatch
    policy: Policy
    optimizer: AdapterOptimizer | ShardedAdam
    topology: Topology
    device: torch.device
    phases: Phases
    reference: Callable[[int | Literal["base"]], AbstractContextManager[None]]
    """Returns a context manager. Inside it, the policy computes the reference policy: the base
    model or the policy of a step. Afterwards the policy is exactly as before."""
    fit: bool = False
    """Whether the device's memory decides how many tensors the layers keep for the backward pass
    (`tandem.model.recompute`)."""

    def __post_init__(self) -> None:
        self.schedule = make_schedule(
            self.batch,
            self.job.optimizer,
            self.run.seed,
            self.job.base_step,
            self.topology.sizes.data,
        )
        self._steps_before = self.optimizer.steps  # optimizer steps of earlier jobs
        self._rows = RowLosses(
            self.batch,
            self.job.loss,
            self.policy,
            self.topology,
            self.device,
            self.phases,
            Fit(self.policy, self.device, on=self.fit),
            self.job.base_step,
        )
        steps, rank = range(len(self.schedule.steps)), self.topology.place.data
        self._rows.passes = sum(len(self.schedule.micro_steps(step, rank)) for step in steps)

    def train(self, report: Callable[[int, dict[str, float]], None]) -> dict[str, float]:
        """Run all optimizer steps, numbered from 1, and call `report(step, metrics)` after each.
        Returns the metrics of the last step, which are the same on every rank.

        Raises NonFinite before a step with NaN or infinity is applied. Raises InvalidInput before a
        step is applied if the step's log-probs can't come from a sampler. Raises NothingToLearn
        after the last step if no step of an RL job moved the policy.
        """
        totals, loss = denominators(self.batch, self.schedule.steps, self.job.loss), self.job.loss
        if isinstance(loss, RLLoss):
            if loss.old_logprobs == "trainer" and (len(totals) > 1 or loss.kl_in == "advantage"):
                self._rows.old_logprobs = self._logprobs("old_logprobs", nullcontext())
            if loss.kl_coef or loss.kl_metric:
                self._rows.reference_logprobs = self._logprobs(
                    "reference", self.reference(loss.kl_reference)
                )
            if loss.kl_in == "advantage":
                epochs, rank = self.job.optimizer.epochs, self.topology.place.data
                rows = self.schedule.rank_rows(epochs, rank)
                self._rows.mean_kl = self._rows.mean_log_ratio(rows)
        if isinstance(loss, PreferenceLoss) and loss.kind != "simpo":
            start = nullcontext() if loss.reference == "start" else self.reference(loss.reference)
            self._rows.reference_logprobs = self._logprobs("reference", start)
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
        """The metrics `held_out_<metric>` of the held-out rows, such as their loss; the same on
        every rank. The result is empty if there are no held-out rows."""
        if not self.schedule.held_out:
            return {}
        [denominator] = denominators(self.batch, [self.schedule.held_out], self.job.loss)
        names = ["loss", "items", "pairs", "accuracy", "margin"]
        sums = dict.fromkeys(names, torch.zeros((), dtype=torch.float64, device=self.device))
        with self.phases.phase("evaluate"), self.policy.adapter_fixed():
            for index, counts in self._passes(self.schedule.rank_held_out):
                self.phases.announce("evaluate")
                # A row that does not count is computed only so that the collective operations of
                # all ranks match. A rank may have no reference log-probs for a row that does not
                # count.
                if not counts:
                    self._rows.forward(self.batch.row(index))
                    continue
                row = self.batch.row(index)
                row_sums = self._rows.of_row(row, self._rows.forward(row), denominator).sums
                if self._rows.reports:
                    sums = {name: value + row_sums.get(name, 0.0) for name, value in sums.items()}
            totals = self._rows.over_rows(sums, dist.ReduceOp.SUM)
        metrics = {"held_out_loss": totals["loss"], "held_out_tokens": totals["items"]}
        if totals["pairs"]:
            metrics |= {
                f"held_out_pair_{name}": totals[name] / totals["pairs"]
                for name in ("accuracy", "margin")
            }
        return metrics

    def _logprobs(self, phase: str, policy: AbstractContextManager[None]) -> dict[int, Tensor]:
        """Log-probs of every row that this rank will visit, computed without gradients."""
        logprobs: dict[int, Tensor] = {}
        with self.phases.phase(phase), policy, torch.no_grad(), self.policy.adapter_fixed():
            for row, _ in self._passes(self.schedule.visited_rows):
                self.phases.announce(phase)
                logprobs[row] = self._rows.forward(self.batch.row(row)).logprobs
        return logprobs

    def _passes(self, rank_rows: Callable[[int], list[int]]) -> list[tuple[int, bool]]:
        """This data-parallel rank's rows, as pairs `(row, True)`. If ranks compute experts for one
        another, all ranks get the same number of entries. A rank with fewer rows gets the entry
        `(first row of rank 0, False)` for each missing row."""
        sizes = self.topology.sizes
        counted = [(row, True) for row in rank_rows(self.topology.place.data)]
        if sizes.expert_ranks == 1:
            return counted
        most = max(len(rank_rows(rank)) for rank in range(sizes.data))
        return counted + [(rank_rows(0)[0], False)] * (most - len(counted))

    def _optimizer_step(self, step: int, denominator: float) -> dict[str, float]:
        phases, optimizer = self.phases, self.optimizer
        with phases.phase("forward_backward"):
            optimizer.zero_grad()
            phases.watch.begin_step()
            totals = self._gradients(step, denominator)
        with phases.phase("optimizer"):
            optimizer.reduce_gradients()
            norm = optimizer.gradient_norm()
            means = item_metrics(
                self._rows.over_rows(totals.sums, dist.ReduceOp.SUM),
                self._rows.over_rows(totals.maxima, dist.ReduceOp.MAX),
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

    def _gradients(self, step: int, denominator: float) -> Totals:
        """Computes the step's gradients. If memory runs out, the gradients are computed again
        without CUDA graphs, or with layers that keep fewer tensors. The recomputed gradients are
        bit-identical."""
        micro_steps = self.schedule.micro_steps(step, self.topology.place.data)
        while True:
            try:
                return self._rows.add_gradients(micro_steps, denominator)
            except torch.OutOfMemoryError:
                if not (graphs.drop(self.policy) or self._rows.fit.lower()):
                    raise
            # The retry is prepared after the `except` block, because the error object keeps the
            # tensors of its stack frames alive.
            self.optimizer.zero_grad()
            memory.release_cached()

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
        """Raises InvalidInput if the policy gives a token a log-prob far above the sampler's. Only
        the first epoch is checked: in a later epoch, the policy may have learned tokens that its
        sampler found impossible."""
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
        """Raises NothingToLearn if the largest gradient norm is so small that Adam can't have
        changed the policy. Adam changes a parameter by at most about
        `learning_rate * gradient / eps`."""
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
                " are clipped or masked, or whose gates are closed (SAPO)"
            )
