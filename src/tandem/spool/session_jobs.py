"""Jobs of kind `session`: the runner queues a job for each run of a session if the run has a
waiting request."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tandem.errors import CheckpointDamaged, Conflict, NotFound
from tandem.spool import Spool, fs
from tandem.spool.schema import JobSpec, RequestError, RequestResult, SessionJob


def queue_waiting(spool: Spool) -> None:
    """Queues a job for each run that has an uncomputed request and no job, if the run's session is
    open. If the run's last job has failed or was cancelled since the request arrived, the run's
    waiting requests get that job's error. Only the spool's runner calls this function."""
    for session, run, seq in _waiting(spool):
        # No job is queued if the run was removed or is damaged, or if its session has ended.
        # `tandem doctor` reports a damaged run.
        with suppress(NotFound, CheckpointDamaged, Conflict):
            if not _has_job(spool, run):
                if (reason := _refusal(spool, run, seq)) is not None:
                    _refuse(spool, run, reason)
                else:
                    _queue(spool, session, run)


def others_wait(spool: Spool) -> bool:
    """Whether a run without a running job has a queued job or a waiting request. While all GPUs are
    in use, the runner queues and claims no jobs, so a waiting request may have no queued job."""
    index = spool.jobs.index
    busy = {key.run for key in index.running()}
    queued = any(head.run not in busy for head in index.heads())
    return queued or any(run not in busy for _, run, _ in _waiting(spool))


def _waiting(spool: Spool) -> Iterator[tuple[str, str, int]]:
    """For each run with waiting requests: the session, the run, and the number of the next request
    to compute."""
    for session in spool.sessions.unended():
        for run in spool.sessions.runs(session):
            with suppress(NotFound, CheckpointDamaged):
                if (seq := spool.requests.next(run)) is not None:
                    yield session, run, seq


def _has_job(spool: Spool, run: str) -> bool:
    index = spool.jobs.index
    # Running jobs are read twice, before and after the queue. Between two reads, a job may move
    # from the queue to the running jobs, or back.
    return bool(index.running(run) or any(index.queued(run)) or index.running(run))


def _queue(spool: Spool, session: str, run: str) -> None:
    def make(job_id: str, base_step: int, _directory: Path) -> JobSpec:
        return SessionJob(
            id=job_id,
            run=run,
            base_step=base_step,
            created=time.time(),
            fingerprint="",
            submitted_by=spool.sessions.get(session).submitted_by,
        )

    spool.queue.submit(make, run=run, job_id=fs.new_ulid(), fingerprint="", base_step=None)


def _refusal(spool: Spool, run: str, seq: int) -> str | None:
    """The error for a request that no job will compute, because the job for the request has failed
    or was cancelled."""
    for state, job in spool.jobs.list(run, limit=1):
        result, created = job.result, spool.requests.get(run, seq).created
        if result is not None and result.error is not None and result.finished >= created:
            return f"job {job.spec.id} is {state}: {result.error.message}"
    return None


def _refuse(spool: Spool, run: str, reason: str) -> None:
    error = RequestError(category="server", message=reason)
    for seq in spool.requests.pending(run):
        spool.requests.answer(run, seq, RequestResult(error=error, finished=time.time()))
