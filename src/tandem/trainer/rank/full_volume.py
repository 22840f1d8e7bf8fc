"""Handles a full volume. A rank waits for space before the training, so that the training does not
fail later for lack of space."""

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tandem.errors import VolumeFull
from tandem.spool import Spool

SPACE_SECONDS = 660.0
"""Seconds to wait for space: longer than the controller's interval between two removals of old
checkpoints."""


def wait_for_space(spool: Spool, run: str, step: int, *, beat: Callable[[], None]) -> None:
    """Wait until the volume has space for the next checkpoint. Raises VolumeFull after
    SPACE_SECONDS.

    Args:
        step: the number of the checkpoint that the job starts from. The next checkpoint is at least
            as large as this checkpoint.
        beat: called twice a second during the wait.
    """
    files = spool.checkpoints.manifest(run, step).files
    needed = sum(entry.size for entry in files.values())
    end, told = time.monotonic() + SPACE_SECONDS, False
    while (free := _free_bytes(spool)) is not None and free < needed:
        problem = (
            f"{spool.root} has {free} bytes left, and the checkpoint that this job makes takes"
            f" {needed}"
        )
        if time.monotonic() > end:
            raise VolumeFull(f"{problem}; free space on the volume or enlarge it, then try again")
        if not told:
            with suppress(OSError):  # stdout is a file on the full volume
                print(f"waiting up to {SPACE_SECONDS:.0f} s for space: {problem}", flush=True)
            told = True
        beat()
        time.sleep(0.5)


def _free_bytes(spool: Spool) -> int | None:
    """Free bytes on the volume; None if the volume does not report them."""
    volume = os.statvfs(spool.root)
    return volume.f_bavail * volume.f_frsize if volume.f_blocks else None


@contextmanager
def event_left_out() -> Iterator[None]:
    """Skips an event that a full volume refuses. The rank's log, which is on the same volume,
    records the error if possible."""
    try:
        yield
    except VolumeFull:
        with suppress(OSError):
            traceback.print_exc()
