"""Measures the seconds and the device bytes of one rank's phases, and computes the metrics of an
optimizer step."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tandem.data.packed_format import PackedBatch
from tandem.model import device, parallel
from tandem.model.device import memory
from tandem.spool.schema import BatchJob, RankMemory

_MEANS = {
    "entropy": "entropy",
    "ratio": "ratio_mean",
    "clipped": "clip_fraction",
    "advantage": "advantage_mean",
    "kl_sampler": "kl_sampler",
    "logprob_difference": "sampler_logprob_difference",
    "kl_reference": "kl_reference",
    "importance": "importance_weight_mean",
    "masked": "masked_fraction",
}
"""Name of a sum in `tandem.training.losses.LossOutput` -> name of the metric that is the sum's mean
over items."""
_AGES = ("fresh", "stale")
"""Groups of tokens by age: `fresh` tokens were sampled by the job's base step, `stale` tokens by an
older step."""
_PAIR_MEANS = {
    "accuracy": "pair_accuracy",
    "margin": "reward_margin",
    "chosen_reward": "chosen_reward",
    "rejected_reward": "rejected_reward",
}


class MemoryWatch:
    """One rank's memory: the values at the end of each phase, and the peaks within each phase and
    within the attempt. No other code may reset the allocator's peaks. Before the device has
    started, the watch reports nothing. The allocator's counts start at 0 in each attempt, even in a
    rank that runs several jobs."""

    def __init__(self) -> None:
        stats = memory.stats() if device.started() else {}
        self._counts_before = {name: stats[name] for name in memory.COUNTS if name in stats}
        self._attempt_peaks: dict[str, int] = {}
        self._phases: dict[str, dict[str, int]] = {}
        self._highest: dict[str, dict[str, int]] = {}
        self._step_floor: int | None = None
        self._used_peak = 0

    def begin_phase(self) -> None:
        """Starts a phase. A peak that was reached before the phase belongs to the attempt, not to
        the phase."""
        if device.started():
            self._allocator_stats()
            memory.reset_peaks()

    def end_phase(self, name: str) -> dict[str, int]:
        """Record and return the phase's bytes. The keys are those of the phases in
        `tandem.spool.schema.RankMemory`."""
        if not device.started():
            return {}
        stats = self._allocator_stats()
        now = {
            "allocated": stats["allocated"],
            "reserved": stats["reserved"],
            "device_used": self._device_used(),
            "host_pinned": stats.get("host_pinned", 0),
            "peak": stats["allocated_peak"],
        }
        if name in self._phases:
            before = self._highest.get(name, self._phases[name])
            self._highest[name] = {kind: max(size, before[kind]) for kind, size in now.items()}
        self._phases[name] = now
        return now

    def begin_step(self) -> None:
        """Starts an optimizer step whose gradients were just zeroed. The memory that is allocated
        at the start of the step is `step_floor`."""
        self._step_floor = memory.stats()["allocated"]

    def report(self) -> RankMemory:
        return RankMemory(uuid=device.uuid(), phases=self._phases, highest=self._highest)

    def beat(self) -> dict[str, Any]:
        """The memory fields of `tandem.spool.schema.Beat`."""
        if not device.started():
            return {}
        return {
            **dict(self.report()),
            "memory": self._allocator_stats() | self._attempt_peaks,
            "step_floor": self._step_floor,
            "device_used": self._device_used(),
            "device_used_peak": self._used_peak,
        }

    def _allocator_stats(self) -> dict[str, int]:
        stats = memory.stats()
        for name, size in stats.items():
            if name.endswith("_peak"):
                self._attempt_peaks[name] = max(self._attempt_peaks.get(name, 0), size)
        return stats | {name: stats[name] - before for name, before in self._counts_before.items()}

    def _device_used(self) -> int:
        self._used_peak = max(self._used_peak, used := memory.used())
        return used


class Phases:
    """The clock with which a rank measures phases. Phases are not nested. `announce(name)` writes
    the heartbeat when a phase begins, and during long phases."""

    def __init__(self, announce: Callable[[str], None], watch: MemoryWatch) -> None:
        self.announce, self.watch = announce, watch
        self._seconds: dict[str, float] = {}
        self._memory: dict[str, dict[str, int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the `with` block, until the work that it queued on the device is complete.

        The seconds of blocks with the same name are added up. The memory is measured at the end of
        each block. A later block with the same name replaces the measured memory.
        """
        self.announce(name)
        self.watch.begin_phase()
        start = time.perf_counter()
        try:
            yield
        finally:
            device.synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            # The memory is measured even if the phase failed: after an out-of-memory error, the
            # value shows how much was allocated.
            self._memory[name] = self.watch.end_phase(name)

    def take(self) -> tuple[dict[str, float], dict[str, int]]:
        """A tuple: phase -> seconds, and "<phase>_<kind>" -> bytes, both since the last call."""
        sizes = {
            f"{phase}_{kind}": size
            for phase, kinds in self._memory.items()
            for kind, size in kinds.items()
        }
        seconds, self._seconds, self._memory = self._seconds, {}, {}
        return seconds, sizes

    def gather_memory(self) -> dict[str, dict[str, Any]]:
        """Rank -> the rank's `RankMemory` so far, as a JSON object. A collective operation of all
        ranks."""
        reports = parallel.gather_objects(self.watch.report().model_dump())
        return {str(rank): report for rank, report in enumerate(reports)}


