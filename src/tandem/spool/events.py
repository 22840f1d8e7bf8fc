"""Events of jobs: `jobs/events/<id>.jsonl`, one JSON object per line, appended under the job's lock."""

import json
import os
import time
from typing import Any

from pydantic import ValidationError

from tandem.spool import fs
from tandem.spool.locks import file_lock
from tandem.spool.paths import Paths
from tandem.spool.schema import TERMINAL, Event, EventType

_TAIL_BYTES = 65536


class Events:
    """Any process may append to any job; `seq` counts 0, 1, 2, … without gaps over all of them."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def append(self, job_id: str, type: EventType, *, attempt: int = 0, **data: Any) -> Event:  # noqa: A002
        """Adds one event, durably. `data` must be what JSON can hold; NaN and infinities become null.

        Ends a line that a dead writer left unterminated; readers skip that line. Raises SpoolUnusable, and then the
        file is as before.
        """
        path = self._paths.events_file(job_id)
        with file_lock(self._paths.job_lock(job_id)), fs.volume_errors(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                size = os.fstat(fd).st_size
                last, terminated = _last_event(fd, size)
                seq = 0 if last is None else last.seq + 1
                event = Event(seq=seq, time=time.time(), job=job_id, type=type, attempt=attempt, data=data)
                # ASCII only: many readers end a line at U+2028 and its like.
                content = json.dumps(json.loads(event.model_dump_json()))
                line = ("" if terminated else "\n") + content + "\n"
                try:
                    fs.write_all(fd, line.encode())
                    os.fsync(fd)
                except BaseException:
                    os.ftruncate(fd, size)
                    if size == 0:
                        path.unlink()
                    raise
            finally:
                os.close(fd)
            if size == 0:
                fs.fsync_dir(path.parent)
            return Event.model_validate_json(content)

    def read(self, job_id: str, after: int = -1) -> list[Event]:
        """Events with `seq` > `after`, in order; empty if the job has none (yet)."""
        content = fs.read_bytes(self._paths.events_file(job_id)) or b""
        return [event for event in _parse(content)[0] if event.seq > after]

    def since(self, job_id: str, offset: int) -> tuple[list[Event], int]:
        """Events of the complete lines from byte `offset` on, and the offset to go on from."""
        try:
            with self._paths.events_file(job_id).open("rb") as file:
                file.seek(offset)
                content = file.read()
        except FileNotFoundError:
            return [], offset
        events, used = _parse(content)
        return events, offset + used

    def ended(self, job_id: str) -> bool:
        """Whether the job's terminal event is written."""
        return any(event.type in TERMINAL for event in self.read(job_id))


def _parse(content: bytes) -> tuple[list[Event], int]:
    """The events of the complete lines, and the bytes of these lines. Skips lines that a dead writer left half
    written."""
    end = content.rfind(b"\n") + 1
    events = []
    for line in content[:end].split(b"\n"):
        try:
            events.append(Event.model_validate_json(line))
        except ValidationError:
            continue
    return events, end


def _last_event(fd: int, size: int) -> tuple[Event | None, bool]:
    """The last whole event, and whether the file ends with a newline. A whole event without its newline counts."""
    for start in (max(0, size - _TAIL_BYTES), 0):
        content = os.pread(fd, size - start, start)
        terminated = not content or content.endswith(b"\n")
        events, _ = _parse(content if terminated else content + b"\n")
        if events:
            return events[-1], terminated
    return None, terminated
