"""Changes jobs: submit, claim, cancel, requeue, finish. Moving a job between directories is one
rename.

Each change holds the job's lock, and is ordered so that a crash leaves the state before or after
it. Calling it again, the next claim, or a new runner's `recover` completes it. Locks are taken in
this order: a run's, claims', a job's.
"""

import socket
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from itertools import islice
from pathlib import Path

from tandem.errors import Conflict, NotFound, SpoolUnusable
from tandem.spool import fence, fs
from tandem.spool.checkpoints import Checkpoints
from tandem.spool.events import Events
from tandem.spool.job_checks import check_age, check_reference
from tandem.spool.jobs import Jobs
from tandem.spool.locks import Leases, file_lock
from tandem.spool.paths import Paths
from tandem.spool.runs import Runs
from tandem.spool.schema import (
    TERMINAL,
    Job,
    JobError,
    JobKey,
    JobResult,
    JobSpec,
    JobState,
    SessionJob,
)

# Seconds between the `created` of a run's jobs, at least: keys have whole microseconds, and floats
# are not exact.
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
        """The step that the run's next job starts from: the newest checkpoint, plus one per pending
        job after it."""
        while True:  # jobs move between running/ and queued/ while these are listed
            keys = self._index.running(run)
            undecided = {key.base_step: self._jobs.takes_step(key) for key in keys}
            base = self._index.first_gap(run, self._checkpoints.newest(run), undecided)
            if self._index.running(run) == keys:
                return base

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
        """Queues a job; returns it and whether it is new.

        `make(id, base_step, directory)` writes the job's data into `directory` and returns its
        specification, whose `base_step`, `created` and `data.path` are set here: another job may be
        queued while it works. A known id with the same run and fingerprint returns the known job;
        with another, Conflict (field `id`). `base_step`, if given, must be `next_base(run)`:
        Conflict (field `base_step`). `most_behind`: how many steps before the job's base step the
        oldest of its turns may have been sampled; InvalidInput (field `max_off_policy_steps`) for
        an older one. `now` tells the time. Any failure, also one of `make`, leaves no trace.
        """
        spec_of_run = self._runs.get(run)
        if job_id is None:
            job_id = fs.new_ulid()
        elif (known := self._known(job_id, run, fingerprint)) is not None:
            return known, False
        # A refusal comes before the work; which step it really is, is known once the data is there.
        expected = (
            self._checkpoints.newest(run) if base_step is None else self._check_base(run, base_step)
        )
        data = self._paths.data_dir(job_id)
        with fs.staging(data.parent) as staged, fs.volume_errors(data):
            spec = make(job_id, expected, staged)
            fs.fsync_tree(staged)
            update: dict[str, object] = {}
            if not isinstance(spec, SessionJob):
                path = data.relative_to(self._paths.root).as_posix()
                update["data"] = spec.data.model_copy(update={"path": path})
            if isinstance(spec, SessionJob) != (spec_of_run.session is not None):
                problem = f"run {run!r} is trained by the requests of its session alone"
                raise Conflict(f"{problem}; fork it, and train the fork", field="run")
            with self._runs.lock(run), self._job_lock(job_id):
                # Another request may have taken the client's id since.
                if (known := self._known(job_id, run, fingerprint)) is not None:
                    return known, False
                if self._runs.get(run) != spec_of_run:
                    raise Conflict(
                        f"run {run!r} was deleted, and made again, while this was packed",
                        field="run",
                    )
                base = self._check_base(run, base_step)
                update |= {"base_step": base, "created": self._next_created(run, now())}
                job = Job(spec=spec.model_copy(update=update))
                check_reference(job.spec, self._checkpoints.steps(run))
                check_age(job.spec, most_behind)
                self._enqueue(job, staged)
        return job, True

    def _next_created(self, run: str, now: float) -> float:
        """`now`, or a time after the run's jobs that have not ended, by whose clocks it may be
        earlier: who reads a run's jobs in the order of their `created` must not find one before
        those that it has read.
        """
        # Running on both sides of the queue, because jobs move in both directions.
        index = self._index
        pending = [
            *index.running(run),
            *islice(index.newest_first("queued", run), 1),
            *index.running(run),
        ]
        return max([now, *(key.created / 1e6 + _APART for key in pending)])

    def _check_base(self, run: str, base_step: int | None) -> int:
        """`next_base`; Conflict if `base_step` is another step."""
        expected = self.next_base(run)
        if base_step is not None and base_step != expected:
            newest = self._checkpoints.newest(run)
            pending = self._index.count("queued", run) + self._index.count("running", run)
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
        key = job.key
        data, name = self._paths.data_dir(key.id), self._paths.id_file(key.id)
        fs.remove_tree(data)  # left by a submitter that died before the job existed
        fs.rename_dir(staged, data)
        try:
            fs.write_atomic(name, key.name.encode())
            # Those of an earlier job with this id, which was removed or damaged, go as late as
            # possible: a damaged job has no other end.
            for path in (self._paths.events_file(key.id), self._paths.log_file(key.id)):
                fs.remove_file(path, durable=False)
            self._write("queued", job)
        except BaseException:
            self._remove_queued(key)
            _remove(name)
            fs.remove_tree(data)
            raise

    def _write(self, state: JobState, job: Job) -> None:
        file = self._paths.job_file(state, job.key)
        fs.in_made_dir(file.parent, lambda: fs.write_json_atomic(file, job))

    def _remove_empty(self, key: JobKey) -> None:
        """Removes the directories of a job that is not queued any more if they are empty."""
        directory = self._paths.job_file("queued", key).parent
        fs.remove_empty(directory, directory.parent)

    def claim(self, runner: str, *, waiting: Collection[str] = ()) -> Job | None:
        """Starts an attempt of the oldest queued job whose run has no running job; None if there is
        no such job. A run's jobs are claimed in the order of their base steps, and none after one
        in `waiting` (ids). When this returns, the job is running, with one more attempt, a lease, a
        work directory and the event `claimed`. If this raises, the job is still queued."""
        with file_lock(self._paths.claim_lock):
            for key in self._index.running():
                self._settle(key)
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
                        # It is set aside, or damaged and stays until the volume takes its end.
                        if located is None:
                            passed.add(head.id)
                        else:  # the file is left from a job that has gone on
                            fs.remove_file(self._paths.job_file("queued", head))
                        self._remove_empty(head)
                if not heads:
                    return None

    def _start(self, job: Job, runner: str) -> Job:
        job = job.model_copy(update={"attempt": job.attempt + 1})
        job_id, key = job.spec.id, job.key
        work, running = (
            self._paths.work_dir(job_id, job.attempt),
            self._paths.job_file("running", key),
        )
        try:
            with fs.volume_errors(work):
                fs.remove_tree(work)
                work.mkdir(parents=True)
            self._leases.write(job, runner, "claimed")
            fs.write_json_atomic(running, job)  # from here on the job is claimed
            self._events.append(
                job_id, "claimed", attempt=job.attempt, runner=runner, host=socket.gethostname()
            )
        except BaseException:
            _remove(running, self._paths.lease_file(job_id))
            fs.remove_tree(work.parent)
            raise
        self._remove_queued(key)
        return job

    def _settle(self, key: JobKey) -> None:
        job = self._jobs.locate(key)
        # A process died while it cancelled this job.
        if job is not None and job[1].result is not None:
            with suppress(NotFound):  # that process lives, and has completed it
                self.finish(job[1], job[1].result)
        # Its start failed, and the volume refused to undo it.
        elif fs.exists(self._paths.job_file("queued", key)):
            with self._job_lock(key.id):
                _remove(self._paths.job_file("running", key), self._paths.lease_file(key.id))

    def _remove_queued(self, key: JobKey) -> None:
        # A file in another directory is stronger than one that stays here.
        _remove(self._paths.job_file("queued", key))
        self._remove_empty(key)

    def cancel(self, job_id: str) -> JobState:
        """Cancels a queued job at once; asks the runner to stop a running one. Returns the state
        after that."""
        with self._job_lock(job_id):
            directory, job = self._jobs.located(job_id)
            if directory == "running" and job.result is None:
                fs.write_atomic(self._paths.cancel_file(job_id), b"")
                return directory
            return self._end(directory, job, _cancelled("cancelled before it started"))

    def requeue(self, job: Job, error: JobError, *, counts: bool = True) -> JobState:
        """Ends an attempt without a result. Returns the new state: `cancelled` if that was asked
        for; `failed` if `error` is not retriable or no attempt is left; `succeeded` if the attempt
        made its checkpoint; else `queued`. `counts`
        False: the runner was stopped, so this attempt does not count. A decided job keeps its
        result."""
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
                running = self._paths.job_file("running", job.key)
                fs.write_json_atomic(
                    running, current.model_copy(update={"last_error": error, "stopped": stopped})
                )
                events = self._events.read(job_id)
                if not any(
                    event.type == "requeued" and event.attempt == current.attempt
                    for event in events
                ):
                    reason = error.model_dump(exclude={"log_tail"})
                    self._events.append(
                        job_id, "requeued", attempt=current.attempt, error=reason, counts=counts
                    )
                fs.move_file(running, self._paths.job_file("queued", job.key))
            self.clear_attempts(job_id)
            return "queued"

    def finish(self, job: Job, result: JobResult) -> JobState:
        """Ends a running job; returns the terminal state. Idempotent: the first result stands, and
        this completes what a crash left undone. Conflict (field `id`) if the job is queued, or in
        another attempt."""
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
        """Makes `result` final, or the result that the job already has, beginning at the first
        missing step."""
        if directory == "running" and job.result is None and result.state != "succeeded":
            result = self._end_attempt(job) or result
        key, result = job.key, job.result or result
        if job.result is None or directory == "queued":
            job = job.model_copy(update={"result": result})
            # Decided jobs are in running/, so that those in queued/ need not be read to know that
            # they wait.
            directory = "running" if directory == "queued" else directory
            self._write(directory, job)
        if directory not in TERMINAL:
            if not self._events.ended(key.id):
                data = result.model_dump(exclude={"state"}, exclude_none=True)
                self._events.append(key.id, result.state, attempt=job.attempt, **data)
            fs.move_file(
                self._paths.job_file(directory, key), self._paths.job_file(result.state, key)
            )
        self.clear(key)
        return result.state

    def _end_attempt(self, job: Job) -> JobResult | None:
        """Ends the attempt for good. The job has succeeded if the attempt's commit came before."""
        fence.end(self._paths.work_dir(job.spec.id, job.attempt))
        if not self._checkpoints.made_by(job):
            return None
        return JobResult(state="succeeded", step=job.spec.base_step + 1, finished=time.time())

    def clear(self, key: JobKey) -> None:
        """Removes what a job needs only until it ends. A later `recover` removes what can't go
        now."""
        _remove(self._paths.job_file("running", key))
        self._remove_queued(key)
        _remove(self._paths.cancel_file(key.id))
        fs.remove_tree(self._paths.data_dir(key.id))
        self.clear_attempts(key.id)

    def clear_attempts(self, job_id: str) -> None:
        """Removes what a job needs only while an attempt runs."""
        _remove(self._paths.lease_file(job_id))
        fs.remove_tree(self._paths.all_work_dirs(job_id))


def _remove(*paths: Path) -> None:
    """Removes files that have no meaning any more, unless the volume refuses."""
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
