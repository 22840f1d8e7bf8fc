"""An optimizer step's metrics, as its event and the checkpoint's manifest have them."""

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tandem.data.packed_format import PackedBatch
from tandem.model import parallel
from tandem.spool.schema import JobSpec

_MEANS = {
    "entropy": "entropy", "ratio": "ratio_mean", "clipped": "clip_fraction", "advantage": "advantage_mean",
    "kl_sampler": "kl_sampler", "logprob_difference": "sampler_logprob_difference", "kl_reference": "kl_reference",
    "importance": "importance_weight_mean", "masked": "masked_fraction",
}  # fmt: skip
"""Sum in `tandem.training.losses.LossOutput` -> metric, its mean over items."""
_OF_PAIRS = {"accuracy": "pair_accuracy", "margin": "reward_margin", "chosen_reward": "chosen_reward",
             "rejected_reward": "rejected_reward"}  # fmt: skip


def all_reduce(values: Mapping[str, Tensor | float], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None,
               device: torch.device) -> dict[str, float]:  # fmt: skip
    """`values` (scalars, the same names on every rank) reduced over `group` in float64, in one collective."""
    if not values:
        return {}
    vector = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values.values()])
    parallel.all_reduce(vector, op, group)
    return dict(zip(values, vector.tolist(), strict=True))


def item_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """Metrics from the sums and maxima of `losses.LossOutput` over all rows. Means are over items, unweighted."""
    items = sums["items"]
    metrics = {"loss": sums["loss"], "trainable_tokens": items}
    metrics |= {metric: sums[name] / items for name, metric in _MEANS.items() if name in sums}
    metrics |= {metric: sums[name] / sums["pairs"] for name, metric in _OF_PAIRS.items() if name in sums}
    if "ratio" in maxima:  # RL
        variance = sums["advantage_square"] / items - metrics["advantage_mean"] ** 2
        metrics |= {"advantage_std": math.sqrt(max(variance, 0.0)), "ratio_max": maxima["ratio"]}
        metrics |= {"above_sampler_max": maxima["above_sampler"]}
    return metrics


def reward_metrics(batch: PackedBatch, rows: tuple[int, ...]) -> dict[str, float]:
    """How many trajectories the rows train and, for RL, statistics of their rewards; each trajectory counts once."""
    trajectories = np.unique(np.concatenate([batch.row(row).item_trajectory for row in rows]))
    rewards = batch.trajectory_reward[trajectories].astype(np.float64)
    count = {"trajectories": float(len(trajectories))}
    if np.isnan(rewards).any():  # SFT, DPO
        return count
    statistics = {"mean": rewards.mean(), "std": rewards.std(), "min": rewards.min(), "max": rewards.max()}
    return count | {f"reward_{name}": float(value) for name, value in statistics.items()}


def staleness(job: JobSpec) -> dict[str, float]:
    """By how many checkpoints the job's turns are older than the one that it starts from."""
    data, base = job.data, job.base_step
    if data.policy_step_min is None or data.policy_step_mean is None:
        return {}
    return {"off_policy_steps_max": float(base - data.policy_step_min),
            "off_policy_steps_mean": base - data.policy_step_mean}  # fmt: skip
