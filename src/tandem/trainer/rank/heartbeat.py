"""A rank's heartbeat: a file that it rewrites while it makes progress."""

import time
from contextlib import suppress
from pathlib import Path

from tandem.errors import SpoolUnusable
from tandem.spool import fs
from tandem.spool.schema import Beat
from tandem.training.phases import MemoryWatch

# Within a phase the file is rewritten at most this often.
BEAT_SECONDS = 0.5


class Heartbeat:
    """`beat.<rank>` (`tandem.spool.schema.Beat`) of one attempt, read by the runner and the exporter."""

    def __init__(self, path: Path, watch: MemoryWatch) -> None:
        self._path = path
        self._watch = watch
        self._phase = ""
        self._written = 0.0
        self.step = 0  # optimizer steps done
        self.steps = 0  # optimizer steps of the job; 0: not known yet

    def __call__(self, phase: str) -> None:
        """Write the file if the phase is new or the last beat is old enough."""
        if phase != self._phase or time.time() - self._written >= BEAT_SECONDS:
            self.write(phase)

    def write(self, phase: str) -> None:
        """Write the file now. If the volume refuses it, the rank goes on."""
        self._phase, self._written = phase, time.time()
        beat = Beat(time=self._written, phase=phase, step=self.step, steps=self.steps, **self._watch.beat())
        with suppress(SpoolUnusable, OSError):
            fs.write_json_atomic(self._path, beat, durable=False)
