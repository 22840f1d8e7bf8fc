"""Event streams: each reader follows the event file of one job. All readers of a file share one
check for new events. Each reader uses bounded memory: it reads the next part of the file only after
its client has received the previous part.
"""

import os
import time
from asyncio import sleep
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import anyio
from anyio import to_thread

from tandem.errors import NotFound, TandemError
from tandem.spool import Spool
from tandem.spool.schema import TERMINAL, Event
from tandem.system.plain_files import NotPlainError

# Seconds between two checks of a followed file.
POLL_SECONDS = 0.2
# Seconds between two reads of a followed job's state. The state shows the end of a job whose
# terminal event is missing.
STATE_SECONDS = 10.0
PART_BYTES = 16384
_THREADS = 8


@dataclass(eq=False)
class _File:
    """The last seen state of a job's event file, for all followers of the job."""

    size: int = 0
    ended: bool = False  # the job has a terminal state, or was removed
    state_read: float = field(default_factory=time.monotonic)


class EventStreams:
    """The event streams of one event loop."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        # Job -> the state of the job's event file. A job is listed while at least one reader
        # follows it.
        self._files = WeakValueDictionary[str, _File]()
        self._looked = 0.0  # monotonic time of the last check.
        # The streams have their own threads, so that they don't wait for heavy requests.
        self._threads = anyio.CapacityLimiter(_THREADS)

    async def check(self, job: str) -> None:
        """Raises NotFound if there is no such job."""
        await to_thread.run_sync(self._spool.jobs.get, job, limiter=self._threads)

    async def follow(
        self, job: str, after: int, *, wait: bool, stopping: anyio.Event
    ) -> AsyncIterator[bytes]:
        """The job's events as Server-Sent Events, up to the terminal event.

        The stream also ends if the job was removed. A damaged event file may lack the terminal
        event. In this case, the stream ends because the job's state is terminal. If a stream ends
        without the terminal event, clients reconnect or ask for the job's state. The `id` of an
        event is the event's `seq`. Clients that reconnect send the last `id` as Last-Event-ID.

        Args:
            after: only events with a higher sequence number are sent; -1: all events are sent.
            wait: whether to wait for new events; False: the stream has only the events that are
                already written.
            stopping: setting `stopping` ends the stream; clients then reconnect.
        """
        yield b"retry: 1000\n\n"
        file, offset = self._files.setdefault(job, _File()), 0
        while not stopping.is_set():
            # The state is read before the events, because a job in a terminal state has already
            # written all of its events.
            ended = file.ended
            part = await to_thread.run_sync(self._read, job, offset, after, limiter=self._threads)
            block, next_offset, size, terminal = part
            if terminal:
                wait = False  # events after the terminal event are still sent if they exist
            if block:
                yield block
            if next_offset != offset:
                offset = next_offset
                continue
            if ended or not wait:
                return
            file.size = size  # the shared check may have seen an older size
            while file.size == size and not file.ended and not stopping.is_set():
                await sleep(POLL_SECONDS)
                # This reader checks the files, unless another reader has just checked them.
                if time.monotonic() >= self._looked + POLL_SECONDS:
                    self._looked = time.monotonic()
                    await to_thread.run_sync(
                        self._look, list(self._files.items()), limiter=self._threads
                    )

    def _read(self, job: str, offset: int, after: int) -> tuple[bytes, int, int, bool]:
        """Returns a part of the file, the offset of the next part, the file's size, and whether the
        part contains the terminal event.

        The part is returned as bytes, because it stays in memory until the client has received it.
        Parsed events would take many times as much memory as the bytes.
        """
        events, end, size = self._spool.events.since(job, offset, PART_BYTES)
        block = b"".join(_formatted(event) for event in events if event.seq > after)
        return block, end, size, any(event.type in TERMINAL for event in events)

    def _look(self, files: Sequence[tuple[str, _File]]) -> None:
        for job, file in files:
            with suppress(TandemError, OSError):
                file.size = self._size(job)
                if time.monotonic() > file.state_read + STATE_SECONDS:
                    file.state_read = time.monotonic()
                    try:
                        file.ended = self._spool.jobs.get(job)[0] in TERMINAL
                    except NotFound:
                        file.ended = True

    def _size(self, job: str) -> int:
        """The size of the job's event file in bytes; 0 if the file does not exist. Opens the file,
        because an NFS client asks the server for the size only when a file is opened."""
        paths = self._spool.paths
        try:
            with paths.open_file(paths.events_file, job) as file:
                return os.fstat(file.fileno()).st_size
        except (FileNotFoundError, NotPlainError):
            return 0


def _formatted(event: Event) -> bytes:
    return f"id: {event.seq}\nevent: {event.type}\ndata: {event.model_dump_json()}\n\n".encode()
