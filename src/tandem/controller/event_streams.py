"""Event streams: one look at all followed files for all their readers, and bounded memory for each reader.

A reader holds one part of its file at a time, and reads the next only when its client has taken this one.
"""

import ctypes
import gc
import os
import time
from asyncio import Event as Signal
from asyncio import Task, create_task, sleep, timeout
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import anyio
from anyio import to_thread

from tandem.errors import NotFound, TandemError
from tandem.spool import Spool
from tandem.spool.schema import TERMINAL, Event

# Between two looks at the followed files.
POLL_SECONDS = 0.2
# How often the state of a followed job is read, in case it ended without a terminal event.
STATE_SECONDS = 10.0
PART_BYTES = 16384
_THREADS = 8


@dataclass
class _File:
    """What the last look saw of a job's event file, for all who follow the job."""

    size: int = 0
    ended: bool = False  # the job has a terminal state, or is gone
    state_read: float = field(default_factory=time.monotonic)
    readers: int = 0
    news: Signal = field(default_factory=Signal)  # set, and replaced, when something of the above has changed


class EventStreams:
    """Belongs to one event loop."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._files: dict[str, _File] = {}
        # Threads of its own, so that streams don't wait for heavy requests.
        self._threads = anyio.CapacityLimiter(_THREADS)
        self._looking: Task[None] | None = None

    async def check(self, job: str) -> None:
        """NotFound without the job."""
        await to_thread.run_sync(self._spool.jobs.get, job, limiter=self._threads)

    async def follow(self, job: str, after: int, *, wait: bool, stopping: anyio.Event) -> AsyncIterator[bytes]:
        """The job's events after seq `after` as Server-Sent Events, until its terminal event; without `wait`, those
        written so far.

        The stream also ends when `stopping` is set, or when the job ended without a terminal event because its writer
        died: clients then reconnect, or read the job. An event's `id` is its seq, which clients send as Last-Event-ID.
        """
        yield b"retry: 1000\n\n"
        offset = 0
        with self._followed(job) as file:
            while not stopping.is_set():
                # Before the events are read: a job that has ended by now has written all of them.
                ended, seen = file.ended, file.size
                part = await to_thread.run_sync(self._read, job, offset, after, limiter=self._threads)
                block, next_offset, size, terminal = part
                if terminal:
                    wait = False  # what comes after the terminal event is sent if it is there
                at_end, offset = next_offset == offset, next_offset
                if block:
                    yield block
                if at_end:
                    if ended or not wait:
                        return
                    await self._news(file, (seen, size), stopping)

    def _read(self, job: str, offset: int, after: int) -> tuple[bytes, int, int, bool]:
        """A part of the file, the offset of the next one, the file's size, and whether the terminal event is in it.

        A reader holds bytes while its client takes them, because events would take many times their size.
        """
        events, end, size = self._spool.events.since(job, offset, PART_BYTES)
        block = b"".join(_formatted(event) for event in events if event.seq > after)
        return block, end, size, any(event.type in TERMINAL for event in events)

    @contextmanager
    def _followed(self, job: str) -> Iterator[_File]:
        file = self._files.setdefault(job, _File())
        file.readers += 1
        if self._looking is None or self._looking.done():
            self._looking = create_task(self._look_again())
        try:
            yield file
        finally:
            file.readers -= 1
            if not file.readers:
                self._files.pop(job, None)

    async def _news(self, file: _File, sizes: tuple[int, int], stopping: anyio.Event) -> None:
        """Waits until a look sees another size than these, or that the job has ended.

        `sizes`: what the last look before the reading saw, which may be less than was read, and what was read.
        """
        while file.size in sizes and not file.ended and not stopping.is_set():
            with suppress(TimeoutError):
                async with timeout(1.0):  # for `stopping`
                    await file.news.wait()

    async def _look_again(self) -> None:
        while self._files:
            for file in await to_thread.run_sync(self._look, list(self._files.items()), limiter=self._threads):
                file.news.set()
                file.news = Signal()
            await sleep(POLL_SECONDS)
        self._looking = None
        await sleep(POLL_SECONDS)  # the last streams are closed by then
        if not self._files:
            await to_thread.run_sync(_give_memory_back, limiter=self._threads)

    def _look(self, files: Sequence[tuple[str, _File]]) -> list[_File]:
        """Looks at the jobs' event files, and returns those that have changed."""
        changed = []
        for job, file in files:
            before = file.size, file.ended
            with suppress(TandemError, OSError):
                if not file.ended and time.monotonic() > file.state_read + STATE_SECONDS:
                    file.state_read = time.monotonic()
                    file.ended = self._has_ended(job)
                file.size = _size(str(self._spool.paths.events_file(job)))
            if (file.size, file.ended) != before:
                changed.append(file)
        return changed

    def _has_ended(self, job: str) -> bool:
        try:
            return self._spool.jobs.get(job)[0] in TERMINAL
        except NotFound:
            return True


def _give_memory_back() -> None:
    """Frees what many streams have left: glibc keeps freed memory otherwise. Python's own allocator keeps a MiB as long
    as a byte of it is in use, and uses it again for the next streams."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _formatted(event: Event) -> bytes:
    return f"id: {event.seq}\nevent: {event.type}\ndata: {event.model_dump_json()}\n\n".encode()


def _size(path: str) -> int:
    """Bytes of a file; 0 without it. Opens it, because an NFS client then asks the server."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
