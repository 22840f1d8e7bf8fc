"""Long answers: a job's events as Server-Sent Events, and a checkpoint as a tar archive."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO

import anyio
from anyio import to_thread

from tandem.controller.deployment import Deployment
from tandem.errors import CheckpointDamaged
from tandem.spool.schema import TERMINAL, Event, Manifest

POLL_SECONDS = 0.2
KEEP_ALIVE_SECONDS = 10.0
# How often a job without news is asked whether it has ended.
STATE_SECONDS = 2.0
RETRY_MILLISECONDS = 1000
_CHUNK = 2**20


def sse(event: Event) -> bytes:
    """One event on the wire; its `id` is what a client sends back as Last-Event-ID."""
    return f"id: {event.seq}\nevent: {event.type}\ndata: {event.model_dump_json()}\n\n".encode()


async def follow(here: Deployment, job: str, after: int, wait: bool) -> AsyncIterator[bytes]:
    """Events after `after`, until the job's terminal event has passed; without `wait`, those there are now.

    It ends too when the controller stops, or when the job has ended without a terminal event (the writer died between
    the two): clients ask again, or ask for the job. Reads the spool only.
    """
    yield f"retry: {RETRY_MILLISECONDS}\n\n".encode()
    watch = _Watch(here, job)
    spoke = time.monotonic()
    while not here.stopping:
        events, over = await to_thread.run_sync(watch.look, limiter=here.watching)
        for event in events:
            if event.seq > after:
                yield sse(event)
                spoke = time.monotonic()
        if over or not wait:
            return
        if time.monotonic() - spoke >= KEEP_ALIVE_SECONDS:
            yield b": keep-alive\n\n"
            spoke = time.monotonic()
        await anyio.sleep(POLL_SECONDS)


class _Watch:
    """Looks at one job's events again and again, and reads them only when there is more."""

    def __init__(self, here: Deployment, job: str) -> None:
        self._here, self._job = here, job
        self._size, self._last = -1, -1
        self._asked = time.monotonic()

    def look(self) -> tuple[list[Event], bool]:
        """New events, and whether there will be no more before the job's end."""
        over = False
        if time.monotonic() - self._asked >= STATE_SECONDS:
            # Asked before the events are read: a job that is over now has written all of them.
            self._asked = time.monotonic()
            over = self._here.spool.jobs.get(self._job)[0] in TERMINAL
        events: list[Event] = []
        if (size := self._bytes()) != self._size:
            self._size = size
            events = self._here.spool.events.read(self._job, self._last)
        if events:
            self._last = events[-1].seq
        return events, over or any(event.type in TERMINAL for event in events)

    def _bytes(self) -> int:
        """Size of the events file; opened, since NFS may answer a mere stat from its cache."""
        try:
            with self._here.spool.paths.events_file(self._job).open("rb") as file:
                return os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return -1


class CheckpointTar:
    """A checkpoint's files under `<run>@<step>/`, manifest last, as an uncompressed tar; `size` is known beforehand.

    The files are opened at once, so a rollback that moves them away doesn't disturb a download under way.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.name = f"{manifest.run}@{manifest.step}"
        self._parts: list[tuple[bytes, BinaryIO, int]] = []
        self.size = 2 * tarfile.BLOCKSIZE
        content = (manifest.model_dump_json(indent=1) + "\n").encode()
        try:
            for relative, entry in sorted(manifest.files.items()):
                self._add(relative, _open(directory / relative, entry.size), entry.size, manifest.created)
        except BaseException:
            self.close()
            raise
        self._add("manifest.json", io.BytesIO(content), len(content), manifest.created)

    def _add(self, relative: str, file: BinaryIO, size: int, created: float) -> None:
        info = tarfile.TarInfo(f"{self.name}/{relative}")
        info.size, info.mtime, info.mode = size, int(created), 0o644
        header = info.tobuf(tarfile.PAX_FORMAT)
        self._parts.append((header, file, size))
        self.size += len(header) + size + -size % tarfile.BLOCKSIZE

    def __iter__(self) -> Iterator[bytes]:
        try:
            for header, file, size in self._parts:
                yield header
                left = size
                while left:
                    data = file.read(min(left, _CHUNK))
                    if not data:  # the Content-Length promised more: the client sees a broken download
                        raise CheckpointDamaged(f"a file of {self.name} ended {left} bytes early")
                    left -= len(data)
                    yield data
                yield bytes(-size % tarfile.BLOCKSIZE)
            yield bytes(2 * tarfile.BLOCKSIZE)
        finally:
            self.close()

    def close(self) -> None:
        """Close the files."""
        for _, file, _ in self._parts:
            file.close()


def _open(path: Path, size: int) -> BinaryIO:
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{path.name} of checkpoint {path.parent} is missing") from error
    found = file.seek(0, io.SEEK_END)
    file.seek(0)
    if found != size:
        file.close()
        raise CheckpointDamaged(f"{path.name} of checkpoint {path.parent} has {found} bytes; its manifest says {size}")
    return file
