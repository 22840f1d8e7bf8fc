"""A rank's memory: one owner of the allocator's peaks, so that each phase has its own and the attempt has one too."""

from __future__ import annotations

from typing import Any

from tandem.model.device import device
from tandem.spool.schema import RankMemory

_PEAK = "_peak"


class MemoryWatch:
    """Nothing here waits for the device. What ends before it has started has no memory."""

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}
        self._phases: dict[str, dict[str, int]] = {}
        self._highest: dict[str, dict[str, int]] = {}
        self._floor: int | None = None
        self._used_peak = 0

    def begin(self) -> None:
        """A phase begins: what peaked before belongs to the attempt only."""
        if device.started():
            self._stats()
            device.reset_peaks()

    def end(self, phase: str) -> dict[str, int]:
        """A phase has ended; its bytes, as `tandem.spool.schema.RankMemory` has them."""
        if not device.started():
            return {}
        stats = self._stats()
        now = {name: stats[name] for name in ("allocated", "reserved")}
        now |= {"device_used": self._device(), "host_pinned": stats.get("host_pinned", 0)}
        now["peak"] = stats["allocated_peak"]
        if phase in self._phases:
            before = self._highest.get(phase, self._phases[phase])
            self._highest[phase] = {name: max(value, before[name]) for name, value in now.items()}
        self._phases[phase] = now
        return now

    def report(self) -> RankMemory:
        """Every phase so far."""
        return RankMemory(uuid=device.uuid(), phases=self._phases, highest=self._highest)

    def floor(self) -> None:
        """An optimizer step begins and gradients are gone."""
        self._floor = device.allocated()

    def beat(self) -> dict[str, Any]:
        """The fields of a `tandem.spool.schema.Beat` that are about memory."""
        if not device.started():
            return {}
        return {
            **dict(self.report()),
            "memory": self._stats() | self._peaks,
            "step_floor": self._floor,
            "device_used": self._device(),
            "device_used_peak": self._used_peak,
        }

    def _stats(self) -> dict[str, int]:
        """The allocator's own; the attempt's peaks are kept up with them."""
        stats = device.memory_stats()
        for name, value in stats.items():
            if name.endswith(_PEAK):
                self._peaks[name] = max(self._peaks.get(name, 0), value)
        return stats

    def _device(self) -> int:
        used = device.used()
        self._used_peak = max(self._used_peak, used)
        return used
