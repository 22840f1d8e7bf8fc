"""Where jobs and locks lie on the volume (inside a run: `runs`, `checkpoints`), and what is read
often and seldom changes: listings of directories, and what is computed from files."""

import hashlib
import os
import re
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tandem.errors import InvalidInput, NotFound
from tandem.spool import fs
from tandem.spool.schema import PENDING, TERMINAL, JobKey, JobState
from tandem.spool.schema.base import JOB_ID_PATTERN, RUN_NAME_PATTERN, SESSION_ID_PATTERN

_DIRECTORIES = (
    *PENDING,
    *TERMINAL,
    "ids",
    "leases",
    "cancel",
    "data",
    "work",
    "events",
    "logs",
    "locks",
    "removed",
)
HOUR_FORMAT = "%Y-%m-%dT%H"
"""Names of the directories of ended jobs: the UTC hour of their submission."""
BUCKET = 250
"""Base steps per directory of queued jobs: the most names that a claim lists."""


def is_run_name(name: str) -> bool:
    return re.fullmatch(RUN_NAME_PATTERN, name) is not None


def is_job_id(name: str) -> bool:
    return re.fullmatch(JOB_ID_PATTERN, name) is not None


def step_name(step: int) -> str:
    """The name of a checkpoint's directory: 7 -> 00000007."""
    return f"{step:08d}"


