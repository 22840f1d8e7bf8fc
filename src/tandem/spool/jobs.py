"""Jobs: `jobs/<state>/<id>.json`. The directory is the state; moving between them is one rename.

Each change holds the job's lock, and is written so that dying anywhere leaves the state before or after it; calling it
again, or a new runner's `recover`, completes it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ValidationError

from tandem.errors import Conflict, NotFound, SpoolUnusable
from tandem.spool import fs
from tandem.spool.jobfiles import PENDING, JobFiles, JobList
from tandem.spool.locks import LockHeldError, file_lock
from tandem.spool.schema import TERMINAL, Job, JobError, JobResult, JobSpec, JobState, Lease, RankProcess


class RunnerInfo(BaseModel):
    """The content of `jobs/runner.lock`."""

    runner: str
    host: str
    pid: int
    since: float


class Jobs(JobFiles):
    """All changes of jobs."""

    # ---------------------------------------------------------------- submit

    def submit(
        self,
        make: Callable[[str, int, Path], JobSpec],
        *,
        run: str,
        job_id: str | None,
        fingerprint: str,
        base_step: int | None,
    ) -> tuple[Job, bool]:
        """Queues a job; gives it and whether it is new.

        `make(id, base_step, directory)` writes the job's data into `directory` and returns its specification, whose
        `data.path` is set here. A known id with the same run and fingerprint gives the job that is there; with
        another, Conflict (field `id`). `base_step`, where given, must be `next_base(run)`: Conflict (field
        `base_step`). Whatever fails, also in `make`, leaves no trace.
        """
        with self._spool.runs.lock(run):
            if job_id is not None and (known := self._known(job_id, run, fingerprint)) is not None:
                return known, False
            new_id = fs.new_ulid() if job_id is None else job_id
            expected = self.next_base(run)
            if base_step is not None and base_step != expected:
                raise Conflict(
                    f"run {run!r} goes on from step {expected}, not {base_step}: its newest checkpoint is "
                    f"{self._spool.checkpoints.newest(run)} and {len(self.pending(run))} jobs are queued or running",
                    field="base_step",
                )
            with fs.staging(self._dir / "data") as staged, fs.volume_errors(self.data_dir(new_id)):
                try:
                    spec = make(new_id, expected, staged)
                except OSError:
                    self._spool.check_writable()  # numpy reports a full disk without an errno
                    raise
                job = Job(spec=self._placed(spec, new_id, run, expected, fingerprint))
                fs.fsync_tree(staged)
                with self._spool.job_lock(new_id):
                    # Another run's submitter may have been faster with this id.
                    if (known := self._known(new_id, run, fingerprint)) is not None:
                        return known, False
                    self._enqueue(job, staged)
        return job, True

    def _known(self, job_id: str, run: str, fingerprint: str) -> Job | None:
        try:
            _, job = self.get(job_id)
        except NotFound:
            return None
        if (job.spec.run, job.spec.fingerprint) != (run, fingerprint):
            raise Conflict(f"the id {job_id!r} is in use by another job, of run {job.spec.run!r}", field="id")
        return job

    def _placed(self, spec: JobSpec, job_id: str, run: str, base_step: int, fingerprint: str) -> JobSpec:
        given = (spec.id, spec.run, spec.base_step, spec.fingerprint)
        if given != (job_id, run, base_step, fingerprint):
            raise ValueError(f"make() gave a job for {given}, not for {(job_id, run, base_step, fingerprint)}")
        data = spec.data.model_copy(update={"path": self._spool.relative(self.data_dir(job_id))})
        return spec.model_copy(update={"data": data})

    def _enqueue(self, job: Job, staged: Path) -> None:
        data, file = self.data_dir(job.spec.id), self._file("queued", job.spec.id)
        fs.remove_tree(data)  # of a submission that died before its job existed
        fs.rename_dir(staged, data)
        try:
            fs.write_json_atomic(file, job)
        except BaseException:
            with suppress(OSError):
                file.unlink()
            fs.remove_tree(data)
            raise

    # ---------------------------------------------------------------- running

    def claim(self, runner: str) -> Job | None:
        """Starts an attempt of the oldest queued job whose run has none running, or None.

        Of each run, the job with the lowest base step comes first. The job is running once this returns: with one
        attempt more, a lease, its work directory and the event `claimed`. If this raises, it is still queued.
        """
        with file_lock(self._dir / "locks/claim"):
            pending = self._scan(PENDING)
            busy = {job.spec.run for where, job in pending if where == "running"}
            heads: dict[str, Job] = {}
            for where, job in sorted(pending, key=lambda item: item[1].spec.base_step):
                if where == "queued" and job.result is not None:
                    self.finish(job, job.result)  # somebody died while cancelling it
                elif where == "queued" and job.spec.run not in busy:
                    heads.setdefault(job.spec.run, job)
            for head in sorted(heads.values(), key=lambda job: (job.spec.created, job.spec.id)):
                with self._spool.job_lock(head.spec.id):
                    found = self._look(head.spec.id)
                    if found is not None and found[0] == "queued" and found[1].result is None:
                        return self._start(found[1], runner)  # otherwise it was cancelled since we looked
        return None

    def _start(self, job: Job, runner: str) -> Job:
        job = job.model_copy(update={"attempt": job.attempt + 1})
        job_id = job.spec.id
        work = self.work_dir(job_id, job.attempt)
        try:
            with fs.volume_errors(work):
                fs.remove_tree(work)
                work.mkdir(parents=True)
            self._write_lease(job, runner, "claimed", [])
            fs.write_json_atomic(self._file("running", job_id), job)  # the claim
            self._spool.events.append(job_id, "claimed", attempt=job.attempt, runner=runner, host=socket.gethostname())
        except BaseException:
            for path in (self._file("running", job_id), self._lease_path(job_id)):
                with suppress(OSError):
                    path.unlink()
            fs.remove_tree(work.parent)
            raise
        with suppress(SpoolUnusable):  # a copy that stays is weaker than the one in running/
            fs.remove_file(self._file("queued", job_id))
        return job

    def beat(self, job_id: str, runner: str, phase: str, ranks: Sequence[RankProcess] | None = None) -> Lease:
        """Renews the lease; `ranks` None keeps those recorded. Conflict if the job isn't running, or is another's."""
        with self._spool.job_lock(job_id):
            found = self._look(job_id)
            if found is None or found[0] != "running" or found[1].result is not None:
                raise Conflict(f"job {job_id!r} is not running, so its lease can't be renewed", field="id")
            lease = self.lease(job_id)
            if lease is not None and lease.runner != runner:
                raise Conflict(f"job {job_id!r} is run by {lease.runner} on {lease.host}, not by {runner}", field="id")
            kept = lease.ranks if lease is not None else []
            return self._write_lease(found[1], runner, phase, kept if ranks is None else ranks)

    def _write_lease(self, job: Job, runner: str, phase: str, ranks: Sequence[RankProcess]) -> Lease:
        lease = Lease(
            job=job.spec.id,
            runner=runner,
            host=socket.gethostname(),
            pid=os.getpid(),
            attempt=job.attempt,
            phase=phase,
            beat=time.time(),
            ranks=[*ranks],
        )
        fs.write_json_atomic(self._lease_path(job.spec.id), lease)
        return lease

    # ---------------------------------------------------------------- ending

    def request_cancel(self, job_id: str) -> JobState:
        """Cancels a queued job at once; asks the runner to stop a running one. Gives the state it has then."""
        with self._spool.job_lock(job_id):
            where, job = self._locked_look(job_id)
            if where == "running" and job.result is None:
                fs.write_atomic(self._cancel_path(job_id), b"")
                return where
            return self._settle(where, job, _cancelled("cancelled before it started"))

    def requeue(self, job: Job, error: JobError, *, counts: bool = True) -> JobState:
        """Ends an attempt without a result: back to `queued`, or, if `error` is not retriable or no attempts are left,
        to `failed`; to `cancelled` if that was asked for. Gives the new state. A job that is decided stays so.
        `counts` False: the attempt ended through no fault of the job (its runner was stopped) and uses up none.
        """
        job_id = job.spec.id
        with self._spool.job_lock(job_id):
            where, current = self._locked_look(job_id)
            if current.result is not None:
                return self._settle(where, current, current.result)
            if where == "queued":
                return self._end_attempt(job_id)
            self._same_attempt(job, current)
            if self.cancel_requested(job_id):
                return self._settle(where, current, _cancelled("cancelled while it ran"))
            stopped = current.stopped + (0 if counts else 1)
            if not error.retriable or current.attempt - stopped >= current.spec.max_attempts:
                return self._settle(where, current, JobResult(state="failed", error=error, finished=time.time()))
            fs.write_json_atomic(
                self._file(where, job_id), current.model_copy(update={"last_error": error, "stopped": stopped})
            )
            if not any(e.type == "requeued" and e.attempt == current.attempt for e in self._spool.events.read(job_id)):
                self._spool.events.append(
                    job_id, "requeued", attempt=current.attempt, error=error.model_dump(exclude={"log_tail"})
                )
            fs.move_file(self._file(where, job_id), self._file("queued", job_id))
            return self._end_attempt(job_id)

    def _end_attempt(self, job_id: str) -> JobState:
        self._remove(self._lease_path(job_id))
        fs.remove_tree(self._dir / "work" / job_id)
        return "queued"

    def finish(self, job: Job, result: JobResult) -> JobState:
        """Ends a running job: its result, the terminal event, the rename; then its data, work, lease and cancel marker
        go. Idempotent: the first result stands, and what a crash left undone is done. Gives the terminal state.
        """
        with self._spool.job_lock(job.spec.id):
            where, current = self._locked_look(job.spec.id)
            if current.result is None:
                if where != "running":
                    raise Conflict(f"job {job.spec.id!r} is {where}, so it can't be finished", field="id")
                self._same_attempt(job, current)
            return self._settle(where, current, result)

    def _locked_look(self, job_id: str) -> tuple[JobState, Job]:
        found = self._look(job_id)
        if found is None:
            raise NotFound(f"there is no job {job_id!r}", field="id")
        return found

    def _same_attempt(self, job: Job, current: Job) -> None:
        if job.attempt != current.attempt:
            raise Conflict(
                f"job {job.spec.id!r} is in attempt {current.attempt}; attempt {job.attempt} has no say any more",
                field="id",
            )

    def _settle(self, where: JobState, job: Job, result: JobResult) -> JobState:
        """Under the job's lock: makes `result` (or the one that is there) final, from whichever step is missing."""
        job_id = job.spec.id
        if job.result is None:
            job = job.model_copy(update={"result": result})
            fs.write_json_atomic(self._file(where, job_id), job)
        final = job.result
        assert final is not None
        if where not in TERMINAL:
            if not any(event.type in TERMINAL for event in self._spool.events.read(job_id)):
                data = final.model_dump(exclude={"state"}, exclude_none=True)
                self._spool.events.append(job_id, final.state, attempt=job.attempt, **data)
            fs.move_file(self._file(where, job_id), self._file(final.state, job_id))
        self.clear(job_id)
        return final.state

    def clear(self, job_id: str) -> None:
        """Removes what a job needs only until it ends. What can't go now (files still mapped over NFS) goes later."""
        self._remove(
            *(self._file(state, job_id) for state in PENDING), self._cancel_path(job_id), self._lease_path(job_id)
        )
        fs.remove_tree(self.data_dir(job_id))
        fs.remove_tree(self._dir / "work" / job_id)

    def _remove(self, *paths: Path) -> None:
        """What can't be removed now has no meaning any more, and is swept by a later `recover`."""
        for path in paths:
            with suppress(SpoolUnusable):
                fs.remove_file(path)

    # ---------------------------------------------------------------- the runner

    def recover(self, runner: str) -> JobList:
        """Settles what a dead runner left; called by a runner that holds `runner_lock` and has ended orphaned ranks.

        A running job with a result is finished; one whose checkpoint is there succeeded; the others are requeued
        (`requeue`). Gives the jobs that moved, with their new state. Remains of dead processes are removed.
        """
        from tandem.spool.recovery import recover

        return recover(self._spool, runner)

    @property
    def runner_lock_path(self) -> Path:
        """What `runner_lock` locks, to be asked from another process whether it is held."""
        return self._dir / "runner.lock"

    @contextmanager
    def runner_lock(self, name: str) -> Iterator[None]:
        """Held by the spool's one runner while it lives. SpoolUnusable names the holder if there is one."""
        path = self.runner_lock_path
        try:
            with file_lock(path, blocking=False, reentrant=False) as fd, fs.volume_errors(path):
                info = RunnerInfo(runner=name, host=socket.gethostname(), pid=os.getpid(), since=time.time())
                os.pwrite(fd, info.model_dump_json().encode().ljust(512) + b"\n", 0)
                os.ftruncate(fd, 513)
                os.fsync(fd)
                yield
        except LockHeldError as error:
            raise SpoolUnusable(
                f"{self._spool.root} has a runner already: {_holder(error.content)}. One spool has one runner; stop "
                "that one first, or give this one a TANDEM_ROOT of its own"
            ) from error


def _holder(content: bytes) -> str:
    try:
        info = RunnerInfo.model_validate_json(content)
    except ValidationError:
        return "it did not say which"
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(info.since))
    return f"{info.runner}, pid {info.pid} on host {info.host}, since {since}"


def _cancelled(message: str) -> JobResult:
    return JobResult(state="cancelled", error=JobError(type="cancelled", message=message), finished=time.time())
