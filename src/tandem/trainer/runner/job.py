"""A claimed job: check it, make an attempt, record its end."""

from __future__ import annotations

import time

from tandem.errors import TandemError
from tandem.spool import Spool, fs
from tandem.spool.recovery import made_checkpoint
from tandem.spool.schema import Job, JobError, JobResult
from tandem.system.logs import Log
from tandem.trainer.runner.attempt import STOPPED, Attempt, Services
from tandem.trainer.runner.stop import LONGEST_PAUSE_SECONDS

log = Log("runner")


def run_job(job: Job, services: Services) -> None:
    """Run a claimed job until its end is recorded, or until the runner is asked to stop."""
    spec, stop = job.spec, services.stop
    begin = time.monotonic()
    log.info("claimed", job=spec.id, run=spec.run, kind=spec.kind, base_step=spec.base_step,
             attempt=f"{job.attempt}/{spec.max_attempts}")  # fmt: skip
    result = _result(job, services)
    state = stop.retry("record the job's end", lambda: _record(services.spool, job, result))
    if state is None:
        log.warning("stopped before the job's end could be written; the next runner settles it", job=spec.id)
        return
    error = result.error if isinstance(result, JobResult) else result
    fields = {} if error is None else {"type": error.type, "error": error.message}
    log.info(f"job {state}", job=spec.id, run=spec.run, seconds=time.monotonic() - begin, **fields)
    if state == "queued" and not stop.requested:
        stop.pause(min(2.0 ** (job.attempt - 1), LONGEST_PAUSE_SECONDS))


def _result(job: Job, services: Services) -> JobResult | JobError:
    """The job's end, or the error of this attempt."""
    spool, stop = services.spool, services.stop
    try:
        known = stop.retry("check the job's base", lambda: _known_result(spool, job))
        if known is not None or stop.requested:
            return known or STOPPED
        attempt = Attempt(services, job)
        error = attempt.run()
        if stop.retry("look for the checkpoint", lambda: made_checkpoint(spool, job)):
            # What went wrong after the commit doesn't matter: the checkpoint is in the chain.
            attempt.log.say(f"checkpoint {job.spec.base_step + 1} exists: succeeded")
            return _success(job)
    except TandemError as refusal:  # not retriable: the run was removed, a manifest is damaged, ...
        return JobError(type=refusal.code, message=str(refusal))
    attempt.log.say(f"no checkpoint: {error.type}: {error.message}")
    if error.type == "cancelled":
        return JobResult(state="cancelled", error=error, finished=time.time())
    return error.model_copy(update={"log_tail": attempt.log.last_lines()})


def _known_result(spool: Spool, job: Job) -> JobResult | JobError | None:
    """The result where no attempt is needed: the checkpoint exists, or the one to start from does not."""
    spec = job.spec
    if made_checkpoint(spool, job):
        return _success(job)
    steps = spool.checkpoints.steps(spec.run)
    if spec.base_step + 1 in steps:
        message = f"checkpoint {spec.base_step + 1} of run {spec.run!r} exists and was not made by this job"
        return JobError(type="conflict", message=message)
    if spec.base_step in steps:
        return None
    message = f"run {spec.run!r} has no checkpoint {spec.base_step} to start from"
    for state, other in reversed(spool.jobs.list(spec.run)):
        if other.spec.base_step == spec.base_step - 1 and state in ("failed", "cancelled"):
            message += f": job {other.spec.id}, which had to make it, is {state}"
            break
    return JobError(type="base_missing", message=f"{message}; submit this job again on the newest checkpoint")


def _success(job: Job) -> JobResult:
    return JobResult(state="succeeded", step=job.spec.base_step + 1, finished=time.time())


def _record(spool: Spool, job: Job, result: JobResult | JobError) -> str:
    """Write the job's end, or put it back into the queue; returns its new state."""
    if isinstance(result, JobError):
        return spool.queue.requeue(job, result, counts=result.type != "runner_stopped")
    if result.state == "succeeded":
        # With the checkpoint committed nobody needs the packed data. It is gone before the job shows its end.
        fs.remove_tree(spool.paths.data_dir(job.spec.id))
    return spool.queue.finish(job, result)
