"""Events of jobs: `events.jsonl` in the job's directory, one JSON object per line, appended under
the job's lock."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from tandem.errors import NotFound
from tandem.spool import fs
from tandem.spool.locks import file_lock
from tandem.spool.paths import Paths
from tandem.spool.schema import TERMINAL, Event, EventType
from tandem.system.plain_files import NotPlainError, descriptor

EVENTS_BYTES = 2**28
"""The most bytes of a job's events that are read at once: about 500,000 events."""
_TAIL_BYTES = 65536


class Events:
    """Any process may append events to any job. The `seq` of a job's events is 0, 1, 2, … without
    gaps, whichever processes append the events."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def append(
        self,
        job_id: str,
        type: EventType,  # noqa: A002
        *,
        attempt: int = 0,
        **data: Any,
    ) -> Event:
        """Adds one event, durably. If a dead process left the last line without a newline, adds the
        newline first. Raises SpoolUnusable if the volume refuses the write; the file is then
        unchanged. Raises NotFound (field `id`) if the job does not exist.

        Args:
            attempt: the number of the attempt, counted from 1; 0 if the event belongs to no
                attempt.
            data: must be representable as JSON; NaN and infinities become null.
        """
        with file_lock(self._paths.job_lock(job_id)):
            path = self._paths.events_file(job_id)
            if not path.parent.is_dir():
                raise NotFound(f"there is no job {job_id!r}", field="id")
            return self._append(path, job_id, type, attempt, data)

    def _append(
        self,
        path: Path,
        job_id: str,
        type: EventType,  # noqa: A002
        attempt: int,
        data: dict[str, Any],
    ) -> Event:
        with fs.volume_errors(path), self._opened(path) as file:
            fd, size = file.fileno(), file.tell()
            seq, terminated = _next_seq(fd, size)
            event = Event(
                seq=seq, time=time.time(), job=job_id, type=type, attempt=attempt, data=data
            )
            # The line is ASCII only, because many readers treat U+2028 and similar characters as
            # the end of a line.
            content = json.dumps(json.loads(event.model_dump_json()))
            try:
                fs.write_all(fd, (("" if terminated else "\n") + content + "\n").encode())
                os.fsync(fd)
            except BaseException:
                os.ftruncate(fd, size)
                if size == 0:
                    path.unlink()
                raise
            if size == 0:
                fs.fsync_dir(path.parent)
            return Event.model_validate_json(content)

    def _opened(self, path: Path) -> BinaryIO:
        """The event file, opened for appending. Anything at the path that is not a regular file is
        removed, so that the job's end can be recorded."""
        try:
            fd = descriptor(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            # An event file of more than EVENTS_BYTES is emptied, because readers ignore such a file
            # and would not see the appended event.
            if os.fstat(fd).st_size > EVENTS_BYTES:
                os.ftruncate(fd, 0)
        except NotPlainError:
            fs.remove_file(path)
            fd = descriptor(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        file = os.fdopen(fd, "a+b", buffering=0)
        file.seek(0, os.SEEK_END)
        return file

    def read(self, job_id: str) -> list[Event]:
        """All events, in order; empty if the job has no events yet."""
        return self.since(job_id, 0)[0]

    def since(
        self, job_id: str, offset: int, limit: int | None = None
    ) -> tuple[list[Event], int, int]:
        """The events of the complete lines from `offset` on, the offset for the next call, and the
        file's size in bytes. Reads at least one complete line if there is a complete line after
        `offset`.

        Args:
            offset: the first byte to read, at the beginning of a line.
            limit: the size of one read in bytes; None: the rest of the file is read at once.
        """
        content = b""
        with (
            suppress(FileNotFoundError, NotPlainError),
            self._paths.open_file(self._paths.events_file, job_id, most=EVENTS_BYTES) as file,
        ):
            file.seek(offset)
            while part := file.read(-1 if limit is None else limit):
                content += part
                if b"\n" in part:
                    break
        return _parse(content), offset + content.rfind(b"\n") + 1, offset + len(content)

    def ended(self, job_id: str) -> bool:
        """Whether the job's terminal event is written."""
        return any(event.type in TERMINAL for event in self.read(job_id))


def _parse(content: bytes) -> list[Event]:
    """The events of all complete lines. A line that a dead writer left incomplete is skipped."""
    events = []
    for line in content.split(b"\n")[:-1]:
        with suppress(ValidationError):
            events.append(Event.model_validate_json(line))
    return events


def _next_seq(fd: int, size: int) -> tuple[int, bool]:
    """The `seq` of the next event, and whether the file ends with a newline. An event that lacks
    only its newline counts as complete."""
    for start in (max(0, size - _TAIL_BYTES), 0):
        content = os.pread(fd, size - start, start)
        terminated = not content or content.endswith(b"\n")
        if events := _parse(content if terminated else content + b"\n"):
            return events[-1].seq + 1, terminated
    return 0, terminated
