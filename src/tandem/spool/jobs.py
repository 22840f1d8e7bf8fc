"""Reads jobs; `tandem.spool.queue` changes them.

A job is one directory (`tandem.spool.paths`), and the file `job.json` in this directory has the
job's state. A job with a result is called decided, no matter which directory the job is in. A job
has ended once its terminal event is written. A live job fails if its `job.json` is damaged. The
directory of a damaged job, live or ended, is moved to `jobs/damaged/`. A `job.json` with keys of a
newer version of Tandem stays unchanged, and its job waits for a program of that version.
"""

import heapq
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from itertools import groupby, islice
from pathlib import Path

from pydantic import ValidationError

from tandem.errors import Conflict, NotFound, TandemError
from tandem.spool import fs
from tandem.spool.events import Events
from tandem.spool.locks import file_lock
from tandem.spool.paths import BUCKET, JOB_FILE, KEPT, JobDir, Paths, is_run_name, listing
from tandem.spool.schema import PENDING, TERMINAL, Job, JobError, JobKey, JobState
from tandem.system.logs import Log

_STATES: tuple[JobState, ...] = (*PENDING, *TERMINAL)
JobList = list[tuple[JobState, Job]]
_LOOKS, _LOOK_SECONDS = 3, 0.02
"""A file counts as damaged only if it is damaged at each of this many looks. On a mount that caches
sizes (FUSE), a file that was just replaced looks truncated; the next look finds the whole file."""

log = Log("spool")


