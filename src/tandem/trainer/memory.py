"""A rank's memory: one owner of the allocator's peaks, so that each phase has its own and the attempt has one too."""

from __future__ import annotations

from typing import Any

from tandem.model import device

_PEAK = "_peak"


class MemoryWatch:
    """Nothing here waits for the device."""

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}
        self._phase_peaks: dict[str, int] = {}
        self._floor: int | None = None
        self._used_peak = 0

    def begin(self) -> None:
        """A phase begins: what peaked before belongs to the attempt only."""
        self._stats()
        device.reset_peaks()

    def end(self, phase: str) -> dict[str, int]:
        """A phase has ended; its bytes: `allocated`, `reserved` and `device_used` now, `peak` allocated within it."""
        stats = self._stats()
        self._phase_peaks[phase] = stats["allocated_peak"]
        now = {name: stats[name] for name in ("allocated", "reserved")}
        return {**now, "device_used": self._device(), "peak": stats["allocated_peak"]}

    def floor(self) -> None:
        """An optimizer step begins and gradients are gone."""
        self._floor = device.allocated()

    def beat(self) -> dict[str, Any]:
        """The fields of a `tandem.spool.schema.Beat` that are about memory."""
        return {
            "uuid": device.uuid(),
            "memory": self._stats() | self._peaks,
            "phase_peaks": self._phase_peaks,
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
