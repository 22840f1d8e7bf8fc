"""What a job measures about itself: seconds and memory per phase, and statistics reduced over ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.model import parallel
from tandem.model.device import device
from tandem.training.memory import MemoryWatch


class Phases:
    """Clock of one rank. Each phase is timed up to the device's completion; memory is read at its end.

    `announce(name)` is called as each phase begins (the heartbeat). Phases don't nest.
    """

    def __init__(self, announce: Callable[[str], None], watch: MemoryWatch) -> None:
        self._announce = announce
        self._watch = watch
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, dict[str, int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block under `name`; the same name again adds up, its memory is that of the last end."""
        self._announce(name)
        self._watch.begin()
        start = time.perf_counter()
        try:
            yield
        finally:
            device.synchronize()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            # Also of a phase that failed: what it held then is what one wants to know after running out of memory.
            self.memory[name] = self._watch.end(name)

    def beat(self, name: str) -> None:
        """A sign of life within a phase."""
        self._announce(name)

    def floor(self) -> None:
        """Between optimizer steps, with gradients gone: what is allocated now should be the same every time."""
        self._watch.floor()

    def take(self) -> tuple[dict[str, float], dict[str, int]]:
        """`(seconds per phase, bytes per "<phase>_<kind>")` since the last call; starts over."""
        memory = {f"{phase}_{kind}": n for phase, kinds in self.memory.items() for kind, n in kinds.items()}
        seconds, self.seconds, self.memory = self.seconds, {}, {}
        return seconds, memory

    def gather(self) -> dict[str, dict[str, Any]]:
        """Rank -> its `RankMemory` so far, as JSON has it. A collective of all ranks, for once in a job."""
        found = parallel.gather_objects(self._watch.report().model_dump())
        return {str(rank): memory for rank, memory in enumerate(found)}


def all_reduce(values: Mapping[str, Tensor | float], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None,
               on: torch.device) -> dict[str, float]:  # fmt: skip
    """`values` (scalars, the same names on every rank) reduced over `group` in float64, in one collective."""
    if not values:
        return {}
    vector = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=on) for value in values.values()])
    parallel.all_reduce(vector, op, group)
    return dict(zip(values, vector.tolist(), strict=True))


def token_means(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """The statistics of `losses` under the names that people read. Means are over trained tokens, unweighted."""
    items = sums["items"]
    names = {
        "entropy": "entropy", "ratio": "ratio_mean", "clipped": "clip_fraction", "advantage": "advantage_mean",
        "kl_sampler": "kl_sampler", "logprob_difference": "sampler_logprob_difference",
        "kl_reference": "kl_reference", "tis": "importance_weight_mean",
    }  # fmt: skip
    out = {"loss": sums["loss"], "trainable_tokens": items}
    out |= {public: sums[name] / items for name, public in names.items() if name in sums}
    if "advantage_square" in sums:
        variance = sums["advantage_square"] / items - out["advantage_mean"] ** 2
        out["advantage_std"] = math.sqrt(max(variance, 0.0))
    if "ratio" in maxima:
        out["ratio_max"] = maxima["ratio"]
    return out
