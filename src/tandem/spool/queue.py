"""Changes jobs: submit, claim, cancel, requeue, finish.

A change of a job's state is one rename of the job's `job.json`. One rename of a job's directory
creates the job, and another rename of the directory ends the job. Each change of a job is made
under the job's lock. The steps of a change are ordered so that a crash leaves either the state
before the change or the state after it. A change that a crash interrupted is completed by a
repeated call, the next claim, or a new runner's `recover`. `jobs/active/` has the names of the live
jobs that run or are being ended. A job's name is added to `jobs/active/` before its state changes
from `queued`, and removed after the job is queued again or has ended. Locks are taken in this
order: the run's lock, the lock of claims, the job's lock.
"""

import socket
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from tandem.errors import Conflict, NotFound, SpoolUnusable
from tandem.spool import fence, fs
from tandem.spool.checkpoints import Checkpoints
from tandem.spool.events import Events
from tandem.spool.job_checks import check_age, check_reference
from tandem.spool.jobs import Jobs, remove_unkept
from tandem.spool.locks import Leases, file_lock
from tandem.spool.paths import JOB_FILE, Paths
from tandem.spool.runs import Runs
from tandem.spool.schema import (
    TERMINAL,
    EventType,
    Job,
    JobError,
    JobKey,
    JobResult,
    JobSpec,
    JobState,
    SessionJob,
)

# The smallest allowed difference, in seconds, between the `created` times of two jobs of a run. The
# difference is more than one microsecond, because keys have whole microseconds and floats are not
# exact.
_APART = 2e-6


