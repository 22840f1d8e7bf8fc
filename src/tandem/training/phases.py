"""What a rank measures of its phases: seconds, and bytes on its device."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tandem.model import device, parallel
from tandem.model.device import memory
from tandem.spool.schema import RankMemory


class MemoryWatch:
    """One rank's memory: at the end of each phase, and the peaks of each phase and of the attempt. Nothing else resets
    the allocator's peaks. Before the device has started it reports nothing."""

    def __init__(self) -> None:
        self._attempt_peaks: dict[str, int] = {}
        self._phases: dict[str, dict[str, int]] = {}
        self._highest: dict[str, dict[str, int]] = {}
        self._step_floor: int | None = None
        self._used_peak = 0

    def begin_phase(self) -> None:
        """Earlier peaks count for the attempt only."""
        if device.started():
            self._allocator_stats()
            memory.reset_peaks()

    def end_phase(self, name: str) -> dict[str, int]:
        """Record the phase's bytes, with the keys of `tandem.spool.schema.RankMemory`, and return them."""
        if not device.started():
            return {}
        stats = self._allocator_stats()
        now = {
            "allocated": stats["allocated"], "reserved": stats["reserved"], "device_used": self._device_used(),
            "host_pinned": stats.get("host_pinned", 0), "peak": stats["allocated_peak"],
        }  # fmt: skip
        if name in self._phases:
            before = self._highest.get(name, self._phases[name])
            self._highest[name] = {kind: max(size, before[kind]) for kind, size in now.items()}
        self._phases[name] = now
        return now

    def begin_step(self) -> None:
        """An optimizer step begins, and its gradients are zeroed: what is allocated now is the step's floor."""
        self._step_floor = memory.stats()["allocated"]

    def report(self) -> RankMemory:
        return RankMemory(uuid=device.uuid(), phases=self._phases, highest=self._highest)

    def beat(self) -> dict[str, Any]:
        """The fields of `tandem.spool.schema.Beat` that are about memory."""
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
        return stats

    def _device_used(self) -> int:
        self._used_peak = max(self._used_peak, used := memory.used())
        return used


class Phases:
    """One rank's clock. Phases don't nest. `announce(name)` writes the heartbeat, as a phase begins and within long
    ones."""

    def __init__(self, announce: Callable[[str], None], watch: MemoryWatch) -> None:
        self.announce, self.watch = announce, watch
        self._seconds: dict[str, float] = {}
        self._memory: dict[str, dict[str, int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block, up to the completion of the work that it queued on the device.

        The seconds of blocks with the same name add up; the memory is that at the end of the last one.
        """
        self.announce(name)
        self.watch.begin_phase()
        start = time.perf_counter()
        try:
            yield
        finally:
            device.synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            # Also if the phase failed: after running out of memory, this shows what was allocated.
            self._memory[name] = self.watch.end_phase(name)

    def take(self) -> tuple[dict[str, float], dict[str, int]]:
        """`(seconds by phase, bytes by "<phase>_<kind>")` since the last call."""
        sizes = {f"{phase}_{kind}": size for phase, kinds in self._memory.items() for kind, size in kinds.items()}
        seconds, self._seconds, self._memory = self._seconds, {}, {}
        return seconds, sizes

    def gather_memory(self) -> dict[str, dict[str, Any]]:
        """Each rank's `RankMemory` so far, as JSON objects by rank. A collective of all ranks."""
        reports = parallel.gather_objects(self.watch.report().model_dump())
        return {str(rank): report for rank, report in enumerate(reports)}
