"""The paths of jobs and locks on the volume. The module also caches listings of directories, and
caches values that are computed from files. The modules `runs` and `checkpoints` build the paths
inside a run.

A job is one directory. The directory of a job is `jobs/live/<run>/<bucket>/<key>/` until the job
ends, and `jobs/ended/<digit>/<key>,<state>/` afterwards.
"""

import errno
import hashlib
import os
import re
import time
from collections.abc import Callable
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from tandem.errors import InvalidInput, NotFound
from tandem.spool import fs
from tandem.spool.schema import TERMINAL, JobKey, JobState
from tandem.spool.schema.base import JOB_ID_PATTERN, RUN_NAME_PATTERN, SESSION_ID_PATTERN
from tandem.system.plain_files import open_plain

JOB_FILE, EVENTS_FILE, LOG_FILE = "job.json", "events.jsonl", "log"
KEPT = {JOB_FILE, EVENTS_FILE, LOG_FILE}
"""The files that an ended job keeps."""
BUCKET = 250
"""Number of base steps per directory of live jobs. This number limits how many names a claim has to
list."""
_REMEMBERED = 1000
_DIGITS = "0123456789abcdef"


def is_run_name(name: str) -> bool:
    return re.fullmatch(RUN_NAME_PATTERN, name) is not None


def is_job_id(name: str) -> bool:
    return re.fullmatch(JOB_ID_PATTERN, name) is not None


def step_name(step: int) -> str:
    """The name of a checkpoint's directory: 7 -> 00000007."""
    return f"{step:08d}"


class JobDir(NamedTuple):
    """A job's directory, parsed from its name. `JobDir` objects sort in the order of submission."""

    key: JobKey
    # The parent directory. A `JobDir` does not store its full path, because pathlib never frees a
    # name that was part of a path.
    parent: Path
    ended: JobState | None = None  # the terminal state of a job that has ended

    @property
    def name(self) -> str:
        return self.key.name if self.ended is None else f"{self.key.name},{self.ended}"

    @property
    def directory(self) -> Path:
        return self.parent / self.name