class Paths:
    """The paths below one root. InvalidInput (field `run` or `id`) refuses a name that could lead
    elsewhere."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.version_file = root / "spool.json"
        self.runs = root / "runs"
        self.replicas = root / "replicas"
        self.sessions = root / "sessions"
        self.jobs = root / "jobs"
        self.hold = self.jobs / "hold.json"
        self.damaged = self.jobs / "damaged"
        self.removed = self.jobs / "removed"
        self.directories = [
            self.runs,
            self.jobs,
            self.damaged,
            *(self.jobs / name for name in _DIRECTORIES),
        ]
        self.runner_lock = self.jobs / "runner.lock"
        self.claim_lock = self.jobs / "locks/claim"
        self.gpus_lock = self.jobs / "locks/gpus"
        self.publisher_lock = self.jobs / "locks/publisher"
        job_locks = [self.jobs / "locks" / digit for digit in "0123456789abcdef"]
        self.locks = [
            self.runner_lock,
            self.claim_lock,
            self.gpus_lock,
            self.publisher_lock,
            *job_locks,
        ]

    def run_dir(self, run: str) -> Path:
        if not is_run_name(run):
            rule = (
                "a run's name is 1 to 64 of a-z 0-9 . _ - and begins and ends with a letter or"
                " digit"
            )
            raise InvalidInput(f"{run!r:.100} is refused: {rule}", field="run")
        return self.runs / run

    def requests_dir(self, run: str) -> Path:
        """The requests of a session's run, a directory each."""
        return self.run_dir(run) / "requests"

    def session_dir(self, session: str) -> Path:
        if not re.fullmatch(SESSION_ID_PATTERN, session):
            raise NotFound(f"there is no session {session!r:.100}", field="session")
        return self.sessions / session

    def state_dir(self, state: JobState) -> Path:
        """Below it are the files of the jobs in one state."""
        return self.jobs / state

    def queue_dir(self, run: str, base_step: int) -> Path:
        """The run's queued jobs with this base step and those next to it."""
        return self.jobs / "queued" / run / f"{base_step // BUCKET:05d}"

    def job_file(self, state: JobState, key: JobKey) -> Path:
        """Queued jobs lie by run and base step, ended ones by the hour of their submission."""
        directory = self.state_dir(state)
        if state == "queued":
            directory = self.queue_dir(key.run, key.base_step)
        elif state in TERMINAL:
            directory /= time.strftime(HOUR_FORMAT, time.gmtime(key.created // 1_000_000))
        return directory / f"{key.name}.json"

    def id_file(self, job_id: str) -> Path:
        """Holds the name of the job's key; written before the job exists, never changed."""
        return self._of_job("ids", job_id)

    def data_dir(self, job_id: str) -> Path:
        """The job's packed arrays; removed when the job ends."""
        return self._of_job("data", job_id)

    def work_dir(self, job_id: str, attempt: int) -> Path:
        """The files of one attempt; made by `claim`, removed when the attempt ends."""
        return self.all_work_dirs(job_id) / str(attempt)

    def all_work_dirs(self, job_id: str) -> Path:
        return self._of_job("work", job_id)

    def lease_file(self, job_id: str) -> Path:
        return self._of_job("leases", job_id, ".json")

    def cancel_file(self, job_id: str) -> Path:
        """Exists while somebody wants a running job cancelled."""
        return self._of_job("cancel", job_id)

    def events_file(self, job_id: str) -> Path:
        return self._of_job("events", job_id, ".jsonl")

    def log_file(self, job_id: str) -> Path:
        """What the ranks printed in all attempts; kept."""
        return self._of_job("logs", job_id, ".log")

    def job_lock(self, job_id: str) -> Path:
        """All jobs share sixteen lock files."""
        return self._of_job("locks", job_id).with_name(
            hashlib.sha256(job_id.encode()).hexdigest()[0]
        )

    def _of_job(self, kind: str, job_id: str, suffix: str = "") -> Path:
        if not is_job_id(job_id):
            rule = "a job's id is 1 to 64 of A-Z a-z 0-9 . _ - and begins with a letter or digit"
            raise InvalidInput(f"{job_id!r:.100} is refused: {rule}", field="id")
        return self.jobs / kind / f"{job_id}{suffix}"


class Names(tuple[str, ...]):
    """Sorted names in a directory; `parsed` is what their reader made of them."""

    parsed: tuple[Any, ...] | None = None


class _Listing(NamedTuple):
    directory: tuple[int, int, int]  # device, inode, mtime (ns)
    since: float  # monotonic, when this mtime was first seen
    listed: float  # monotonic
    names: Names


_listings: dict[str, _Listing] = {}
_SETTLED_SECONDS = 2.5
"""A change this long after another one changes a directory's mtime, on every file system."""


def listing(directory: Path) -> Names:
    """The names in `directory`, without temporary and hidden ones; none if it does not exist. The
    very same object as long as the directory has not changed."""
    # Opening a directory makes an NFS client ask the server for its mtime.
    if (fd := fs.open_dir(directory)) is None:
        _listings.pop(str(directory), None)
        return Names()
    try:
        status, now = os.fstat(fd), time.monotonic()
        identity = status.st_dev, status.st_ino, status.st_mtime_ns
        known = _listings.get(str(directory)) or _Listing(identity, now, now, Names())
        if known.directory == identity and known.listed - known.since > _SETTLED_SECONDS:
            return known.names
        listed = os.listdir(fd)  # noqa: PTH208
        names = Names(sorted(name for name in listed if not name.startswith(".")))
    finally:
        os.close(fd)
    if known.names == names:
        names = known.names
    if gone := tuple(f"{directory}/{name}/" for name in set(known.names).difference(names)):
        for path in [path for path in _listings if f"{path}/".startswith(gone)]:
            del _listings[path]
    since = known.since if known.directory == identity else now
    _listings[str(directory)] = _Listing(identity, since, now, names)
    return names


def remembered[T](compute: Callable[[Path], T]) -> Callable[[Path], T | None]:
    """`compute(path)`, computed again only after the path's inode or mtime has changed; None where
    there is no path."""

    @lru_cache(maxsize=2**14)
    def known(path: Path, _inode: int, _mtime: int) -> T:
        return compute(path)

    def of(path: Path) -> T | None:
        try:
            status = path.stat()
        except OSError:
            return None
        return known(path, status.st_ino, status.st_mtime_ns)

    return of
