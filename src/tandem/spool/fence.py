"""The fence between attempts: an attempt that was ended can no longer change the run or the job,
even if its processes continue much later.

An attempt makes its checkpoint by a rename out of its own directory. The fence renames the
directory that would become the checkpoint. So the file system decides which of the two renames
comes first, independent of any client's cache. A program that ends an attempt looks for the
attempt's checkpoint after the fence.
"""

import time
from contextlib import suppress
from pathlib import Path

from tandem.errors import SpoolUnusable, VolumeFull
from tandem.spool import fs
from tandem.spool.schema import TERMINAL, Event

_TRIES, _PAUSE_SECONDS = 50, 0.1


def end(directory: Path) -> None:
    """Ends for good the attempt whose files are in `directory`. Raises SpoolUnusable if the
    directory can't be removed from the volume."""
    if not fs.exists(directory):
        return
    with suppress(VolumeFull):  # the loop below ends the attempt even without the mark
        fs.write_atomic(mark(directory), b"")
    for _ in range(_TRIES):
        take_staged(directory)
        fs.remove_tree(directory)
        if not fs.exists(directory):
            fs.fsync_dir(directory.parent)
            return
        time.sleep(_PAUSE_SECONDS)
    raise SpoolUnusable(
        f"can't remove {directory}, from which an ended attempt could still make its checkpoint"
    )


def take_staged(directory: Path) -> None:
    """Removes the directories in which the attempt stages its files. Each staged directory is
    renamed itself: a process may hold a handle of `directory`, which stays valid if only
    `directory` is renamed."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in directory.iterdir():
            if path.is_dir():
                fs.remove_tree(path)


def mark(directory: Path) -> Path:
    """The file that marks the attempt as ended."""
    return directory / "ended"


class LivingAttempts:
    """Filters a job's events, which are given in order: events that an attempt wrote after it was
    ended are left out."""

    def __init__(self) -> None:
        self._ended = 0  # the newest attempt that has been ended

    def admits(self, event: Event) -> bool:
        """Whether the event was written before its attempt was ended."""
        if event.type == "claimed":
            self._ended = max(self._ended, event.attempt - 1)
        admitted = not event.attempt or event.attempt > self._ended or event.type in TERMINAL
        if event.type in ("requeued", *TERMINAL):
            self._ended = max(self._ended, event.attempt)
        return admitted
