"""A claimed job: check it, run its attempt, record its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from tandem.config import Settings
from tandem.errors import TandemError
from tandem.spool import Spool, fs
from tandem.spool.recovery import made_checkpoint
from tandem.spool.schema import EventType, Job, JobError, JobResult, RankMemory, RankProcess
from tandem.system import liveness
from tandem.system.logs import Log
from tandem.system.processes import Process
from tandem.trainer.launch import Handle, Launch, Launcher
from tandem.trainer.runner import attempt
from tandem.trainer.runner.gpus import JobGpus
from tandem.trainer.runner.joblog import JobLog, JobStdout
from tandem.trainer.runner.shared_gpus import Asleep
from tandem.trainer.runner.stop import LONGEST_PAUSE_SECONDS, Stop

log = Log("runner")

_STOPPED = JobError(type="runner_stopped", message="the runner was asked to stop", retriable=True)


class JobRunner:
    """`runner`: its name in leases; `entry`: module whose `main(root, job_id, attempt)` is a rank."""

    def __init__(
        self, settings: Settings, spool: Spool, launcher: Launcher, gpus: JobGpus, runner: str, entry: str, stop: Stop
    ) -> None:
        self._settings, self._spool, self._launcher, self._gpus = settings, spool, launcher, gpus
        self._runner, self._entry, self._stop = runner, entry, stop
        self._next_beat = 0.0

    def run(self, job: Job) -> None:
        """Run a claimed job until its end is recorded, or until the runner is asked to stop."""
        spec = job.spec
        begin = time.monotonic()
        log.info("claimed", job=spec.id, run=spec.run, kind=spec.kind, base_step=spec.base_step,
                 attempt=f"{job.attempt}/{spec.max_attempts}")  # fmt: skip
        result = self._result(job)
        state = self._stop.retry("record the job's end", lambda: self._record(job, result))
        if state is None:
            log.warning("stopped before the job's end could be written; the next runner settles it", job=spec.id)
            return
        error = result.error if isinstance(result, JobResult) else result
        fields = {} if error is None else {"type": error.type, "error": error.message}
        log.info(f"job {state}", job=spec.id, run=spec.run, seconds=time.monotonic() - begin, **fields)
        if state == "queued" and not self._stop.requested:
            self._stop.pause(min(2.0 ** (job.attempt - 1), LONGEST_PAUSE_SECONDS))

    def _result(self, job: Job) -> JobResult | JobError:
        """The job's end, or the error of this attempt."""
        try:
            result = self._stop.retry("check the job's base", lambda: self._known_result(job))
            if result is None and not self._stop.requested:
                result = self._attempt(job)
        except TandemError as error:  # not retriable: the run was removed, a manifest is damaged, ...
            return JobError(type=error.code, message=str(error))
        return result or _STOPPED

    def _known_result(self, job: Job) -> JobResult | JobError | None:
        """The result where no attempt is needed: the checkpoint exists, or the one to start from does not."""
        spec = job.spec
        if made_checkpoint(self._spool, job):
            return JobResult(state="succeeded", step=spec.base_step + 1, finished=time.time())
        steps = self._spool.checkpoints.steps(spec.run)
        if spec.base_step + 1 in steps:
            message = f"checkpoint {spec.base_step + 1} of run {spec.run!r} exists and was not made by this job"
            return JobError(type="conflict", message=message)
        if spec.base_step in steps:
            return None
        message = f"run {spec.run!r} has no checkpoint {spec.base_step} to start from"
        for state, other in reversed(self._spool.jobs.list(spec.run)):
            if other.spec.base_step == spec.base_step - 1 and state in ("failed", "cancelled"):
                message += f": job {other.spec.id}, which had to make it, is {state}"
                break
        return JobError(type="base_missing", message=f"{message}; submit this job again on the newest checkpoint")

    def _attempt(self, job: Job) -> JobResult | JobError:
        spec, paths = job.spec, self._spool.paths
        work, ranks = paths.work_dir(spec.id, job.attempt), self._settings.trainer_ranks
        joblog = JobLog(paths.log_file(spec.id), work, ranks, JobStdout(spec.id))
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        joblog.say(f"attempt {job.attempt} of {spec.max_attempts}, {now}")
        error = self._acquire_gpus(job, joblog)
        if error is None:
            launch = Launch(self._spool.root, spec.id, job.attempt, ranks, work, self._entry)
            self._next_beat = 0.0
            error, survivors = attempt.run(
                job, self._launcher, launch, joblog,
                interrupted=lambda: self._interrupted(job, "while it ran"),
                beat=lambda phase, handle: self._beat(job, phase, handle),
            )  # fmt: skip
            self._release_gpus(job, survivors)
        self._give_back_gpus(job, joblog)
        if self._stop.retry("look for the checkpoint", lambda: made_checkpoint(self._spool, job)):
            # What went wrong after the commit doesn't matter: the checkpoint is in the chain.
            joblog.say(f"checkpoint {spec.base_step + 1} exists: succeeded")
            return JobResult(state="succeeded", step=spec.base_step + 1, finished=time.time())
        joblog.say(f"no checkpoint: {error.type}: {error.message}")
        if error.type == "cancelled":
            return JobResult(state="cancelled", error=error, finished=time.time())
        return error.model_copy(update={"log_tail": joblog.last_lines()})

    # ---------------------------------------------------------------- during an attempt

    def _interrupted(self, job: Job, when: str) -> JobError | None:
        """Why the attempt has to end early: the runner is asked to stop, or the job was cancelled."""
        if self._stop.requested:
            return _STOPPED
        if _or_none(lambda: self._spool.jobs.cancel_requested(job.spec.id)):
            return JobError(type="cancelled", message=f"cancelled {when}")
        return None

    def _beat(self, job: Job, phase: str, handle: Handle) -> None:
        """Renew the job's lease and the hold, every `heartbeat_seconds`."""
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + self._settings.heartbeat_seconds
        liveness.beat("runner")
        if self._gpus.shared is not None:
            self._gpus.shared.beat()
        ranks = [RankProcess(pid=process.pid, start_time=process.started) for process in handle.processes()]
        _or_none(lambda: self._spool.leases.renew(job.spec.id, self._runner, phase, ranks))

    def _acquire_gpus(self, job: Job, joblog: JobLog) -> JobError | None:
        """Put a vLLM that shares the GPUs to sleep; the error says why the ranks can't start."""
        shared = self._gpus.shared
        if shared is None:
            return _STOPPED if self._stop.requested else None

        def interrupted() -> JobError | None:
            return self._interrupted(job, "before its ranks were started")

        result = self._stop.retry("take the GPUs", lambda: shared.put_vllm_to_sleep(job, interrupted))
        if isinstance(result, Asleep):
            self._gpus.floor = self._gpus.vllm_bytes = result.devices
            joblog.say(f"vLLM sleeps after {result.seconds:.1f} s; bytes in use: {result.devices}")
            self._append_event(job, "slept", vars(result))
        return interrupted() or (result if isinstance(result, JobError) else None)

    def _release_gpus(self, job: Job, survivors: list[Process]) -> None:
        """Write the event `released`, which comes before the job's terminal event (R15)."""
        beats = _or_none(lambda: self._spool.jobs.beats(job.spec.id, job.attempt)) or {}
        before: dict[str, int] = {}
        for beat in beats.values():
            if beat.uuid is not None and beat.uuid != "cpu" and beat.device_used_peak is not None:
                before[beat.uuid] = max(before.get(beat.uuid, 0), beat.device_used_peak)
        # From heartbeats, which also exist for a rank that died or ran out of memory.
        memory = {rank: beat.model_dump(include=set(RankMemory.model_fields)) for rank, beat in beats.items()}
        data = {"processes": len(survivors), "before": before, "memory": memory}
        self._append_event(job, "released", data | self._gpus.measure_release(job, survivors))

    def _give_back_gpus(self, job: Job, joblog: JobLog) -> None:
        """Wake a vLLM that shares the GPUs, before the job's terminal event (R15)."""
        if (shared := self._gpus.shared) is None:
            return
        woken = self._stop.retry("give the GPUs back", lambda: shared.wake_vllm(self._gpus.floor))
        if woken is not None:
            joblog.say(f"vLLM is awake after {woken['seconds']:.1f} s")
            self._append_event(job, "woken", woken)

    # ---------------------------------------------------------------- the record

    def _append_event(self, job: Job, kind: EventType, data: dict[str, object]) -> None:
        append = self._spool.events.append
        self._stop.retry(f"write the event {kind}", lambda: append(job.spec.id, kind, attempt=job.attempt, **data))

    def _record(self, job: Job, result: JobResult | JobError) -> str:
        """Write the job's end, or put it back into the queue; returns its new state."""
        if isinstance(result, JobError):
            return self._spool.queue.requeue(job, result, counts=result.type != "runner_stopped")
        if result.state == "succeeded":
            # With the checkpoint committed nobody needs the packed data. It is gone before the job shows its end.
            fs.remove_tree(self._spool.paths.data_dir(job.spec.id))
        return self._spool.queue.finish(job, result)


def _or_none[T](action: Callable[[], T]) -> T | None:
    """The result of `action`, or None where the volume is unusable."""
    with suppress(TandemError, OSError):
        return action()
    return None
