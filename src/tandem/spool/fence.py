"""The fence between attempts: an attempt that was ended can no longer change the run or the job,
even if its processes continue much later.

An attempt commits its checkpoint by a rename out of the attempt's directory. The fence renames the
directory that would become the checkpoint. The file system therefore decides whether the rename of
the commit or the rename of the fence comes first. No client's cache affects the order of the two
renames. A program that ends an attempt looks for the attempt's checkpoint after the fence.
"""

import time
from contextlib import suppress
from pathlib import Path

from tandem.errors import SpoolUnusable, VolumeFull
from tandem.spool import fs
from tandem.spool.schema import TERMINAL, Event

_TRIES, _PAUSE_SECONDS = 50, 0.1


def end(directory: Path) -> None:
    """Permanently ends the attempt whose files are in `directory`. Raises SpoolUnusable if the
    directory can't be removed from the volume."""
    if not fs.exists(directory):
        return
    with suppress(VolumeFull):  # the loop below ends the attempt even without the mark file
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
    """Removes the directories in which the attempt stages its files. Each staged directory itself
    is renamed. If only `directory` were renamed, a process with an open handle of `directory` could
    still use the staged directories."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in directory.iterdir():
            if path.is_dir():
                fs.remove_tree(path)


def mark(directory: Path) -> Path:
    """The file that marks the attempt as ended."""
    return directory / "ended"


class LivingAttempts:
    """Filters a job's events, which are given in order. The filter leaves out events that an
    attempt wrote after its end."""

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
