"""The one step loop, for RL and for SFT (R13). What differs is the loss; where memory goes is nobody's business here
(R14): no offloading, no process management, no files.

Within one optimizer step each rank runs its micro steps (rows), gradients are summed over data-parallel ranks, checked,
clipped and applied. Losses are divided by a denominator over all ranks' rows before the backward pass, so that sum is
the gradient of the whole step's loss (R20).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tandem.data.packed import PackedBatch, PackedRow
from tandem.model.parallel import Topology, data_parallel_group
from tandem.model.policy import ItemOutputs, Policy, row_tensors
from tandem.spool.schema import RLJob, RunSpec, SFTJob
from tandem.training.losses import Items, LossOutput, rl_loss, sft_loss
from tandem.training.optimizer import AdapterOptimizer, NonFinite
from tandem.training.phases import Phases, all_reduce, token_means
from tandem.training.schedule import Plan, denominators, plan_steps, row_weights


class Reporter(Protocol):
    """Told after each optimizer step: its number from 1, how many there are, and its metrics (on every rank)."""

    def __call__(self, step: int, steps: int, metrics: dict[str, float]) -> None: ...


@dataclass
class Setup:
    """Everything the loop needs, loaded and on its device."""

    run: RunSpec
    job: RLJob | SFTJob
    batch: PackedBatch
    policy: Policy
    optimizer: AdapterOptimizer
    topology: Topology
    device: torch.device
    phases: Phases
    reference: Callable[[], AbstractContextManager[None]]
    """Within it, the policy computes as the KL's reference does; afterwards it is exactly what it was."""


@dataclass
class _Passes:
    """Log-probs computed before training: row -> float32 [items]."""

    old: dict[int, Tensor] = field(default_factory=dict)
    reference: dict[int, Tensor] = field(default_factory=dict)


def make_plan(run: RunSpec, job: RLJob | SFTJob, batch: PackedBatch, topology: Topology) -> Plan:
    """The job's optimizer steps; raises InvalidInput as `plan_steps` does."""
    return plan_steps(
        batch,
        seed=run.seed,
        base_step=job.base_step,
        epochs=job.optimizer.epochs,
        rows_per_step=job.optimizer.grad_accumulation_sequences,
        data_parallel=topology.dp,
    )


def train(setup: Setup, report: Reporter) -> dict[str, float]:
    """Run the whole job; returns the last optimizer step's metrics, the same on every rank.

    Raises NonFinite, naming the step and what was not finite, before that step is applied.
    """
    plan = make_plan(setup.run, setup.job, setup.batch, setup.topology)
    totals = denominators(setup.batch, plan, setup.job.loss)
    passes = _passes_before(setup, plan)
    metrics: dict[str, float] = {}
    for step in range(len(plan.steps)):
        metrics = _optimizer_step(setup, plan, step, totals[step], passes)
        report(step + 1, len(plan.steps), metrics)
    return metrics


def _optimizer_step(setup: Setup, plan: Plan, step: int, denominator: float, passes: _Passes) -> dict[str, float]:
    phases, optimizer, topology = setup.phases, setup.optimizer, setup.topology
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    with phases.phase("forward_backward"):
        optimizer.zero_grad()
        phases.floor()
        for index, counts in plan.micro_steps(step, topology.dp_rank):
            phases.beat("forward_backward")
            out = _micro_step(setup, index, counts, denominator, passes)
            out.loss.backward()
            for name, value in out.sums.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + (value if counts else 0.0)
            for name, value in out.maxima.items():
                maxima[name] = torch.maximum(maxima.get(name, torch.full_like(value, -torch.inf)),
                                             value if counts else torch.full_like(value, -torch.inf))  # fmt: skip
    with phases.phase("optimizer"):
        optimizer.reduce_gradients()
        norm = optimizer.gradient_norm()
        group = data_parallel_group()
        means = token_means(
            all_reduce(sums, dist.ReduceOp.SUM, group, setup.device),
            all_reduce(maxima, dist.ReduceOp.MAX, group, setup.device),
        )
        _check_finite(optimizer, f"optimizer step {step + 1} of {len(plan.steps)}", means, norm)
        optimizer.step(norm)
    seconds, memory = phases.take()
    slowest = all_reduce({**seconds, **memory}, dist.ReduceOp.MAX, None, torch.device("cpu"))
    spent = slowest["forward_backward"] + slowest["optimizer"]
    tokens = int(setup.batch.row_num_tokens[list(plan.steps[step])].sum())
    return {
        **means,
        "grad_norm": norm,
        "learning_rate": setup.job.optimizer.learning_rate,
        **_rewards(setup.batch, plan.steps[step]),
        "rows": float(len(plan.steps[step])),
        "tokens": float(tokens),
        "tokens_per_second": tokens / max(spent, 1e-9),
        **{f"seconds_{name}": slowest[name] for name in seconds},
        **{f"memory_{name}_bytes": slowest[name] for name in memory},
    }