def reduce_values(
    values: Mapping[str, Tensor | float],
    op: dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup | None,
    where: torch.device,
) -> dict[str, float]:
    """Name -> value, reduced over the group in float64. One collective reduces all values.

    Args:
        values: scalars, with the same names on every rank of the group.
        group: the process group; None means all ranks.
        where: the device of the collective.
    """
    if not values:
        return {}
    vector = torch.stack(
        [torch.as_tensor(value, dtype=torch.float64, device=where) for value in values.values()]
    )
    parallel.all_reduce(vector, op, group)
    return dict(zip(values, vector.tolist(), strict=True))


def item_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """Metrics from the sums and maxima of `losses.LossOutput` over all rows. Means are unweighted
    means over items. If there are no items, the means are left out."""
    items = sums["items"]
    metrics = {"loss": sums["loss"], "trainable_tokens": items}
    metrics |= {metric: sums[name] / items for name, metric in _MEANS.items() if name in sums}
    metrics |= {
        metric: sums[name] / sums["pairs"] for name, metric in _PAIR_MEANS.items() if name in sums
    }
    metrics |= {
        f"{_MEANS[name]}_{age}": sums[f"{name}_{age}"] / sums[f"items_{age}"]
        for age in _AGES
        if sums.get(f"items_{age}")
        for name in ("kl_sampler", "logprob_difference")
    }
    if "ratio" in maxima:  # RL
        variance = sums["advantage_square"] / items - metrics["advantage_mean"] ** 2
        metrics |= {"advantage_std": math.sqrt(max(variance, 0.0)), "ratio_max": maxima["ratio"]}
        metrics |= {"above_sampler_max": maxima["above_sampler"]}
    return metrics


def reward_metrics(batch: PackedBatch, rows: tuple[int, ...]) -> dict[str, float]:
    """The number of trajectories that the rows train and, for RL, statistics of the trajectories'
    rewards. Each trajectory counts once, even if it is in several rows."""
    trajectories = np.unique(np.concatenate([batch.row(row).item_trajectory for row in rows]))
    rewards = batch.trajectory_reward[trajectories].astype(np.float64)
    count = {"trajectories": float(len(trajectories))}
    if np.isnan(rewards).any():  # SFT, DPO
        return count
    statistics = {
        "mean": rewards.mean(),
        "std": rewards.std(),
        "min": rewards.min(),
        "max": rewards.max(),
    }
    return count | {f"reward_{name}": float(value) for name, value in statistics.items()}


def staleness(job: BatchJob) -> dict[str, float]:
    """The age of the job's turns, in steps. A turn's age is the job's base step minus the step that
    sampled the turn."""
    data, base = job.data, job.base_step
    if data.policy_step_min is None or data.policy_step_mean is None:
        return {}
    return {
        "off_policy_steps_max": float(base - data.policy_step_min),
        "off_policy_steps_mean": base - data.policy_step_mean,
    }
