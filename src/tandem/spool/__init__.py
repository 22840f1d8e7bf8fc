"""Everything about paths and files on the shared volume. Nobody else builds a path."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from tandem.errors import InvalidInput, SpoolUnusable
from tandem.spool import fs, names
from tandem.spool.checkpoints import Checkpoints
from tandem.spool.events import Events
from tandem.spool.hold import Holds
from tandem.spool.jobs import Jobs
from tandem.spool.locks import file_lock
from tandem.spool.runs import Runs
from tandem.spool.schema import SCHEMA_VERSION
from tandem.spool.served import ServedRecords

__all__ = ["Spool"]

_DIRECTORIES = (
    "runs",
    "jobs",
    *(
        f"jobs/{name}"
        for name in (
            *("queued", "running", "succeeded", "failed", "cancelled"),
            *("leases", "cancel", "data", "work", "events", "logs", "locks"),
        )
    ),
)
# Jobs share sixteen lock files, which exist from the start: a full disk can't keep anybody from locking.
_LOCKS = ("claim", "gpus", *"0123456789abcdef")


class Spool:
    """One directory on one volume: `runs`, `checkpoints`, `jobs`, `events`, `served`, `hold`. For many processes."""

    def __init__(self, root: Path | str, *, writable: bool = True) -> None:
        """Opens an existing spool. SpoolUnusable if it is none, or is read-only or full; with `writable` False only if
        it can't be read."""
        self.root = Path(root).absolute()
        self.runs = Runs(self)
        self.checkpoints = Checkpoints(self)
        self.jobs = Jobs(self)
        self.events = Events(self)
        self.served = ServedRecords(self)
        self.hold = Holds(self)
        self.check()
        if writable:
            self.check_writable()

    @classmethod
    def create(cls, root: Path | str) -> Spool:
        """Makes the skeleton where it is not there yet, and opens it. SpoolUnusable, leaving no trace, if it can't."""
        path = Path(root).absolute()
        made: list[Path] = []
        try:
            with fs.volume_errors(path):
                for parent in reversed(path.parents):
                    _make_directory(parent, made)
                for name in ("", *_DIRECTORIES):
                    _make_directory(path / name, made)
                for name in _LOCKS:
                    _make_file(path / "jobs/locks" / name, made)
                _make_file(path / "jobs/runner.lock", made)
                if not fs.exists(path / "spool.json"):
                    fs.write_atomic(path / "spool.json", json.dumps({"schema_version": SCHEMA_VERSION}).encode())
        except BaseException:
            for thing in reversed(made):
                with suppress(OSError):
                    thing.rmdir() if thing.is_dir() else thing.unlink()
            raise
        return cls(path)

    def check(self) -> None:
        """SpoolUnusable if the spool is not there now. Without its volume a mount point is an empty directory, which
        would look like a spool without runs and jobs."""
        path = self.root / "spool.json"
        with fs.volume_errors(self.root):
            content = fs.read_bytes(path)
        if content is None:
            what = "it is a file" if self.root.is_file() else f"{path} does not exist"
            raise SpoolUnusable(
                f"{self.root} is not a spool: {what}; set TANDEM_ROOT to the shared volume's directory, or make a "
                "spool there first (the controller and `tandem up` do)"
            )
        try:
            version = int(json.loads(content)["schema_version"])
        except (ValueError, KeyError, TypeError) as error:
            raise SpoolUnusable(f'{path} is damaged; restore it: {{"schema_version": {SCHEMA_VERSION}}}') from error
        if version != SCHEMA_VERSION:
            raise SpoolUnusable(
                f"{self.root} has schema version {version}, this Tandem reads {SCHEMA_VERSION}; use the same Tandem "
                "version in all containers"
            )

    def check_writable(self) -> None:
        """SpoolUnusable if a small file can't be written now. Leaves nothing behind."""
        path = self.root / f"{fs.TEMPORARY}probe.{fs.new_ulid()}"
        try:
            fs.write_atomic(path, b"\0" * 4096)
        except SpoolUnusable as error:
            raise SpoolUnusable(str(error).replace(str(path), str(self.root))) from error
        finally:
            with suppress(OSError):
                path.unlink()

    def relative(self, path: Path | str) -> str:
        """`path` relative to the root, as records hold it; InvalidInput if it is not inside."""
        inside = os.path.relpath(os.path.abspath(path), self.root)  # noqa: PTH100
        if inside.startswith(".."):
            raise InvalidInput(f"{path} is not under the spool's root {self.root}", field="path")
        return Path(inside).as_posix()

    def absolute(self, relative: str) -> Path:
        """Where a record's relative path is in this container; InvalidInput if it leads out of the root."""
        if Path(relative).is_absolute() or ".." in Path(relative).parts:
            raise InvalidInput(f"{relative!r} is not a path inside the spool", field="path")
        return self.root / relative

    def job_lock(self, job_id: str) -> AbstractContextManager[int]:
        """Serialises what changes a job and its events. Taken after `runs.lock`, never before it."""
        stripe = hashlib.sha256(names.job_id(job_id).encode()).hexdigest()[0]
        return file_lock(self.root / "jobs/locks" / stripe)


def _make_directory(path: Path, made: list[Path]) -> None:
    if not path.is_dir():
        try:
            path.mkdir()
        except FileExistsError:
            if not path.is_dir():
                raise NotADirectoryError(20, "not a directory", str(path)) from None
        else:
            made.append(path)


def _make_file(path: Path, made: list[Path]) -> None:
    if not fs.exists(path):
        path.touch()
        made.append(path)