class Paths:
    """The paths below one root. Raises InvalidInput (field `run` or `id`) for a name that could
    lead out of the root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.version_file = root / "spool.json"
        self.runs = root / "runs"
        self.replicas = root / "replicas"
        self.sessions = root / "sessions"
        self.jobs = root / "jobs"
        self.live = self.jobs / "live"
        self.active = self.jobs / "active"
        self.ended = self.jobs / "ended"
        self.shared_vllm = self.jobs / "vllm.json"
        self.inference = self.jobs / "inference.json"
        self.damaged = self.jobs / "damaged"
        self.hold = self.jobs / "hold.json"
        locks = self.jobs / "locks"
        self.runner_lock = self.jobs / "runner.lock"
        self.claim_lock, self.publisher_lock = locks / "claim", locks / "publisher"
        top = [self.runs, self.jobs, self.live, self.active, self.ended, self.damaged, locks]
        self.directories = [*top, *(self.ended / digit for digit in _DIGITS)]
        named = [self.runner_lock, self.claim_lock, self.publisher_lock]
        # job id -> bucket, for live jobs that were looked up by id
        self._buckets: dict[str, Path] = {}
        self.locks = [*named, *(locks / digit for digit in _DIGITS)]

    def run_dir(self, run: str) -> Path:
        """The directory of a run. Raises InvalidInput (field `run`) for a name that no run can
        have."""
        if not is_run_name(run):
            rule = (
                "a run's name is 1 to 64 of a-z 0-9 . _ - and begins and ends with a letter or"
                " digit"
            )
            raise InvalidInput(f"{run!r:.100} is refused: {rule}", field="run")
        return self.runs / run

    def requests_dir(self, run: str) -> Path:
        """The directory of a run's requests, with a directory for each request."""
        return self.run_dir(run) / "requests"

    def session_dir(self, session: str) -> Path:
        """The directory of a session. Raises NotFound (field `session`) for an id that no session
        can have."""
        if not re.fullmatch(SESSION_ID_PATTERN, session):
            raise NotFound(f"there is no session {session!r:.100}", field="session")
        return self.sessions / session

    def bucket(self, run: str, base_step: int) -> Path:
        """The directory for the run's live jobs with this base step and with nearby base steps."""
        return self.live / run / f"{base_step // BUCKET:05d}"

    def live_dir(self, key: JobKey) -> Path:
        return self.bucket(key.run, key.base_step) / key.name

    def live_entry(self, key: JobKey) -> JobDir:
        return JobDir(key, self.bucket(key.run, key.base_step))

    def ended_dir(self, key: JobKey, state: JobState) -> Path:
        return self.ended / _digit(key.id) / f"{key.name},{state}"

    def active_file(self, key: JobKey) -> Path:
        """A file that exists while a live job runs or is being ended. A queued job has no file in
        `jobs/active/`. Programs that list running jobs read only the `job.json` of jobs with a file
        in `jobs/active/`."""
        return self.active / key.name

    def live_buckets(self, run: str | None = None) -> list[Path]:
        """The directories that contain the live jobs' directories, run by run, in the order of base
        steps."""
        runs = filter(is_run_name, listing(self.live)) if run is None else [run]
        return [self.live / name / step for name in runs for step in listing(self.live / name)]

    def entries(self, directory: Path) -> tuple[JobDir, ...]:
        """The jobs in a directory of live or ended jobs, in the order of submission. Returns the
        same tuple object until the directory changes."""
        return self._parsed(directory)[0]

    def find(self, job: str | JobKey) -> JobDir | None:
        """The directory of a job that is not damaged. Live jobs are listed first, so that a job
        that ends during the search is found among the ended jobs."""
        if isinstance(job, JobKey):
            job_id, buckets = job.id, [self.bucket(job.run, job.base_step)]
        else:
            _check_id(job)
            job_id, known = job, self._buckets.get(job)
            if known is not None and (found := self._parsed(known)[1].get(job_id)) is not None:
                return found
            buckets = self.live_buckets()
        for directory in buckets:
            if (found := self._parsed(directory)[1].get(job_id)) is not None:
                if len(self._buckets) > _REMEMBERED:
                    self._buckets.clear()
                self._buckets[job_id] = directory
                return found
        return self._parsed(self.ended / _digit(job_id))[1].get(job_id)

    def _parsed(self, directory: Path) -> tuple[tuple[JobDir, ...], dict[str, JobDir]]:
        names = listing(directory)
        if names.parsed is None:
            ended = directory.parent == self.ended
            found = [_entry(directory, name, ended) for name in names]
            entries = tuple(entry for entry in found if entry is not None)
            names.parsed = entries, {entry.key.id: entry for entry in entries}
        parsed: tuple[tuple[JobDir, ...], dict[str, JobDir]] = names.parsed
        return parsed

    def set_aside(self, job_id: str) -> list[Path]:
        """The directories of damaged jobs that had this id, the newest last."""
        names = [name for name in listing(self.damaged) if f",{job_id}." in name]
        return [self.damaged / name for name in sorted(names, key=lambda name: name[-26:])]

    def job_dir(self, job_id: str) -> Path:
        """The job's directory, even if the job is damaged. If no job has this id, returns a path
        that does not exist."""
        if (entry := self.find(job_id)) is not None:
            return entry.directory
        return next(reversed(self.set_aside(job_id)), self.jobs / "none" / job_id)

    def job_file(self, job_id: str) -> Path:
        """The file `job.json`, which describes the job, including its state. The file is replaced
        by rename."""
        return self.job_dir(job_id) / JOB_FILE

    def data_dir(self, job_id: str) -> Path:
        """The directory with the job's packed arrays; it is removed when the job ends."""
        return self.job_dir(job_id) / "data"

    def all_work_dirs(self, job_id: str) -> Path:
        return self.job_dir(job_id) / "attempts"

    def work_dir(self, job_id: str, attempt: int) -> Path:
        """The directory with the files of one attempt. A claim of the job creates the directory,
        and the attempt's end removes it."""
        return self.all_work_dirs(job_id) / str(attempt)

    def lease_file(self, job_id: str) -> Path:
        return self.job_dir(job_id) / "lease.json"

    def cancel_file(self, job_id: str) -> Path:
        """A file that exists while the cancellation of a running job is requested."""
        return self.job_dir(job_id) / "cancel"

    def events_file(self, job_id: str) -> Path:
        return self.job_dir(job_id) / EVENTS_FILE

    def log_file(self, job_id: str) -> Path:
        """The log file with the output of the job's ranks in all attempts. An ended job keeps this
        file."""
        return self.job_dir(job_id) / LOG_FILE

    def open_file(
        self, file: Callable[[str], Path], job_id: str, *, most: int | None = None
    ) -> BufferedReader:
        """Opens a file in the job's directory for reading. If the job ends meanwhile and its
        directory moves, the function opens the file in the new directory. Raises FileNotFoundError
        if the job has no such file, and NotPlainError as `open_plain` does.

        Args:
            file: the method of this class that returns the file's path, such as `log_file`.
            most: the maximum size in bytes; None: any size.
        """
        before = None
        while True:
            path = file(job_id)
            try:
                return open_plain(path, most=most)
            except (FileNotFoundError, NotADirectoryError) as error:
                if path == before:
                    raise FileNotFoundError(
                        errno.ENOENT, os.strerror(errno.ENOENT), path
                    ) from error
                before = path
                fs.exists(path)  # makes an NFS client ask the server for the directory's names

    def job_lock(self, job_id: str) -> Path:
        """The lock file of a job. All jobs share sixteen lock files."""
        _check_id(job_id)
        return self.jobs / "locks" / _digit(job_id)


