"""Heartbeats of an attempt's ranks, as the runner sees them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from tandem.spool.paths import beat_file
from tandem.spool.schema import Beat


@dataclass(frozen=True)
class RankProgress:
    rank: int
    silent: float  # seconds since the heartbeat last changed, or since the start
    phase: str  # with the optimizer step; "start" before the first heartbeat

    def __str__(self) -> str:
        return f"rank {self.rank} (phase {self.phase!r}, silent for {self.silent:.0f} s)"


class Heartbeats:
    """Follows `beat.<rank>` files. A rank makes progress when its file changes, timed by this process's clock, because
    the ranks' and the volume's clocks may be wrong."""

    def __init__(self, work: Path, ranks: int) -> None:
        self._work = work
        now = time.monotonic()
        self._last: dict[int, tuple[bytes, float]] = dict.fromkeys(range(ranks), (b"", now))

    def read(self) -> list[RankProgress]:
        """Every rank's progress, the longest silent first."""
        now = time.monotonic()
        for rank, (before, _) in self._last.items():
            try:
                content = beat_file(self._work, rank).read_bytes()
            except OSError:
                continue  # not written yet, or the volume is gone: both count as silence
            if content != before:
                self._last[rank] = (content, now)
        ranks = [RankProgress(rank, now - changed, _phase(beat)) for rank, (beat, changed) in self._last.items()]
        return sorted(ranks, key=lambda progress: -progress.silent)


def _phase(content: bytes) -> str:
    try:
        beat = Beat.model_validate_json(content)
    except ValidationError:
        return "start"
    return f"{beat.phase} {beat.step}"
