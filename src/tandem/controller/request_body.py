"""The body of a training request before it is parsed: in memory while it is small, else in a file on the volume."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, cast

from anyio import to_thread
from starlette.requests import Request

from tandem.spool import fs

MEMORY_BYTES = 256 * 2**10


class Body:
    """A received body of `size` bytes."""

    def __init__(self, parts: list[bytes], file: BinaryIO | None, size: int) -> None:
        self._parts, self._file, self.size = parts, file, size

    def read(self) -> bytes:
        """All of it."""
        if self._file is None:
            return b"".join(self._parts)
        self._file.seek(0)
        return self._file.read()


@asynccontextmanager
async def received(request: Request, directory: Path) -> AsyncIterator[Body]:
    """Receives the request's body; a file without a name in `directory` holds what is more than MEMORY_BYTES.

    Raises SpoolUnusable where the volume can't take it.
    """
    parts: list[bytes] = []
    held = size = 0
    file: BinaryIO | None = None
    try:
        async for part in request.stream():
            parts.append(part)
            held += len(part)
            size += len(part)
            if held > MEMORY_BYTES:
                with fs.volume_errors(directory):
                    if file is None:
                        file = cast(BinaryIO, TemporaryFile(dir=directory, prefix=fs.TEMPORARY, buffering=0))  # noqa: SIM115
                    await to_thread.run_sync(fs.write_all, file.fileno(), b"".join(parts))
                parts, held = [], 0
        if file is not None:
            with fs.volume_errors(directory):
                await to_thread.run_sync(fs.write_all, file.fileno(), b"".join(parts))
            parts = []
        yield Body(parts, file, size)
    finally:
        if file is not None:
            file.close()