def _check_id(job_id: str) -> None:
    if not is_job_id(job_id):
        rule = "a job's id is 1 to 64 of A-Z a-z 0-9 . _ - and begins with a letter or digit"
        raise InvalidInput(f"{job_id!r:.100} is refused: {rule}", field="id")


def _digit(job_id: str) -> str:
    return hashlib.sha256(job_id.encode()).hexdigest()[0]


def _entry(parent: Path, name: str, ended: bool) -> JobDir | None:
    """Parses the name of a job's directory in `parent`. Returns None if `name` is not such a
    name."""
    state = None
    if ended:
        name, _, last = name.rpartition(",")
        if (state := next((known for known in TERMINAL if known == last), None)) is None:
            return None
    key = JobKey.parse(name)
    if key is None or (not ended and parent.parent.name != key.run):
        return None
    return JobDir(key, parent, state)


class Names(tuple[str, ...]):
    """The sorted names in a directory. `parsed` caches the values that a reader computed from the
    names."""

    parsed: tuple[Any, ...] | None = None


class _Listing(NamedTuple):
    directory: tuple[int, int, int]  # device, inode, mtime (ns)
    since: float  # monotonic time at which this mtime was first seen
    listed: float  # monotonic
    names: Names


_listings: dict[str, _Listing] = {}
_SETTLED_SECONDS = 2.5
"""Two changes of a directory that are this many seconds apart give it different mtimes on every
file system."""


def listing(directory: Path) -> Names:
    """The names in `directory`, without temporary and hidden names; empty if the directory does not
    exist. Returns the same `Names` object until the directory changes."""
    # Opening the directory makes an NFS client ask the server for the mtime.
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
        # The loop iterates over a copy of the listings, because other threads may add and remove
        # listings during the loop.
        for path in [path for path in list(_listings) if f"{path}/".startswith(gone)]:
            _listings.pop(path, None)
    since = known.since if known.directory == identity else now
    _listings[str(directory)] = _Listing(identity, since, now, names)
    return names


def remembered[T](compute: Callable[[Path], T]) -> Callable[[Path], T | None]:
    """Caches `compute(path)` until the path's inode or mtime changes; returns None if the path does
    not exist."""

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