class Index:
    """The list of jobs, which is computed from the names of the jobs' directories. The states of
    claimed jobs are read from the jobs' files. A directory that has not changed is not listed again
    (`listing`), so the list stays fast with many jobs."""

    def __init__(
        self, paths: Paths, locate: Callable[[JobKey], tuple[JobState, Job] | None]
    ) -> None:
        self._paths, self._locate = paths, locate

    def live(self, run: str | None = None) -> list[tuple[JobDir, ...]]:
        """The live jobs, one tuple for each directory. Live jobs are queued jobs, running jobs, and
        decided jobs whose directories have not moved yet."""
        return [self._paths.entries(directory) for directory in self._paths.live_buckets(run)]

    def ended(self) -> dict[Path, tuple[JobDir, ...]]:
        """Directory -> its ended jobs. For an unchanged directory, each call returns the same tuple
        object."""
        top = self._paths.ended
        return {top / name: self._paths.entries(top / name) for name in listing(top)}

    def active(self) -> list[JobKey]:
        """The jobs that are named in `jobs/active/`, in the order of submission. A job with a name
        in `jobs/active/` may already have been removed or queued again."""
        return [key for name in listing(self._paths.active) if (key := JobKey.parse(name))]

    def running(self, run: str | None = None) -> list[JobKey]:
        """The running jobs, including decided jobs whose directories have not moved yet, in the
        order of submission."""
        return [key for key in self.active() if run in (None, key.run) and self._runs(key)]

    def _runs(self, key: JobKey) -> bool:
        # `_locate` returns None if the job was removed, or if a newer version wrote its file. A job
        # whose file a newer version wrote counts as running.
        if (located := self._locate(key)) is None:
            return fs.exists(self._paths.live_dir(key))
        return located[0] == "running"

    def count(self, state: JobState, run: str | None = None) -> int:
        """The number of jobs in one state. If `run` is given, only its jobs are counted."""
        if state == "queued":
            return sum(map(len, self.live(run))) - len(self.running(run))
        return sum(1 for _ in self.newest_first(state, run))

    def newest_first(self, state: JobState, run: str | None = None) -> Iterator[JobKey]:
        """The jobs in one state, newest first."""
        if state == "running":
            return reversed(self.running(run))
        if state == "queued":
            running = set(self.running(run))
            return (entry.key for entry in self.newest_live(run) if entry.key not in running)
        return (entry.key for entry in self.newest_ended({state}, run))

    def newest_live(self, run: str | None = None) -> Iterator[JobDir]:
        """Live jobs, newest first."""
        # Within a run, a job with a later base step was submitted later, even if the clocks
        # disagree.
        by_run = [self.live(name) for name in (self.runs() if run is None else [run])]
        newest = [
            (entry for entries in reversed(directories) for entry in reversed(entries))
            for directories in by_run
        ]
        return heapq.merge(*newest, reverse=True)

    def newest_ended(
        self, states: Collection[JobState], run: str | None = None
    ) -> Iterator[JobDir]:
        """Jobs that ended in one of `states`, newest first."""
        merged = heapq.merge(*map(reversed, self.ended().values()), reverse=True)
        return (entry for entry in merged if entry.ended in states and run in (None, entry.key.run))

    def runs(self) -> list[str]:
        """The runs with a directory in `jobs/live/`, which may be empty."""
        return [name for name in listing(self._paths.live) if is_run_name(name)]

    def queued(self, run: str) -> Iterator[JobKey]:
        """The run's queued jobs in the order of their base steps, listed lazily."""
        return self._waiting(run, set(self.running(run)))

    def heads(self) -> Iterator[JobKey]:
        """For each run, the queued job with the lowest base step, listed lazily."""
        running = set(self.running())
        for run in self.runs():
            yield from islice(self._waiting(run, running), 1)

    def _waiting(self, run: str, running: Collection[JobKey]) -> Iterator[JobKey]:
        for directory in self._paths.live_buckets(run):
            keys = [entry.key for entry in self._paths.entries(directory)]
            yield from sorted(set(keys).difference(running), key=lambda key: (key.base_step, key))

    def first_gap(self, run: str, step: int, decided: Collection[JobKey]) -> int:
        """The lowest base step, not below `step`, for which the run has no job.

        Args:
            decided: the jobs that are ignored, because they already have a result.
        """
        while True:
            entries = self._paths.entries(self._paths.bucket(run, step))
            taken = {entry.key.base_step for entry in entries if entry.key not in decided}
            end = (step // BUCKET + 1) * BUCKET
            for gap in range(step, end):
                if gap not in taken:
                    return gap
            step = end

    def junk(self) -> list[Path]:
        """The paths below `jobs/live/`, `jobs/active/` and `jobs/ended/` whose names are
        invalid."""
        live, active = self._paths.live, self._paths.active
        found = [active / name for name in listing(active) if JobKey.parse(name) is None]
        for name in listing(live):
            if not is_run_name(name) or not (live / name).is_dir():
                found.append(live / name)
        ended = [self._paths.ended / name for name in listing(self._paths.ended)]
        for directory in (*self._paths.live_buckets(), *ended):
            if not directory.is_dir():
                found.append(directory)
                continue
            known = {entry.name for entry in self._paths.entries(directory)}
            found += [directory / name for name in listing(directory) if name not in known]
        return found


class Jobs:
    def __init__(self, paths: Paths, events: Events) -> None:
        self._paths = paths
        self._events = events
        self.index = Index(paths, self.locate)
        self._newer = set[Path]()

    def get(self, job_id: str) -> tuple[JobState, Job]:
        """The job and its state. Raises NotFound (field `id`) if the job does not exist."""
        located = self.locate(job_id, sure=False) or self.located(job_id)
        return self._state(*located), located[1]

    def list(
        self,
        run: str | None = None,
        states: Collection[JobState] | None = None,
        *,
        limit: int | None = None,
        before: str | None = None,
    ) -> JobList:
        """Jobs and their states, oldest first.

        Args:
            run: list only jobs of this run; None: list jobs of all runs.
            states: list only jobs in these states; None or empty: list jobs in all states.
            limit: return only the newest `limit` jobs; None: all.
            before: list only jobs submitted before the job with this id. Raises NotFound (field
                `before`) if there is no job with the id `before`.
        """
        wanted = frozenset(states or _STATES)
        bound = None
        if before is not None and (bound := self.find(before)) is None:
            raise NotFound(f"there is no job {before!r}", field="before")
        found: JobList = []
        for entry in self._candidates(run, wanted):
            if bound is not None and entry.key >= bound:
                continue
            if (located := self.locate(entry, sure=False)) is None:
                continue
            state = self._state(*located)
            if state in wanted:
                found.append((state, located[1]))
            if len(found) == limit:
                break
        return found[::-1]

    def _candidates(self, run: str | None, wanted: frozenset[JobState]) -> Iterator[JobDir]:
        """The jobs that may be in the states `wanted`, newest first, without duplicates."""
        # Live jobs are listed before ended jobs. A job that ends during the listing is therefore
        # found among the ended jobs.
        if "queued" in wanted:
            live = [*self.index.newest_live(run)]
        else:  # a decided job may already have a terminal state
            keys = [key for key in reversed(self.index.active()) if run in (None, key.run)]
            live = [self._paths.live_entry(key) for key in keys]
        ended = self.index.newest_ended(wanted, run)
        merged = heapq.merge(live, ended, key=lambda entry: entry.key, reverse=True)
        yield from (next(same) for _, same in groupby(merged, key=lambda entry: entry.key))

    def pending(self, run: str) -> JobList:
        """Queued and running jobs of the run, in the order of their base steps."""
        return sorted(self.list(run, PENDING), key=lambda item: item[1].spec.base_step)

    def check_none_pending(self, run: str, field: str) -> None:
        """Raises Conflict (with the field `field`) if jobs of the run are queued or running."""
        jobs = [f"{job.spec.id} ({state})" for state, job in self.list(run, PENDING, limit=5)]
        for entry in self.index.newest_live(run) if not jobs else ():
            if self._is_unreadable(entry.key):
                state = "running" if entry.key in self.index.running(run) else "queued"
                jobs.append(f"{entry.key.id} ({state}, of a newer version)")
        if jobs:
            told = ", ".join(jobs[:5])
            raise Conflict(
                f"run {run!r} has jobs that are not done: {told}; cancel them or wait", field=field
            )

    def decided(self, run: str) -> set[JobKey]:
        """The run's live jobs that already have a result. A job with a result makes no further
        checkpoint."""
        keys = [key for key in self.index.active() if key.run == run]
        found = [(key, self.locate(key, sure=False)) for key in keys]
        return {key for key, located in found if located and located[1].result is not None}

    def _is_unreadable(self, key: JobKey) -> bool:
        """Whether a newer version wrote the job's file, so that this version can read only the
        job's name."""
        return self.locate(key) is None and self.find(key.id) == key

    def failed_on(self, run: str, base_step: int) -> tuple[JobState, str] | None:
        """State and id of the newest failed job with this base step. If no job with this base step
        has failed, returns the newest cancelled job. Returns None if no job with this base step has
        failed or was cancelled."""
        for state in ("failed", "cancelled"):
            for key in self.index.newest_first(state, run):
                if key.base_step == base_step:
                    return state, key.id
        return None

    def cancel_requested(self, job_id: str) -> bool:
        return fs.exists(self._paths.cancel_file(job_id))

    def find(self, job_id: str) -> JobKey | None:
        """The job's key; None if the job does not exist."""
        entry = self._paths.find(job_id)
        return None if entry is None else entry.key

    def locate(
        self, job: str | JobKey | JobDir, *, sure: bool = True
    ) -> tuple[JobState, Job] | None:
        """The job and its state; None if the job does not exist or can't be read. A decided job
        whose directory has not moved yet counts as `running`. The argument `sure` is explained at
        `fs.read_bytes`. A lookup by id searches all live jobs; a lookup by key or by entry is
        faster."""
        if isinstance(job, str):
            key, entry = None, self._paths.find(job)
        else:
            key = job if isinstance(job, JobKey) else job.key
            entry = self._paths.live_entry(key) if isinstance(job, JobKey) else job
        before, looks = None, 0
        while entry is not None and key in (None, entry.key):
            path = entry.directory / JOB_FILE
            # An NFS client that opens the directory asks the server whether the file was replaced.
            if (opened := fs.open_dir(entry.directory)) is not None:
                os.close(opened)
            try:
                read = fs.read_record(path, Job, sure=sure or before is not None)
                if read is not None or entry == before:
                    _check(entry, read)
            except ValueError as error:
                if self._is_newer(path, error):
                    return None
                if (looks := looks + 1) < _LOOKS:
                    time.sleep(_LOOK_SECONDS)
                    continue
                self._set_aside(entry, error)
                return None
            if read is not None:
                return (read.state if read.result is None or entry.ended else "running"), read
            # the job has ended meanwhile, or was removed
            before, entry = entry, self._paths.find(entry.key.id)
        return None

    def _is_newer(self, path: Path, error: Exception) -> bool:
        """Whether a newer version of Tandem wrote the file: the file has keys that this version
        does not know."""
        newer = isinstance(error, ValidationError) and {one["type"] for one in error.errors()} == {
            "extra_forbidden"
        }
        if newer and path not in self._newer:
            self._newer.add(path)
            log.error(
                "left a job's file to a newer version; upgrade this program",
                path=path,
                error=str(error),
            )
        return newer

    def _set_aside(self, entry: JobDir, error: Exception) -> None:
        """Ends a damaged job, and moves its directory to `jobs/damaged/`. If the move fails, for
        example on a full volume, the next reader of the job tries again. The terminal event is
        written before the move, so every job in `jobs/damaged/` has its terminal event."""
        key, target = entry.key, self._paths.damaged / f"{entry.key.name}.{fs.new_ulid()}"
        message = (
            f"{entry.directory / JOB_FILE} is damaged or of another Tandem version, and its"
            f" directory was moved to {target}: {error}"
        )
        with suppress(OSError, TandemError), file_lock(self._paths.job_lock(key.id)):
            if self._paths.find(key.id) != entry:
                return  # another process has already moved the directory
            if not entry.ended and not self._events.ended(key.id):
                failure = JobError(type="job_damaged", message=f"{message}; submit the job again")
                self._events.append(key.id, "failed", error=failure.model_dump())
            remove_unkept(entry.directory)
            fs.rename_dir(entry.directory, target)
            fs.remove_file(self._paths.active_file(key), durable=False)
            if not entry.ended:
                fs.remove_empty(entry.directory.parent, entry.directory.parent.parent)
            log.error("set a damaged job aside", job=key.id, error=message)

    def located(self, job_id: str) -> tuple[JobState, Job]:
        """Like `locate`, but raises NotFound (field `id`) instead of returning None."""
        if (located := self.locate(job_id)) is None:
            damaged = self._paths.set_aside(job_id)
            why = f": it was damaged, and its directory is {damaged[-1]}" if damaged else ""
            raise NotFound(f"there is no job {job_id!r}{why}", field="id")
        return located

    def _state(self, state: JobState, job: Job) -> JobState:
        """The job's state as every program reports it. The reported state is terminal if and only
        if the terminal event is written."""
        if state in TERMINAL or job.result is None:
            return state
        if self._events.ended(job.spec.id):
            return job.state
        return "running" if job.attempt else "queued"


def remove_unkept(directory: Path) -> None:
    """Removes files that a job needs only until it ends. Files that can't be removed now are
    removed when the job itself is removed."""
    with suppress(FileNotFoundError):
        for path in directory.iterdir():
            if path.name not in KEPT:
                with suppress(OSError, TandemError):
                    fs.remove_tree(path) if path.is_dir() else fs.remove_file(path, durable=False)


def _check(entry: JobDir, job: Job | None) -> None:
    """Raises ValueError if the file is missing or belongs to another job. Also raises ValueError if
    the job's state contradicts the job's result or the directory's name."""
    if job is None:
        raise ValueError("it is missing")
    if job.key != entry.key:
        raise ValueError(f"it is the file of {job.key.name}")
    if (job.result is None) == (job.state in TERMINAL) or entry.ended not in (None, job.state):
        raise ValueError(f"its state is {job.state}")
    if job.result is not None and job.result.state != job.state:
        raise ValueError(f"its state is {job.state}, its result is {job.result.state}")
