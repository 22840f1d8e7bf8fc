"""Reads jobs. `tandem.spool.queue` changes them.

A job is one file, `jobs/<state>/<id>.json`, and the directory is its state. A crash can leave a job in two directories:
then the strongest counts (terminal over running over queued). A job with a result is decided, whatever its directory,
and has ended once its terminal event is written.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress

from pydantic import ValidationError

from tandem.errors import NotFound, SpoolUnusable
from tandem.spool import fs
from tandem.spool.events import Events
from tandem.spool.locks import file_lock
from tandem.spool.paths import Paths, is_job_id, rank_files
from tandem.spool.schema import PENDING, TERMINAL, Beat, Job, JobState

_STATES: tuple[JobState, ...] = (*PENDING, *TERMINAL)  # weakest first
JobList = list[tuple[JobState, Job]]


class Jobs:
    def __init__(self, paths: Paths, events: Events) -> None:
        self._paths = paths
        self._events = events

    def get(self, job_id: str) -> tuple[JobState, Job]:
        """The job and its state; NotFound (field `id`) if there is none."""
        located = self.locate(job_id, sure=False)
        if located is None:  # the job may have moved between two reads
            with file_lock(self._paths.job_lock(job_id)):
                located = self.located(job_id)
        return self._state(*located), located[1]

    def list(self, run: str | None = None, states: Collection[JobState] | None = None) -> JobList:
        """Jobs of one run or all, in some states or all, oldest first."""
        wanted = frozenset(_STATES if states is None else states)
        located = self.scan(_STATES if wanted & frozenset(TERMINAL) else PENDING)
        jobs = [(self._state(directory, job), job) for directory, job in located if run in (None, job.spec.run)]
        jobs = [item for item in jobs if item[0] in wanted]
        return sorted(jobs, key=lambda item: (item[1].spec.created, item[1].spec.id))

    def pending(self, run: str) -> JobList:
        """Queued and running jobs of the run, in the order of their base steps."""
        return sorted(self.list(run, PENDING), key=lambda item: item[1].spec.base_step)

    def ids(self, state: JobState) -> Sequence[str]:
        """Ids in one state's directory, listed once: a job that moves meanwhile may be in two states, or in none."""
        names = fs.names(self._paths.state_dir(state))
        ids = (name.removesuffix(".json") for name in names if name.endswith(".json"))
        return [job_id for job_id in ids if is_job_id(job_id)]

    def cancel_requested(self, job_id: str) -> bool:
        return fs.exists(self._paths.cancel_file(job_id))

    def beats(self, job_id: str, attempt: int) -> dict[int, Beat]:
        """The last heartbeat of each rank that has a readable one."""
        beats: dict[int, Beat] = {}
        for rank, path in rank_files(self._paths.work_dir(job_id, attempt), "beat").items():
            with suppress(ValidationError):
                beats[rank] = Beat.model_validate_json(fs.read_bytes(path, sure=False) or b"")
        return dict(sorted(beats.items()))

    def locate(self, job_id: str, *, sure: bool = True) -> tuple[JobState, Job] | None:
        """The job and the strongest directory that has it, or None. `sure` as in `fs.read_bytes`.

        Reads the weakest directory first, so that a job that moves meanwhile is met later.
        """
        located: tuple[JobState, Job] | None = None
        for directory in _STATES:
            path = self._paths.job_file(directory, job_id)
            if (content := fs.read_bytes(path, sure=sure)) is not None:
                try:
                    located = directory, Job.model_validate_json(content)
                except ValidationError as error:
                    problem = f"{path} is damaged or of another Tandem version; move it away"
                    raise SpoolUnusable(f"{problem}: {error}") from error
        return located

    def located(self, job_id: str) -> tuple[JobState, Job]:
        """As `locate`; NotFound (field `id`) if there is no such job."""
        if (located := self.locate(job_id)) is None:
            raise NotFound(f"there is no job {job_id!r}", field="id")
        return located

    def scan(self, directories: Sequence[JobState]) -> JobList:
        """The jobs in these directories, each with the strongest directory that has it.

        Lists the directories until two listings agree, so that a job that moves between them is not missed.
        """
        ids: set[str] = set()
        for _ in range(20):
            before, ids = ids, {job_id for directory in directories for job_id in self.ids(directory)}
            if ids == before:
                break
        located = (self.locate(job_id, sure=False) for job_id in sorted(ids))
        return [item for item in located if item is not None]

    def _state(self, directory: JobState, job: Job) -> JobState:
        """The job's state as everybody sees it: terminal exactly when the terminal event is written."""
        if job.result is None or directory in TERMINAL or not self._events.ended(job.spec.id):
            return directory
        return job.result.state
