"""Changes jobs: submit, claim, cancel, requeue, finish. Moving a job between directories is one rename.

Each change holds the job's lock, and is ordered so that a crash leaves the state before or after it. Calling it again,
or a new runner's `recover`, completes it.
"""

import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.errors import Conflict, NotFound, SpoolUnusable
from tandem.spool import fs
from tandem.spool.locks import file_lock
from tandem.spool.schema import PENDING, TERMINAL, Job, JobError, JobResult, JobSpec, JobState

if TYPE_CHECKING:
    from tandem.spool import Spool


class Queue:
    def __init__(self, spool: "Spool") -> None:
        self._spool = spool
        self._paths = spool.paths
        self._jobs = spool.jobs
        self._events = spool.events

    def next_base(self, run: str) -> int:
        """The step that the run's next job starts from: the newest checkpoint, plus one per pending job after it."""
        step = self._spool.checkpoints.newest(run)
        for _, job in self._jobs.pending(run):
            if job.result is None and job.spec.base_step == step:
                step += 1
        return step

    def submit(
        self, make: Callable[[str, int, Path], JobSpec], *,
        run: str, job_id: str | None, fingerprint: str, base_step: int | None,
    ) -> tuple[Job, bool]:  # fmt: skip
        """Queues a job; returns it and whether it is new.

        `make(id, base_step, directory)` writes the job's data into `directory` and returns its specification, whose
        `data.path` is set here. A known id with the same run and fingerprint returns the known job; with another,
        Conflict (field `id`). `base_step`, if given, must be `next_base(run)`: Conflict (field `base_step`). Any
        failure, also one of `make`, leaves no trace.
        """
        with self._spool.runs.lock(run):
            if job_id is not None and (known := self._known(job_id, run, fingerprint)) is not None:
                return known, False
            new_id = fs.new_ulid() if job_id is None else job_id
            expected = self.next_base(run)
            if base_step is not None and base_step != expected:
                newest, pending = self._spool.checkpoints.newest(run), len(self._jobs.pending(run))
                why = f"its newest checkpoint is {newest} and {pending} jobs are queued or running"
                raise Conflict(f"run {run!r} goes on from step {expected}, not {base_step}: {why}", field="base_step")
            data = self._paths.data_dir(new_id)
            with fs.staging(data.parent) as staged, fs.volume_errors(data):
                try:
                    spec = make(new_id, expected, staged)
                except OSError:
                    self._spool.check_writable()  # numpy reports a full disk without an errno
                    raise
                made = (spec.id, spec.run, spec.base_step, spec.fingerprint)
                if made != (new_id, run, expected, fingerprint):
                    raise ValueError(f"make() gave a job for {made}, not for {(new_id, run, expected, fingerprint)}")
                placed = spec.data.model_copy(update={"path": data.relative_to(self._spool.root).as_posix()})
                job = Job(spec=spec.model_copy(update={"data": placed}))
                fs.fsync_tree(staged)
                with self._spool.job_lock(new_id):
                    # A submitter to another run may have taken the id since.
                    if (known := self._known(new_id, run, fingerprint)) is not None:
                        return known, False
                    self._enqueue(job, staged)
        return job, True

    def _known(self, job_id: str, run: str, fingerprint: str) -> Job | None:
        try:
            _, job = self._jobs.get(job_id)
        except NotFound:
            return None
        if (job.spec.run, job.spec.fingerprint) != (run, fingerprint):
            raise Conflict(f"the id {job_id!r} is in use by another job, of run {job.spec.run!r}", field="id")
        return job

    def _enqueue(self, job: Job, staged: Path) -> None:
        data, file = self._paths.data_dir(job.spec.id), self._paths.job_file("queued", job.spec.id)
        fs.remove_tree(data)  # left by a submitter that died before the job existed
        fs.rename_dir(staged, data)
        try:
            fs.write_json_atomic(file, job)
        except BaseException:
            with suppress(OSError):
                file.unlink()
            fs.remove_tree(data)
            raise

    def claim(self, runner: str, *, waiting: Collection[str] = ()) -> Job | None:
        """Starts an attempt of the oldest queued job whose run has no running job; None if there is no such job.

        `waiting`: ids of jobs that are not claimed now. Later jobs of their runs are not claimed either.
        A run's jobs are claimed in the order of their base steps. When this returns, the job is running, with one more
        attempt, a lease, a work directory and the event `claimed`. If this raises, the job is still queued.
        """
        with file_lock(self._paths.claim_lock):
            pending = self._jobs.scan(PENDING)
            busy = {job.spec.run for directory, job in pending if directory == "running"}
            first: dict[str, Job] = {}
            for directory, job in sorted(pending, key=lambda item: item[1].spec.base_step):
                if directory == "queued" and job.result is not None:
                    self.finish(job, job.result)  # a process died while it cancelled this job
                elif directory == "queued" and job.spec.run not in busy:
                    first.setdefault(job.spec.run, job)
            ready = [job for job in first.values() if job.spec.id not in waiting]
            for candidate in sorted(ready, key=lambda job: (job.spec.created, job.spec.id)):
                with self._spool.job_lock(candidate.spec.id):
                    located = self._jobs.locate(candidate.spec.id)
                    # It may have been cancelled since the scan.
                    if located is not None and located[0] == "queued" and located[1].result is None:
                        return self._start(located[1], runner)
        return None

    def _start(self, job: Job, runner: str) -> Job:
        job = job.model_copy(update={"attempt": job.attempt + 1})
        job_id = job.spec.id
        work, running = self._paths.work_dir(job_id, job.attempt), self._paths.job_file("running", job_id)
        try:
            with fs.volume_errors(work):
                fs.remove_tree(work)
                work.mkdir(parents=True)
            self._spool.leases.write(job, runner, "claimed", [])
            fs.write_json_atomic(running, job)  # from here on the job is claimed
            self._events.append(job_id, "claimed", attempt=job.attempt, runner=runner, host=socket.gethostname())
        except BaseException:
            for path in (running, self._paths.lease_file(job_id)):
                with suppress(OSError):
                    path.unlink()
            fs.remove_tree(work.parent)
            raise
        with suppress(SpoolUnusable):  # the file in running/ is stronger than one that stays here
            fs.remove_file(self._paths.job_file("queued", job_id))
        return job

    def cancel(self, job_id: str) -> JobState:
        """Cancels a queued job at once; asks the runner to stop a running one. Returns the state after that."""
        with self._spool.job_lock(job_id):
            directory, job = self._jobs.located(job_id)
            if directory == "running" and job.result is None:
                fs.write_atomic(self._paths.cancel_file(job_id), b"")
                return directory
            return self._end(directory, job, _cancelled("cancelled before it started"))

    def requeue(self, job: Job, error: JobError, *, counts: bool = True) -> JobState:
        """Ends an attempt without a result. Returns the new state:

        `cancelled` if that was asked for; `failed` if `error` is not retriable or no attempt is left; else `queued`.
        `counts` False: the runner was stopped, so this attempt does not count. A decided job keeps its result.
        """
        job_id = job.spec.id
        with self._spool.job_lock(job_id):
            directory, current = self._jobs.located(job_id)
            if current.result is not None:
                return self._end(directory, current, current.result)
            if directory == "running":
                _check_attempt(job, current)
                if self._jobs.cancel_requested(job_id):
                    return self._end(directory, current, _cancelled("cancelled while it ran"))
                stopped = current.stopped + (0 if counts else 1)
                if not error.retriable or current.attempt - stopped >= current.spec.max_attempts:
                    return self._end(directory, current, JobResult(state="failed", error=error, finished=time.time()))
                running = self._paths.job_file("running", job_id)
                fs.write_json_atomic(running, current.model_copy(update={"last_error": error, "stopped": stopped}))
                events = self._events.read(job_id)
                if not any(event.type == "requeued" and event.attempt == current.attempt for event in events):
                    reason = error.model_dump(exclude={"log_tail"})
                    self._events.append(job_id, "requeued", attempt=current.attempt, error=reason, counts=counts)
                fs.move_file(running, self._paths.job_file("queued", job_id))
            _remove(self._paths.lease_file(job_id))
            fs.remove_tree(self._paths.all_work_dirs(job_id))
            return "queued"

    def finish(self, job: Job, result: JobResult) -> JobState:
        """Ends a running job: writes its result and the terminal event, renames its file, removes its data, work,
        lease and cancel marker. Returns the terminal state. Idempotent: the first result stands, and this completes
        what a crash left undone. Conflict (field `id`) if the job is queued, or in another attempt.
        """
        with self._spool.job_lock(job.spec.id):
            directory, current = self._jobs.located(job.spec.id)
            if current.result is None:
                if directory != "running":
                    raise Conflict(f"job {job.spec.id!r} is {directory}, so it can't be finished", field="id")
                _check_attempt(job, current)
            return self._end(directory, current, result)

    def _end(self, directory: JobState, job: Job, result: JobResult) -> JobState:
        """Makes `result` final, or the result that the job already has, beginning at the first missing step."""
        job_id = job.spec.id
        file = self._paths.job_file(directory, job_id)
        if job.result is None:
            job = job.model_copy(update={"result": result})
            fs.write_json_atomic(file, job)
        else:
            result = job.result
        if directory not in TERMINAL:
            if not self._events.ended(job_id):
                data = result.model_dump(exclude={"state"}, exclude_none=True)
                self._events.append(job_id, result.state, attempt=job.attempt, **data)
            fs.move_file(file, self._paths.job_file(result.state, job_id))
        self.clear(job_id)
        return result.state

    def clear(self, job_id: str) -> None:
        """Removes what a job needs only until it ends. A later `recover` removes what can't go now."""
        files = [self._paths.job_file(state, job_id) for state in PENDING]
        _remove(*files, self._paths.cancel_file(job_id), self._paths.lease_file(job_id))
        fs.remove_tree(self._paths.data_dir(job_id))
        fs.remove_tree(self._paths.all_work_dirs(job_id))


def _remove(*paths: Path) -> None:
    """Removes files that have no meaning any more, unless the volume refuses."""
    for path in paths:
        with suppress(SpoolUnusable):
            fs.remove_file(path)


def _check_attempt(job: Job, current: Job) -> None:
    if job.attempt != current.attempt:
        problem = f"is in attempt {current.attempt}, so the end of attempt {job.attempt} is ignored"
        raise Conflict(f"job {job.spec.id!r} {problem}", field="id")


def _cancelled(message: str) -> JobResult:
    return JobResult(state="cancelled", error=JobError(type="cancelled", message=message), finished=time.time())