class Queue:
    def __init__(
        self,
        paths: Paths,
        runs: Runs,
        checkpoints: Checkpoints,
        jobs: Jobs,
        events: Events,
        leases: Leases,
    ) -> None:
        self._paths, self._runs, self._checkpoints = paths, runs, checkpoints
        self._jobs, self._index, self._events, self._leases = jobs, jobs.index, events, leases

    def _job_lock(self, job_id: str) -> AbstractContextManager[int]:
        return file_lock(self._paths.job_lock(job_id))

    def next_base(self, run: str) -> int:
        """The step from which the run's next job will start: the newest checkpoint, plus one for
        each pending job."""
        decided = self._jobs.decided(run)
        return self._index.first_gap(run, self._checkpoints.newest(run), decided)

    def submit(
        self,
        make: Callable[[str, int, Path], JobSpec],
        *,
        run: str,
        job_id: str | None,
        fingerprint: str,
        base_step: int | None,
        most_behind: int | None = None,
        now: Callable[[], float] = time.time,
    ) -> tuple[Job, bool]:
        """Queues a job. Returns the job, and whether the job is new. If `submit` or `make` fails,
        no file of the job stays on the volume. If a job with the id `job_id` and the same run and
        fingerprint exists, that job is returned. Raises Conflict (field `id`) if the existing job
        has another run or fingerprint. Raises Conflict (field `base_step`) if the client expects
        another step than `next_base(run)`. Raises InvalidInput (field `max_off_policy_steps`) if
        the oldest turn was sampled more than `most_behind` steps before the base step.

        `make(id, base_step, directory)` writes the job's data into `directory` and returns the
        job's specification. Then `submit` sets the specification's `base_step`, `created` and
        `data.path`, because another job may be queued while `make` runs.

        Args:
            job_id: the client's id, or None for a new id.
            base_step: the step that the client expects to start from; None: any step.
            now: returns the present time in Unix seconds.
        """
        spec_of_run = self._runs.get(run)
        if job_id is None:
            job_id = fs.new_ulid()
        elif (known := self._known(job_id, run, fingerprint)) is not None:
            return known, False
        # The first check of `base_step` refuses a wrong step before the data is written. The check
        # is repeated after the write, because other jobs may be queued meanwhile.
        expected = (
            self._checkpoints.newest(run) if base_step is None else self._check_base(run, base_step)
        )
        with fs.staging(self._paths.live) as staged, fs.volume_errors(self._paths.live):
            (staged / "data").mkdir()
            spec = make(job_id, expected, staged / "data")
            fs.fsync_tree(staged / "data")
            if isinstance(spec, SessionJob) != (spec_of_run.session is not None):
                problem = f"run {run!r} is trained by the requests of its session alone"
                raise Conflict(f"{problem}; fork it, and train the fork", field="run")
            with self._runs.lock(run), self._job_lock(job_id):
                # Another request may have used the client's id meanwhile.
                if (known := self._known(job_id, run, fingerprint)) is not None:
                    return known, False
                if self._runs.get(run) != spec_of_run:
                    raise Conflict(
                        f"run {run!r} was deleted, and made again, while this was packed",
                        field="run",
                    )
                base = self._check_base(run, base_step)
                created = self._next_created(run, now())
                job = Job(spec=spec.model_copy(update={"base_step": base, "created": created}))
                job = self._placed(job)
                check_reference(job.spec, self._checkpoints.steps(run))
                check_age(job.spec, most_behind)
                self._enqueue(job, staged)
        return job, True

    def _next_created(self, run: str, now: float) -> float:
        """The creation time of a new job. The time is `now`, or just after the newest `created` of
        the run's live jobs, whichever is later. A live job's `created` may be later than `now`,
        because the clock of another host may be ahead of this host's clock. A new job must sort
        after all live jobs, so that a reader that has already read these jobs finds the new job.
        """
        newest = [entry.key for entry in islice(self._index.newest_live(run), 1)]
        pending = [*newest, *(key for key in self._index.active() if key.run == run)]
        return max([now, *(key.created / 1e6 + _APART for key in pending)])

    def _placed(self, job: Job) -> Job:
        """The job, with the final path of its data if it has data."""
        if isinstance(job.spec, SessionJob):
            return job
        data = self._paths.live_dir(job.key) / "data"
        path = data.relative_to(self._paths.root).as_posix()
        placed = job.spec.data.model_copy(update={"path": path})
        return job.model_copy(update={"spec": job.spec.model_copy(update={"data": placed})})

    def _check_base(self, run: str, base_step: int | None) -> int:
        """The result of `next_base`. Raises Conflict if `base_step` is given and differs from
        `next_base`."""
        expected = self.next_base(run)
        if base_step is not None and base_step != expected:
            newest = self._checkpoints.newest(run)
            pending = sum(map(len, self._index.live(run)))
            why = f"its newest checkpoint is {newest} and {pending} jobs are queued or running"
            raise Conflict(
                f"run {run!r} goes on from step {expected}, not {base_step}: {why}",
                field="base_step",
            )
        return expected

    def _known(self, job_id: str, run: str, fingerprint: str) -> Job | None:
        try:
            _, job = self._jobs.get(job_id)
        except NotFound:
            return None
        if (job.spec.run, job.spec.fingerprint) != (run, fingerprint):
            raise Conflict(
                f"the id {job_id!r} is in use by another job, of run {job.spec.run!r}", field="id"
            )
        return job

    def _enqueue(self, job: Job, staged: Path) -> None:
        """Creates the job, with all its files, by one rename."""
        target = self._paths.live_dir(job.key)
        fs.write_json_atomic(staged / JOB_FILE, job)
        try:
            fs.in_made_dir(target.parent, lambda: staged.rename(target))
            fs.fsync_dir(target.parent)
        except BaseException:
            fs.remove_tree(target)
            self._remove_empty(job.key)
            raise

    def _write(self, job: Job) -> None:
        fs.write_json_atomic(self._paths.live_dir(job.key) / JOB_FILE, job)

    def _mark(self, key: JobKey) -> None:
        """Adds the job to `jobs/active/`, so that programs that list jobs read its file from now
        on. A power loss may remove the name from `jobs/active/`, so a claim and `recover` also read
        the first job of each run."""
        with fs.volume_errors(self._paths.active):
            self._paths.active_file(key).touch()

    def _unmark(self, key: JobKey) -> None:
        _remove(self._paths.active_file(key))

    def _remove_empty(self, key: JobKey) -> None:
        """Removes the bucket of a job that was moved or removed, and the run's directory in
        `jobs/live/`, if these directories are empty."""
        directory = self._paths.live_dir(key).parent
        fs.remove_empty(directory, directory.parent)

    def claim(self, runner: str, *, waiting: Collection[str] = ()) -> Job | None:
        """Starts an attempt of the oldest queued job whose run has no running job, and returns the
        job. Returns None if there is no such job. A run's jobs are claimed in the order of their
        base steps. If a job's id is in `waiting`, neither this job nor the later jobs of its run
        are claimed. The returned job is running, and has a new attempt, a lease, a work directory
        and the event `claimed`. If the method raises an error, the job is still queued."""
        with file_lock(self._paths.claim_lock):
            for key in self._index.active():
                self.settle(key)
            passed = set(waiting)
            while True:
                busy = {key.run for key in self._index.running()}
                heads = sorted(
                    head
                    for head in self._index.heads()
                    if head.run not in busy and head.id not in passed
                )
                for head in heads:
                    with self._job_lock(head.id):
                        located = self._jobs.locate(head)
                        if located is not None and located[0] == "queued":
                            return self._start(located[1], runner)
                        # `locate` does not find a damaged job. The directory of a damaged job may
                        # stay in `jobs/live/` until the volume accepts the writes that end the job.
                        if located is None:
                            passed.add(head.id)
                        else:
                            self.settle(head)
                if not heads:
                    return None

    def _start(self, job: Job, runner: str) -> Job:
        job = job.model_copy(update={"attempt": job.attempt + 1, "state": "running"})
        key = job.key
        directory = self._paths.live_dir(key)
        work = directory / "attempts" / str(job.attempt)
        try:
            with fs.volume_errors(work):
                fs.remove_tree(work)
                work.mkdir(parents=True)
            self._mark(key)
            self._leases.write(job, runner, "claimed")
            # The rename at the end of the `with` block claims the job.
            with fs.replacing(directory / JOB_FILE, fs.record_bytes(job)):
                self._say(job, "claimed", runner=runner, host=socket.gethostname())
        except BaseException:
            self._clear_attempts(directory)
            self._unmark(key)
            raise
        return job

    def _say(self, job: Job, kind: EventType, **data: Any) -> None:
        """Appends an event that occurs only once in an attempt. Does nothing if a process that died
        has already appended the event."""
        events = self._events.read(job.spec.id)
        if not any((event.type, event.attempt) == (kind, job.attempt) for event in events):
            self._events.append(job.spec.id, kind, attempt=job.attempt, **data)

    def settle(self, key: JobKey) -> None:
        """Completes a change of a job that a dead process left incomplete, or waits until a living
        process has completed the change. A running job is not changed."""
        with self._job_lock(key.id), suppress(NotFound):
            located = self._jobs.locate(key)
            if located is None and not fs.exists(self._paths.live_dir(key)):
                self._unmark(key)
            elif located is not None and located[1].result is not None:
                self._end(*located, located[1].result)
            elif located is not None and located[0] == "queued":
                self._clear_attempts(self._paths.live_dir(key))
                self._unmark(key)
            elif located is not None and not fs.exists(self._paths.active_file(key)):
                self._mark(key)  # a power loss has removed the job's name

    def cancel(self, job_id: str) -> JobState:
        """Cancels a queued job immediately. If the job runs, asks the runner to stop the job.
        Returns the job's new state."""
        with self._job_lock(job_id):
            directory, job = self._jobs.located(job_id)
            if directory == "running" and job.result is None:
                fs.write_atomic(self._paths.cancel_file(job_id), b"")
                return directory
            return self._end(directory, job, _cancelled("cancelled before it started"))

    def requeue(self, job: Job, error: JobError, *, counts: bool = True) -> JobState:
        """Ends an attempt without a result. Returns the job's new state. The state is `succeeded`
        if the attempt made its checkpoint, and `cancelled` if cancellation was requested. The state
        is `failed` if `error` is not retriable or if no attempt is left, and `queued` in all other
        cases. A decided job keeps its result.

        Args:
            counts: whether the attempt counts towards the job's `max_attempts`; False if the
                attempt ended because the runner was stopped.
        """
        job_id = job.spec.id
        with self._job_lock(job_id):
            directory, current = self._jobs.located(job_id)
            if current.result is not None:
                return self._end(directory, current, current.result)
            if directory == "running":
                _check_attempt(job, current)
                if self._jobs.cancel_requested(job_id):
                    return self._end(directory, current, _cancelled("cancelled while it ran"))
                if made := self._end_attempt(current):
                    return self._end(directory, current, made)
                stopped = current.stopped + (0 if counts else 1)
                if not error.retriable or current.attempt - stopped >= current.spec.max_attempts:
                    return self._end(
                        directory,
                        current,
                        JobResult(state="failed", error=error, finished=time.time()),
                    )
                reason = error.model_dump(exclude={"log_tail"})
                self._say(current, "requeued", error=reason, counts=counts)
                update = {"state": "queued", "last_error": error, "stopped": stopped}
                self._write(current.model_copy(update=update))
            self._clear_attempts(self._paths.live_dir(job.key))
            self._unmark(job.key)
            return "queued"

    def finish(self, job: Job, result: JobResult) -> JobState:
        """Ends a running job; returns the terminal state. If the job already has a result, `finish`
        keeps this result and completes a change that a crash interrupted. Raises Conflict (field
        `id`) if the job is queued, or if another attempt runs."""
        with self._job_lock(job.spec.id):
            directory, current = self._jobs.located(job.spec.id)
            if current.result is None:
                if directory != "running":
                    raise Conflict(
                        f"job {job.spec.id!r} is {directory}, so it can't be finished", field="id"
                    )
                _check_attempt(job, current)
            return self._end(directory, current, result)

    def _end(self, directory: JobState, job: Job, result: JobResult) -> JobState:
        """Ends the job with the result that the job already has, or with `result` if the job has no
        result. Skips the steps that an earlier, interrupted call has done."""
        if directory == "running" and job.result is None and result.state != "succeeded":
            result = self._end_attempt(job) or result
        key, result = job.key, job.result or result
        if directory not in TERMINAL:
            live = self._paths.live_dir(key)
            if job.result is None:
                waited = job.state == "queued"
                self._mark(key)
                job = job.model_copy(update={"state": result.state, "result": result})
                try:
                    self._write(job)
                except BaseException:
                    if waited:
                        self._unmark(key)
                    raise
            if not self._events.ended(key.id):
                data = result.model_dump(exclude={"state"}, exclude_none=True)
                self._events.append(key.id, result.state, attempt=job.attempt, **data)
            remove_unkept(live)
            fs.rename_dir(live, self._paths.ended_dir(key, result.state))
            self._remove_empty(key)
        self._unmark(key)
        return result.state

    def _end_attempt(self, job: Job) -> JobResult | None:
        """Permanently ends the attempt. Returns the result `succeeded` if the attempt committed its
        checkpoint before the fence, and None otherwise."""
        fence.end(self._paths.work_dir(job.spec.id, job.attempt))
        if not self._checkpoints.made_by(job):
            return None
        return JobResult(state="succeeded", step=job.spec.base_step + 1, finished=time.time())

    def _clear_attempts(self, directory: Path) -> None:
        """Removes files that a job needs only while an attempt runs."""
        _remove(directory / "lease.json")
        fs.remove_tree(directory / "attempts")


def _remove(*paths: Path) -> None:
    """Removes files that no program needs any more; ignores errors of the volume."""
    for path in paths:
        with suppress(OSError, SpoolUnusable):
            fs.remove_file(path, durable=False)


def _check_attempt(job: Job, current: Job) -> None:
    if job.attempt != current.attempt:
        problem = f"is in attempt {current.attempt}, so the end of attempt {job.attempt} is ignored"
        raise Conflict(f"job {job.spec.id!r} {problem}", field="id")


def _cancelled(message: str) -> JobResult:
    return JobResult(
        state="cancelled", error=JobError(type="cancelled", message=message), finished=time.time()
    )
