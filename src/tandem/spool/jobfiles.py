"""Where a job's files are, and which state a job is in.

A crash can leave a job in two directories: then the strongest counts (terminal over running over queued). A file with
a result is decided whatever its directory, and has ended once its terminal event is written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from tandem.errors import NotFound, SpoolUnusable
from tandem.spool import fs, names
from tandem.spool.schema import TERMINAL, Beat, Job, JobState, Lease

if TYPE_CHECKING:
    from tandem.spool import Spool

PENDING: tuple[JobState, ...] = ("queued", "running")
STATES: tuple[JobState, ...] = (*PENDING, *TERMINAL)  # weakest first
JobList = list[tuple[JobState, Job]]


class JobFiles:
    """Paths and reading; `tandem.spool.jobs.Jobs` adds what changes them."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._dir = spool.root / "jobs"

    # ---------------------------------------------------------------- paths

    def _file(self, state: JobState, job_id: str) -> Path:
        return self._dir / state / f"{names.job_id(job_id)}.json"

    def data_dir(self, job_id: str) -> Path:
        """Packed arrays of the job; gone when it ends."""
        return self._dir / "data" / names.job_id(job_id)

    def work_dir(self, job_id: str, attempt: int) -> Path:
        """Of one attempt: heartbeats, errors, staged checkpoint. `claim` makes it; gone when the attempt ends."""
        return self._dir / "work" / names.job_id(job_id) / str(int(attempt))

    def log_path(self, job_id: str) -> Path:
        """What the ranks printed, over all attempts; kept."""
        return self._dir / "logs" / f"{names.job_id(job_id)}.log"

    def events_path(self, job_id: str) -> Path:
        return self._spool.events.path(job_id)

    def _lease_path(self, job_id: str) -> Path:
        return self._dir / "leases" / f"{names.job_id(job_id)}.json"

    def _cancel_path(self, job_id: str) -> Path:
        return self._dir / "cancel" / names.job_id(job_id)

    def state_dir(self, state: JobState) -> Path:
        """The files of the jobs in one state, `<id>.json`; its mtime changes when a job comes or goes."""
        return self._dir / state

    def beat_path(self, job_id: str, attempt: int, rank: int) -> Path:
        """A rank's heartbeat."""
        return self.work_dir(job_id, attempt) / f"beat.{rank}"

    # ---------------------------------------------------------------- reading

    def ids(self, state: JobState) -> list[str]:
        """Ids in one state's directory, from a single look: a job on its way may be in two of them, or missed."""
        ids = (name.removesuffix(".json") for name in fs.names(self.state_dir(state)) if name.endswith(".json"))
        return [job_id for job_id in ids if names.is_job_id(job_id)]

    def beats(self, job_id: str, attempt: int) -> dict[int, Beat]:
        """The last heartbeat of each rank that gave one; what can't be read is left out."""
        found: dict[int, Beat] = {}
        for name in fs.names(self.work_dir(job_id, attempt)):
            kind, _, rank = name.partition(".")
            if kind == "beat" and rank.isdigit():
                content = fs.read_bytes(self.beat_path(job_id, attempt, int(rank)), sure=False)
                with suppress(ValidationError):
                    found[int(rank)] = Beat.model_validate_json(content or b"")
        return found

    def get(self, job_id: str) -> tuple[JobState, Job]:
        """The job and its state; NotFound (field `id`) if there is none."""
        found = self._look(job_id, sure=False)
        if found is None:  # it may have moved while we looked
            with self._spool.job_lock(job_id):
                found = self._look(job_id)
        if found is None:
            raise NotFound(f"there is no job {job_id!r}", field="id")
        return self._state(*found), found[1]

    def _state(self, where: JobState, job: Job) -> JobState:
        """A decided job whose events don't tell of it is still where it is: a terminal state shows exactly when the
        terminal event does."""
        if job.result is None or where in TERMINAL:
            return where
        told = any(event.type in TERMINAL for event in self._spool.events.read(job.spec.id))
        return job.result.state if told else where

    def lease(self, job_id: str) -> Lease | None:
        """Who runs the job; None if nobody does."""
        content = fs.read_bytes(self._lease_path(job_id))
        return None if content is None else Lease.model_validate_json(content)

    def cancel_requested(self, job_id: str) -> bool:
        return fs.exists(self._cancel_path(job_id))

    def list(self, run: str | None = None, states: Collection[JobState] | None = None) -> JobList:
        """Jobs of one run or all, in some states or all, oldest first."""
        wanted = frozenset(states) if states is not None else frozenset(STATES)
        found: JobList = []
        for where, job in self._scan(STATES if wanted & frozenset(TERMINAL) else PENDING):
            state = self._state(where, job)
            if state in wanted and (run is None or job.spec.run == run):
                found.append((state, job))
        return sorted(found, key=lambda item: (item[1].spec.created, item[1].spec.id))

    def pending(self, run: str) -> JobList:
        """Jobs of the run that are queued or running, in the order of the chain."""
        found = self.list(run, PENDING)
        return sorted(found, key=lambda item: (item[1].spec.base_step, item[1].spec.created, item[1].spec.id))

    def next_base(self, run: str) -> int:
        """The step that the next job of the run starts from: the newest, advanced by the jobs that lead on from it."""
        step = self._spool.checkpoints.newest(run)
        for _, job in self.pending(run):
            if job.result is None and job.spec.base_step == step:
                step += 1
        return step

    def _ids(self, directories: Sequence[JobState]) -> Sequence[str]:
        """Ids of the files in these state directories, looked at until nothing moved between two looks."""
        found: set[str] = set()
        for _ in range(20):
            before, found = found, {job_id for state in directories for job_id in self.ids(state)}
            if found == before:
                break
        return sorted(found)

    def _scan(self, directories: Sequence[JobState]) -> JobList:
        """The jobs in these directories, with the strongest directory each is in."""
        found = (self._look(job_id, sure=False) for job_id in self._ids(directories))
        return [item for item in found if item is not None]

    def _look(self, job_id: str, *, sure: bool = True) -> tuple[JobState, Job] | None:
        """The strongest directory that has the job. Weakest first, so that a job on its way is met later."""
        found: tuple[JobState, Job] | None = None
        for state in STATES:
            path = self._file(state, job_id)
            content = fs.read_bytes(path, sure=sure)
            if content is not None:
                try:
                    found = state, Job.model_validate_json(content)
                except ValidationError as error:
                    what = f"{path} is damaged or of another Tandem version; move it away"
                    raise SpoolUnusable(f"{what}: {error}") from error
        return found
