"""Events of jobs: `jobs/events/<id>.jsonl`, one JSON object per line, appended under the job's lock."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from tandem.spool import fs, names
from tandem.spool.schema import TERMINAL, Event, EventType

if TYPE_CHECKING:
    from tandem.spool import Spool

_TAIL = 65536


class Events:
    """Any process may append to any job; `seq` counts 0, 1, 2, … without gaps over all of them."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def path(self, job_id: str) -> Path:
        return self._spool.root / "jobs/events" / f"{names.job_id(job_id)}.jsonl"

    def append(self, job_id: str, type: EventType, *, attempt: int = 0, **data: Any) -> Event:  # noqa: A002
        """Adds one event, durable when this returns. `data` is what JSON can hold; NaN and infinities become null.

        A line that a dead writer left unterminated is closed first; readers skip it. Raises SpoolUnusable, and then
        the file is as it was.
        """
        path = self.path(job_id)
        with self._spool.job_lock(job_id), fs.volume_errors(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                size = os.fstat(fd).st_size
                last, terminated = _last_event(fd, size)
                seq = 0 if last is None else last.seq + 1
                event = Event(seq=seq, time=time.time(), job=job_id, type=type, attempt=attempt, data=data)
                # ASCII only: U+2028 and the like end a line for many readers.
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
        """Events with `seq` > `after`, in order; empty if there are none (yet)."""
        content = fs.read_bytes(self.path(job_id)) or b""
        return [event for event in _parse(content)[0] if event.seq > after]

    def since(self, job_id: str, offset: int) -> tuple[list[Event], int]:
        """Events of the complete lines from byte `offset` on, and the offset to go on from."""
        events, used = _parse(_read_from(self.path(job_id), offset))
        return events, offset + used

    def follow(
        self,
        job_id: str,
        after: int = -1,
        poll: float = 0.2,
        timeout: float | None = None,
        until_terminal: bool = True,
    ) -> Iterator[Event]:
        """Events with `seq` > `after` as they come, looking every `poll` seconds.

        Ends after the terminal event (even one at or before `after`), unless `until_terminal` is False; or when
        `timeout` seconds have passed.
        """
        path = self.path(job_id)
        deadline = None if timeout is None else time.monotonic() + timeout
        offset = 0
        ended = False
        while True:
            expired = deadline is not None and time.monotonic() >= deadline
            events, used = _parse(_read_from(path, offset))
            offset += used
            for event in events:
                ended = ended or event.type in TERMINAL
                if event.seq > after:
                    yield event
            if expired or (ended and until_terminal):
                return
            pause = poll if deadline is None else min(poll, max(0.0, deadline - time.monotonic()))
            time.sleep(pause)


def _read_from(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except FileNotFoundError:
        return b""


def _parse(content: bytes) -> tuple[list[Event], int]:
    """The events of the complete lines, and those lines' bytes. What a dead writer half wrote is skipped."""
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
    start = size
    while start > 0:
        start = max(0, size - _TAIL) if start == size else 0
        content = os.pread(fd, size - start, start)
        events, _ = _parse(content if content.endswith(b"\n") else content + b"\n")
        if events:
            return events[-1], content.endswith(b"\n")
    return None, size == 0 or os.pread(fd, 1, size - 1) == b"\n"
