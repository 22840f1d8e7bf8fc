"""A rank's heartbeat, which shows the runner that the rank makes progress."""

import time
from contextlib import suppress
from pathlib import Path

from tandem.errors import SpoolUnusable
from tandem.spool import fs
from tandem.spool.schema import Beat
from tandem.training.phases import MemoryWatch

BEAT_SECONDS = 0.5
"""The minimum seconds between two writes of the heartbeat within a phase."""


class Heartbeat:
    """The file `beat.<rank>` of one attempt (`tandem.spool.schema.Beat`). The runner and the
    exporter read the file."""

    def __init__(self, path: Path, watch: MemoryWatch) -> None:
        self._path = path
        self._watch = watch
        self._phase = ""
        self._written = 0.0  # time of the last write, by the monotonic clock
        self.step = 0  # optimizer steps done
        self.steps = 0  # optimizer steps of the job; 0: not known yet

    def __call__(self, phase: str) -> None:
        """Writes the heartbeat if the phase is new, or if BEAT_SECONDS have passed since the last
        write."""
        if phase != self._phase or time.monotonic() - self._written >= BEAT_SECONDS:
            self.write(phase)

    def write(self, phase: str) -> None:
        """Write the heartbeat's file now. If the volume refuses the write, the rank continues."""
        self._phase, self._written = phase, time.monotonic()
        beat = Beat(
            time=time.time(), phase=phase, step=self.step, steps=self.steps, **self._watch.beat()
        )
        with suppress(SpoolUnusable, OSError):
            fs.write_json_atomic(self._path, beat, durable=False)
