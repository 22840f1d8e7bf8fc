"""Reads jobs. `tandem.spool.queue` changes them.

A job is one file below `jobs/<state>/`, and the directory is its state. A crash can leave a job in
two directories: then the strongest counts (terminal over running over queued). A job with a result
is decided, whatever its directory, and has ended once its terminal event is written. A damaged file
is moved to `jobs/damaged/`, and its job is gone. A file with keys of a newer version stays, and its
job waits for a program of that version.
"""

import heapq
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import groupby, islice
from pathlib import Path

from pydantic import ValidationError

from tandem.errors import Conflict, NotFound, TandemError
from tandem.spool import fs
from tandem.spool.events import Events
from tandem.spool.locks import file_lock
from tandem.spool.paths import BUCKET, Paths, is_run_name, listing
from tandem.spool.schema import PENDING, TERMINAL, Job, JobError, JobKey, JobState
from tandem.system.logs import Log

_STATES: tuple[JobState, ...] = (*PENDING, *TERMINAL)  # weakest first
JobList = list[tuple[JobState, Job]]

log = Log("spool")


def _key(name: str) -> JobKey | None:
    return JobKey.parse(name.removesuffix(".json")) if name.endswith(".json") else None


class Index:
    """Which jobs there are, from the names of their files alone; what is damaged never gets in the
    way. Directories hold at most `BUCKET` queued jobs, or the ended jobs that were submitted within
    one hour. One that has not changed is not listed again (`listing`), so no answer costs more
    because there are many jobs."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def keys(self, directory: Path) -> tuple[JobKey, ...]:
        """The jobs in a directory, by submission; the very same tuple as long as it has not
        changed."""
        names = listing(directory)
        if names.parsed is None:
            names.parsed = tuple(key for name in names if (key := _key(name)) is not None)
        return names.parsed

    def directories(self, state: JobState, run: str | None = None) -> list[Path]:
        """The directories that hold the state's jobs, oldest jobs first; of queued jobs also by
        run."""
        top = self._paths.state_dir(state)
        if state == "running":
            return [top]
        if state in TERMINAL:
            return [top / name for name in listing(top)]
        runs = self.queued_runs() if run is None else [run]
        return [top / name / bucket for name in runs for bucket in listing(top / name)]

    def count(self, state: JobState, run: str | None = None) -> int:
        """How many jobs are in one state; `run`: of this run."""
        if state == "queued":
            return sum(len(self.keys(directory)) for directory in self.directories(state, run))
        return sum(1 for _ in self.newest_first(state, run))

    def newest_first(self, state: JobState, run: str | None = None) -> Iterator[JobKey]:
        """The jobs in one state, newest first, listed as they are needed."""
        if state == "queued" and run is None:
            return heapq.merge(
                *(self.newest_first(state, name) for name in self.queued_runs()), reverse=True
            )
        # Within a run, a later base step was submitted later, whatever the clocks say.
        directories = reversed(self.directories(state, run))
        keys = (key for directory in directories for key in reversed(self.keys(directory)))
        return keys if run is None else (key for key in keys if key.run == run)

    def queued_runs(self) -> list[str]:
        """Runs that have, or had, queued jobs."""
        return [name for name in listing(self._paths.state_dir("queued")) if is_run_name(name)]

    def queued(self, run: str) -> Iterator[JobKey]:
        """The run's queued jobs in the order of their base steps, listed as they are needed."""
        for directory in self.directories("queued", run):
            yield from sorted(self.keys(directory), key=lambda key: (key.base_step, key))

    def heads(self) -> Iterator[JobKey]:
        """The queued job with the lowest base step of each run, listed as they are needed."""
        for run in self.queued_runs():
            yield from islice(self.queued(run), 1)

    def running(self, run: str | None = None) -> list[JobKey]:
        """The running jobs, by submission."""
        return [
            key for key in self.keys(self._paths.state_dir("running")) if run in (None, key.run)
        ]

    def first_gap(self, run: str, step: int, running: Mapping[int, bool]) -> int:
        """The first base step from `step` on that no job takes. `running`: whether the run's
        running jobs take theirs, by base step; then the queue does not count, which a decided job's
        file may not have left yet.
        """
        while True:
            queued = {key.base_step for key in self.keys(self._paths.queue_dir(run, step))}
            end = (step // BUCKET + 1) * BUCKET
            for gap in range(step, end):
                if not running.get(gap, gap in queued):
                    return gap
            step = end

    def junk(self) -> list[Path]:
        """Names among the jobs' files that belong to no job."""
        top = self._paths.state_dir("queued")
        found = [
            top / name
            for name in listing(top)
            if not is_run_name(name) or not (top / name).is_dir()
        ]
        for state in ("queued", "running", *TERMINAL):
            for directory in self.directories(state):
                if not directory.is_dir():
                    found.append(directory)
                elif len(names := listing(directory)) > len(self.keys(directory)):
                    found += [directory / name for name in names if _key(name) is None]
        return found


class Jobs:
    def __init__(self, paths: Paths, events: Events) -> None:
        self._paths = paths
        self._events = events
        self.index = Index(paths)
        self._newer = set[Path]()

    def get(self, job_id: str) -> tuple[JobState, Job]:
        """The job and its state; NotFound (field `id`) if there is none."""
        located = self.locate(job_id, sure=False)
        if located is None:  # the job may have moved between two reads
            with file_lock(self._paths.job_lock(job_id)):
                located = self.located(job_id)
        return self._state(*located), located[1]

    def list(
        self,
        run: str | None = None,
        states: Collection[JobState] | None = None,
        *,
        limit: int | None = None,
        before: str | None = None,
    ) -> JobList:
        """Jobs of one run or all, in some states or all, oldest first; only the newest `limit`,
        only those submitted before the job `before`. NotFound (field `before`) if there is no such
        job."""
        wanted = frozenset(states or _STATES)
        bound = None
        if before is not None and (bound := self.find(before)) is None:
            raise NotFound(f"there is no job {before!r}", field="before")
        found: JobList = []
        for key in self._candidates(run, wanted):
            if bound is not None and key >= bound:
                continue
            if (located := self.locate(key, sure=False)) is None and (
                located := self._locate_moving(key)
            ) is None:
                continue
            state = self._state(*located)
            if state in wanted:
                found.append((state, located[1]))
            if len(found) == limit:
                break
        return found[::-1]

    def _locate_moving(self, key: JobKey) -> tuple[JobState, Job] | None:
        """As `locate`, for a job that moved back into the queue between two reads, or is gone."""
        with suppress(TandemError), file_lock(self._paths.job_lock(key.id)):
            return self.locate(key)
        return None

    def _candidates(self, run: str | None, wanted: frozenset[JobState]) -> Iterator[JobKey]:
        """The jobs that may be in the states `wanted`, newest first, each once."""
        # A decided job is in running/ until it has moved. It is listed before and after the queued
        # ones, between which and running/ jobs move in both directions.
        running = self.index.running(run)
        others = [
            self.index.newest_first(state, run)
            for state in _STATES
            if state in wanted - {"running"}
        ]
        yield from (
            key
            for key, _ in groupby(heapq.merge(sorted(running, reverse=True), *others, reverse=True))
        )
        yield from (
            key for key in self.index.running(run) if key not in running and wanted != {"queued"}
        )

    def pending(self, run: str) -> JobList:
        """Queued and running jobs of the run, in the order of their base steps."""
        return sorted(self.list(run, PENDING), key=lambda item: item[1].spec.base_step)

    def check_none_pending(self, run: str, field: str) -> None:
        """Conflict (with this field) if jobs of the run are queued or running."""
        jobs = [f"{job.spec.id} ({state})" for state, job in self.list(run, PENDING, limit=5)]
        for state in PENDING if not jobs else ():
            keys = self.index.newest_first(state, run)
            jobs += [
                f"{key.id} ({state}, of a newer version)"
                for key in keys
                if self._is_unreadable(state, key)
            ]
        if jobs:
            told = ", ".join(jobs[:5])
            raise Conflict(
                f"run {run!r} has jobs that are not done: {told}; cancel them or wait", field=field
            )

    def takes_step(self, key: JobKey) -> bool:
        """Whether a running job will make the step after its base step: it has no result yet."""
        if (located := self.locate(key, sure=False)) is not None:
            return located[1].result is None
        return self._is_unreadable("running", key)

    def _is_unreadable(self, state: JobState, key: JobKey) -> bool:
        """Whether a newer version wrote the job's file, so that only its name says anything."""
        return self.locate(key) is None and fs.exists(self._paths.job_file(state, key))

    def failed_on(self, run: str, base_step: int) -> tuple[JobState, str] | None:
        """State and id of the newest job of the run that failed, else was cancelled, on this base
        step."""
        for state in ("failed", "cancelled"):
            for key in self.index.newest_first(state, run):
                if key.base_step == base_step:
                    return state, key.id
        return None

    def cancel_requested(self, job_id: str) -> bool:
        return fs.exists(self._paths.cancel_file(job_id))

    def find(self, job_id: str, *, sure: bool = True) -> JobKey | None:
        """The job's key, or None. `sure` as in `fs.read_bytes`."""
        content = fs.read_bytes(self._paths.id_file(job_id), sure=sure)
        key = None if content is None else JobKey.parse(content.decode(errors="replace").strip())
        if content is not None and (key is None or key.id != job_id):  # damaged
            return next(
                (
                    key
                    for state in _STATES
                    for key in self.index.newest_first(state)
                    if key.id == job_id
                ),
                None,
            )
        return key

    def locate(self, job: str | JobKey, *, sure: bool = True) -> tuple[JobState, Job] | None:
        """The job and the strongest directory that has it, or None. `sure` as in `fs.read_bytes`.
        Reads the weakest directory first, so that a job that moves meanwhile is met later."""
        key = job if isinstance(job, JobKey) else self.find(job, sure=sure)
        if key is None:
            return None
        located: tuple[JobState, Job] | None = None
        for directory in _STATES:
            path = self._paths.job_file(directory, key)
            try:
                if (read := fs.read_record(path, Job, sure=sure)) is not None:
                    if read.key != key:
                        raise ValueError(f"it is the file of {read.key.name}")
                    located = directory, read
            except ValueError as error:
                if not self._is_newer(path, error):
                    self._set_aside(directory, key, path, error)
        return located

    def _is_newer(self, path: Path, error: Exception) -> bool:
        """Whether a newer version of Tandem wrote the file, for its own trainer: it has keys that
        this one does not."""
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

    def _set_aside(self, directory: JobState, key: JobKey, path: Path, error: Exception) -> None:
        """Ends the job of a damaged file, unless a stronger directory has the job, and moves the
        file to where it disturbs nobody. What fails, as on a full volume, the next reader tries
        again: a job whose file is gone has its end."""
        target = self._paths.damaged / f"{directory},{path.name}.{fs.new_ulid()}"
        message = (
            f"{path} is damaged or of another Tandem version, and was moved to {target}: {error}"
        )
        with suppress(OSError, TandemError), file_lock(self._paths.job_lock(key.id)):
            if not fs.exists(path):
                return  # another process was faster
            stronger = _STATES[_STATES.index(directory) + 1 :]
            goes_on = any(fs.exists(self._paths.job_file(state, key)) for state in stronger)
            if not goes_on and directory not in TERMINAL and not self._events.ended(key.id):
                failure = JobError(type="job_damaged", message=f"{message}; submit the job again")
                self._events.append(key.id, "failed", error=failure.model_dump())
            fs.move_file(path, target)
            log.error("set a damaged file aside", job=key.id, error=message)

    def located(self, job_id: str) -> tuple[JobState, Job]:
        """As `locate`; NotFound (field `id`) if there is no such job."""
        if (located := self.locate(job_id)) is None:
            damaged = [name for name in listing(self._paths.damaged) if f",{job_id}.json." in name]
            why = (
                f": its file was damaged and is {self._paths.damaged / damaged[-1]}"
                if damaged
                else ""
            )
            raise NotFound(f"there is no job {job_id!r}{why}", field="id")
        return located

    def _state(self, directory: JobState, job: Job) -> JobState:
        """The job's state as everybody sees it: terminal exactly when the terminal event is
        written."""
        if directory in TERMINAL:
            return directory
        if job.result is None or not self._events.ended(job.spec.id):
            return "queued" if job.result is not None and not job.attempt else directory
        return job.result.state