def _micro_step(setup: Setup, index: int, counts: bool, denominator: float, passes: _Passes) -> LossOutput:
    row, job = setup.batch.row(index), setup.job
    outputs = _forward(setup, row)
    weights = row_weights(setup.batch, row, job.loss)[0] / denominator if counts else np.zeros(len(row.item_target))

    def tensor(values: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device=setup.device, dtype=dtype)

    sequence = row.item_sequence - row.item_sequence[0]
    sampler = tensor(row.item_logprob) if isinstance(job, RLJob) else None
    old = sampler
    if isinstance(job, RLJob) and job.loss.old_logprobs == "trainer":
        # With a single optimizer step there was no pass: the policy before it is the policy now.
        old = passes.old.get(index, outputs.logprobs.detach())
    items = Items(
        logprobs=outputs.logprobs,
        entropy=outputs.entropy,
        weights=tensor(weights),
        advantages=tensor(row.item_advantage),
        sequence=tensor(sequence, torch.int64),
        num_sequences=int(sequence[-1]) + 1,
        old_logprobs=old,
        sampler_logprobs=sampler,
        reference_logprobs=passes.reference.get(index),
    )
    return rl_loss(items, job.loss) if isinstance(job, RLJob) else sft_loss(items)


def _forward(setup: Setup, row: PackedRow) -> ItemOutputs:
    temperature = setup.job.loss.temperature if isinstance(setup.job, RLJob) else 1.0
    return setup.policy(row_tensors(row, setup.device), temperature=temperature)


def _passes_before(setup: Setup, plan: Plan) -> _Passes:
    """Passes without gradients over every row this rank will visit: the policy's own, and the reference's."""
    passes = _Passes()
    if not isinstance(setup.job, RLJob):
        return passes
    loss = setup.job.loss
    if loss.old_logprobs == "trainer" and len(plan.steps) > 1:
        with setup.phases.phase("old_logprobs"):
            passes.old = _logprobs(setup, plan, "old_logprobs")
    if loss.kl_coef or loss.kl_metric:
        with setup.phases.phase("reference"), setup.reference():
            passes.reference = _logprobs(setup, plan, "reference")
    return passes


@torch.no_grad()
def _logprobs(setup: Setup, plan: Plan, phase: str) -> dict[int, Tensor]:
    out: dict[int, Tensor] = {}
    for index, _ in plan.first_visits(setup.topology.dp_rank):
        setup.phases.beat(phase)
        out[index] = _forward(setup, setup.batch.row(index)).logprobs.detach()
    return out


def _check_finite(optimizer: AdapterOptimizer, where: str, means: dict[str, float], norm: float) -> None:
    wrong = [name for name, value in means.items() if not np.isfinite(value)]
    if not np.isfinite(norm):
        names = optimizer.non_finite()
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        wrong.append(f"the gradient of {listed or 'a parameter on another rank'}")
    if wrong:
        raise NonFinite(
            f"{where}: not finite: {'; '.join(wrong)}. The step was not applied and no checkpoint is made. Look for "
            "extreme log-probs, rewards or advantages in the job's data, or lower the learning rate"
        )


def _rewards(batch: PackedBatch, rows: tuple[int, ...]) -> dict[str, float]:
    """Statistics over the trajectories that the rows train, each once; for SFT only how many."""
    seen = np.unique(np.concatenate([batch.row(row).item_trajectory for row in rows]))
    rewards = batch.trajectory_reward[seen].astype(np.float64)
    count = {"trajectories": float(len(seen))}
    if np.isnan(rewards).any():
        return count
    return count | {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "reward_min": float(rewards.min()),
        "reward_max": float(rewards.max()),
    }
