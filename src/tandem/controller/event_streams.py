"""Event streams: one look at all followed files for all their readers, and bounded memory for each
reader.

A reader holds one part of its file at a time, and reads the next only when its client has taken
this one.
"""

import os
import time
from asyncio import sleep
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

import anyio
from anyio import to_thread

from tandem.errors import NotFound, TandemError
from tandem.spool import Spool
from tandem.spool.schema import TERMINAL, Event
from tandem.system.plain_files import NotPlainError, open_plain

# Between two looks at a followed file.
POLL_SECONDS = 0.2
# How often the state of a followed job is read, in case it ended without a terminal event.
STATE_SECONDS = 10.0
PART_BYTES = 16384
_THREADS = 8


@dataclass(eq=False)
class _File:
    """What was last seen of a job's event file, for all who follow the job."""

    size: int = 0
    ended: bool = False  # the job has a terminal state, or is gone
    state_read: float = field(default_factory=time.monotonic)


class EventStreams:
    """Belongs to one event loop."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        # Job -> its file, as long as somebody follows the job.
        self._files = WeakValueDictionary[str, _File]()
        self._looked = 0.0  # monotonic
        # Threads of its own, so that streams don't wait for heavy requests.
        self._threads = anyio.CapacityLimiter(_THREADS)

    async def check(self, job: str) -> None:
        """NotFound without the job."""
        await to_thread.run_sync(self._spool.jobs.get, job, limiter=self._threads)

    async def follow(
        self, job: str, after: int, *, wait: bool, stopping: anyio.Event
    ) -> AsyncIterator[bytes]:
        """The job's events after seq `after` as Server-Sent Events, until its terminal event;
        without `wait`, those written so far.

        The stream also ends when `stopping` is set, or when the job ended without a terminal event
        because its writer died: clients then reconnect, or read the job. An event's `id` is its
        seq, which clients send as Last-Event-ID.
        """
        yield b"retry: 1000\n\n"
        file, offset = self._files.setdefault(job, _File()), 0
        while not stopping.is_set():
            # Before the events are read: a job that has ended by now has written all of them.
            ended = file.ended
            part = await to_thread.run_sync(self._read, job, offset, after, limiter=self._threads)
            block, next_offset, size, terminal = part
            if terminal:
                wait = False  # what comes after the terminal event is sent if it is there
            if block:
                yield block
            if next_offset != offset:
                offset = next_offset
                continue
            if ended or not wait:
                return
            file.size = size  # the last look may have been before this reading
            while file.size == size and not file.ended and not stopping.is_set():
                await sleep(POLL_SECONDS)
                # No other reader has looked meanwhile.
                if time.monotonic() >= self._looked + POLL_SECONDS:
                    self._looked = time.monotonic()
                    await to_thread.run_sync(
                        self._look, list(self._files.items()), limiter=self._threads
                    )

    def _read(self, job: str, offset: int, after: int) -> tuple[bytes, int, int, bool]:
        """A part of the file, the offset of the next one, where reading ended, and whether the
        terminal event is in it.

        A reader holds bytes while its client takes them, because events would take many times their
        size.
        """
        events, end, size = self._spool.events.since(job, offset, PART_BYTES)
        block = b"".join(_formatted(event) for event in events if event.seq > after)
        return block, end, size, any(event.type in TERMINAL for event in events)

    def _look(self, files: Sequence[tuple[str, _File]]) -> None:
        for job, file in files:
            with suppress(TandemError, OSError):
                file.size = _size(self._spool.paths.events_file(job))
                if time.monotonic() > file.state_read + STATE_SECONDS:
                    file.state_read = time.monotonic()
                    try:
                        file.ended = self._spool.jobs.get(job)[0] in TERMINAL
                    except NotFound:
                        file.ended = True


def _formatted(event: Event) -> bytes:
    return f"id: {event.seq}\nevent: {event.type}\ndata: {event.model_dump_json()}\n\n".encode()


def _size(path: Path) -> int:
    """Bytes of a file; 0 without it. Opens it, because an NFS client then asks the server."""
    try:
        with open_plain(path) as file:
            return os.fstat(file.fileno()).st_size
    except (FileNotFoundError, NotPlainError):
        return 0
