"""Following a job's events over connections that may break, and taking a download to pieces; no network I/O here."""

from __future__ import annotations

import shutil
import tarfile
import time
from hashlib import file_digest
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tandem.client.calls import job_path
from tandem.client.wire import Pauses, unreachable
from tandem.errors import CheckpointDamaged, InvalidInput
from tandem.spool.fs import new_ulid
from tandem.spool.schema import TERMINAL, Event, Manifest

# The controller says something every 10 s; silence for longer than this means that the connection is dead.
_SILENCE_SECONDS = 35.0
# A stream that the controller ended (it restarts, perhaps) is opened again after this long.
_REOPEN_SECONDS = 0.5


class EventCursor:
    """Where one reader is in a job's events, whatever happens to its connections.

    The driver opens `request()`, feeds what arrives to `feed`, and calls `pause_after` when the connection ends.
    """

    def __init__(self, job: str, after: int, wait: bool, timeout: float, patience: float) -> None:
        self.job = job
        self.last = after
        self.done = not wait  # the terminal event was seen, or not asked for
        self._wait = wait
        self._buffer = b""
        self._timeout = timeout
        self._until = time.monotonic() + timeout
        self._pauses = Pauses(patience)

    def request(self) -> dict[str, Any]:
        """Arguments for httpx's `stream`."""
        self._buffer = b""
        return {
            "method": "GET",
            "url": job_path(self.job, "events"),
            "params": {"wait": str(self._wait).lower()},
            "headers": {"Last-Event-ID": str(self.last)},
            "timeout": httpx.Timeout(_SILENCE_SECONDS, connect=5.0),
        }

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes; raises TimeoutError when the time is over."""
        self._pauses.reset()
        # Lines are split as bytes: text may hold U+2028 and the like, which str.splitlines would take for line ends.
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                event = Event.model_validate_json(line.removeprefix(b"data:").strip())
                if event.seq > self.last:
                    self.last = event.seq
                    self.done = self.done or event.type in TERMINAL
                    events.append(event)
        if not self.done:
            self._check_time()
        return events

    def drain(self) -> None:
        """The job is over: what is there now is all there will be."""
        self._wait, self.done = False, True

    def pause_after(self, error: httpx.TransportError | None) -> float:
        """Seconds to wait before the next connection; raises Unreachable or TimeoutError."""
        self._check_time()
        if error is None:
            return _REOPEN_SECONDS
        pause = self._pauses.next()
        if pause is None:
            raise unreachable(error) from error
        return pause

    def _check_time(self) -> None:
        if time.monotonic() > self._until:
            raise TimeoutError(f"job {self.job} did not end within {self._timeout:g} s; it goes on")


class Download:
    """A checkpoint on its way into directory `target`, which appears only when everything is there and checked."""

    def __init__(self, target: Path) -> None:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise InvalidInput(f"{target} exists and is not an empty directory", field="dest")
        target.parent.mkdir(parents=True, exist_ok=True)
        self.target = target
        self._staged = target.parent / f".{target.name}.{new_ulid()}.part"

    def __enter__(self) -> Download:
        self._staged.mkdir()
        self._file = (self._staged / "archive.tar").open("wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()
        shutil.rmtree(self._staged, ignore_errors=True)

    def restart(self) -> None:
        """Forget what came: the transfer begins anew."""
        self._file.seek(0)
        self._file.truncate()

    def write(self, data: bytes) -> None:
        """Another piece of the archive."""
        self._file.write(data)

    def finish(self) -> Manifest:
        """Unpack, compare every file with the manifest's SHA-256, and put it in place; raises CheckpointDamaged."""
        self._file.close()
        content = self._staged / "content"
        with tarfile.open(self._staged / "archive.tar") as archive:
            archive.extractall(content, filter="data")
        (root,) = content.iterdir()
        manifest = Manifest.model_validate_json((root / "manifest.json").read_bytes())
        for name, entry in manifest.files.items():
            path = root / name
            if not path.is_file():
                raise CheckpointDamaged(f"{name} is missing from the download")
            with path.open("rb") as file:
                if file_digest(file, "sha256").hexdigest() != entry.sha256:
                    raise CheckpointDamaged(
                        f"{name} of {manifest.run}@{manifest.step} is not what its manifest says (SHA-256 differs)"
                    )
        root.replace(self.target)
        return manifest
