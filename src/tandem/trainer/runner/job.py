"""Handles one claimed job: checks the job, runs one attempt through the executor, and records the
job's end."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from tandem.config import Settings
from tandem.errors import TandemError
from tandem.spool import Spool, fs
from tandem.spool.attempt import Attempt
from tandem.spool.schema import EventType, Job, JobError, JobResult, RankMemory, SessionJob
from tandem.system import liveness
from tandem.system.logs import Log
from tandem.trainer.executor import Ended, Execution, Executor, Order, Waiting
from tandem.trainer.runner.failure import Heartbeats, RankProgress, failure
from tandem.trainer.runner.joblog import JobLog
from tandem.trainer.runner.waiting import Wait
from tandem.trainer.stop import LONGEST_PAUSE_SECONDS, Stop

log = Log("runner")

TERMINATE_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL."""

START_SECONDS = 300.0
"""Seconds that a rank may take until its first heartbeat, even if `stall_seconds` is less. A
shorter limit would end a new fork server during its imports, and the next attempt would have to
start the imports again."""

UNCOUNTED = {"runner_stopped", "preempted"}
"""Types of errors after which an attempt does not count against `max_attempts`: the attempt ended
because the runner was stopped, or because its hosts were needed for something else."""

UNCOUNTED_ONCE = {"job_deleted"}
"""Types of errors after which an attempt counts only if the previous attempt ended with the same
error. A person or program that ended two attempts in a row would also end the next attempt."""

STOPPED = JobError(type="runner_stopped", message="the runner was asked to stop", retriable=True)


class LeftError(Exception):
    """The runner stops, and the attempt continues without the runner."""


@dataclass
class JobRun:
    """One attempt at a claimed job. The attempt's terminal event is written after the events of its
    executor."""

    settings: Settings
    spool: Spool
    executor: Executor
    stop: Stop
    runner: str  # the runner's name, for leases
    job: Job
    adopted: bool = False
    """Whether an earlier runner started the attempt, and the attempt continued without that
    runner."""

    def __post_init__(self) -> None:
        self._files = Attempt(self.spool, self.job.spec.id, self.job.attempt)
        hosts = None if self.settings.executor == "local" else self.settings.trainer_hosts
        self._log = JobLog(self._files, self.settings.trainer_ranks, hosts)
        self._wait = Wait(self._files, time.monotonic)
        self._next_beat = 0.0

    def run(self) -> float:
        """Run the job until its end is recorded, or until the runner is asked to stop. Returns the
        seconds that the job should wait before its next attempt."""
        job, spec = self.job, self.job.spec
        begin = time.monotonic()
        log.info(
            "adopted" if self.adopted else "claimed",
            job=spec.id,
            run=spec.run,
            kind=spec.kind,
            base_step=spec.base_step,
            attempt=job.attempt,
            counted=f"{self._counted}/{spec.max_attempts}",
        )
        try:
            result = self._result()
        except LeftError:
            log.info("leaves the attempt to the next runner", job=spec.id, attempt=job.attempt)
            return 0.0
        state = self.stop.retry("record the job's end", lambda: self._record(result))
        if state is None:
            log.warning(
                "stopped before the job's end could be written; the next runner settles it",
                job=spec.id,
            )
            return 0.0
        error = result.error if isinstance(result, JobResult) else result
        fields = (
            {}
            if error is None or state == "succeeded"
            else {"type": error.type, "error": error.message}
        )
        log.info(
            f"job {state}", job=spec.id, run=spec.run, seconds=time.monotonic() - begin, **fields
        )
        return min(2.0 ** (self._counted - 1), LONGEST_PAUSE_SECONDS) if state == "queued" else 0.0

    @property
    def _counted(self) -> int:
        """This attempt's number among the attempts that count against `max_attempts`."""
        return self.job.attempt - self.job.stopped

    def _result(self) -> JobResult | JobError:
        """The result of the job, or the error of this attempt."""
        try:
            known = None
            if not self.adopted:
                known = self.stop.retry("check the job's base", self._known_result)
            if known is not None or self.stop.requested:
                return known or STOPPED
            error = self._attempt()
            if self.stop.retry("look for the checkpoint", self._is_done):
                # Errors after the commit don't matter, because the run has the checkpoint.
                done = self._success()
                self._log.say(f"checkpoint {done.step} exists: succeeded")
                return done
        # The error is not retriable: for example, the run was removed, or a manifest is damaged.
        except TandemError as refusal:
            return JobError(type=refusal.code, message=str(refusal))
        self._log.say(f"no checkpoint: {error.type}: {error.message}")
        if error.type == "cancelled":
            return JobResult(state="cancelled", error=error, finished=time.time())
        return error.model_copy(update={"log_tail": self._log.last_lines()})

    def _known_result(self) -> JobResult | JobError | None:
        """The result of a job that needs no attempt; None if the job needs an attempt. A job needs
        no attempt if its checkpoint already exists, or if the checkpoint to start from is
        missing."""
        spec = self.job.spec
        if isinstance(spec, SessionJob):  # a session's job starts from the newest checkpoint
            return None
        if self.spool.checkpoints.made_by(self.job):
            return self._success()
        steps = self.spool.checkpoints.steps(spec.run)
        if spec.base_step + 1 in steps:
            message = (
                f"checkpoint {spec.base_step + 1} of run {spec.run!r} exists and was not made by"
                " this job"
            )
            return JobError(type="conflict", message=message)
        if spec.base_step in steps:
            return None
        message = f"run {spec.run!r} has no checkpoint {spec.base_step} to start from"
        if other := self.spool.jobs.failed_on(spec.run, spec.base_step - 1):
            message += f": job {other[1]}, which had to make it, is {other[0]}"
        return JobError(
            type="base_missing",
            message=f"{message}; submit this job again on the newest checkpoint",
        )

    def _is_done(self) -> bool:
        if isinstance(self.job.spec, SessionJob):
            return fs.exists(self._files.left)
        return self.spool.checkpoints.made_by(self.job)

    def _success(self) -> JobResult:
        spec = self.job.spec
        step = spec.base_step + 1
        if isinstance(spec, SessionJob):
            step = self.spool.checkpoints.newest(spec.run)
        return JobResult(state="succeeded", step=step, finished=time.time())

    def _record(self, result: JobResult | JobError) -> str:
        """Write the job's end, or put the job back into the queue. Returns the job's new state."""
        if isinstance(result, JobError):
            return self.spool.queue.requeue(self.job, result, counts=self._counts(result))
        if result.state == "succeeded":
            # After the commit of the checkpoint, the packed data is no longer needed. The data is
            # removed before the job's end becomes visible.
            fs.remove_tree(self.spool.paths.data_dir(self.job.spec.id))
        return self.spool.queue.finish(self.job, result)

    def _counts(self, error: JobError) -> bool:
        """Whether the attempt counts against `max_attempts`."""
        if error.type in UNCOUNTED_ONCE:
            before = self.job.last_error
            return before is not None and before.type == error.type
        return error.type not in UNCOUNTED

    def _attempt(self) -> JobError:
        """Runs the attempt until its processes have ended. Returns the reason why the attempt
        failed; the caller ignores the reason if the attempt made its checkpoint."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        counted = f"{self._counted} of {self.job.spec.max_attempts} that count"
        if self.adopted:
            self._log.go_on(self.job.attempt)
            _or_none(self._wait.adopt)
        begins = "goes on under another runner" if self.adopted else f"({counted})"
        self._log.say(f"attempt {self.job.attempt} {begins}, {now}")
        order = Order(self.job, self._files, self._interrupted, self._log.say, self._append_event)
        execution = self.executor.start(order)
        error = self._watch(execution)
        memory = self._memory()
        for kind, data in execution.give_back():
            self._append_event(kind, memory | data if kind == "released" else data)
        return error

    def _watch(self, execution: Execution) -> JobError:
        """Watch an attempt until its processes have ended. The ranks are stopped once they have run
        for `deadline_seconds`, or have made no progress for `stall_seconds`. Stopped ranks end
        within TERMINATE_SECONDS plus the executor's limit. Returns the reason why the attempt
        failed, as `_attempt` does.
        """
        heartbeats: Heartbeats | None = None
        begin = kill_time = math.inf
        reason: JobError | None = None
        while not isinstance(state := execution.poll(), Ended):
            self._log.collect()
            if self.stop.requested and self.executor.stays:
                raise LeftError
            now = time.monotonic()
            if heartbeats is None and not isinstance(state, Waiting):
                begin, heartbeats = now, Heartbeats(self._files, self.settings.trainer_ranks)
                begin -= state.seconds
            ranks = heartbeats.read() if heartbeats is not None else []
            if now > kill_time:
                self._log.say(
                    f"the ranks did not stop within {TERMINATE_SECONDS:g} s of SIGTERM; killing"
                    " them"
                )
                break
            if reason is None and (
                reason := self._interrupted() or self._overdue(now - begin, ranks)
            ):
                self._log.say(f"stopping the ranks: {reason.type}: {reason.message}")
                execution.stop()
                kill_time = now + TERMINATE_SECONDS
            if isinstance(state, Waiting):
                self._wait.goes_on(state.reason)
                phase = f"waiting: {state.reason}"
            else:
                self._wait.ends()
                phase = ranks[-1].phase
            self._beat("stopping" if reason else phase)
            time.sleep(0.1)
        execution.kill()
        self._log.collect(final=True)
        if reason is None:
            assert isinstance(state, Ended)
            # If all processes get a signal, the ranks may end before the loop above notices the
            # signal.
            stopped = STOPPED if self.stop.requested else None
            reason = state.error or stopped or failure(state.status, self._files)
        _or_none(self._files.remove_staged)
        return reason

    def _interrupted(self) -> JobError | None:
        """The reason to end the attempt early: the runner was asked to stop, or the job was
        cancelled. None if there is no reason."""
        if self.stop.requested and not self.executor.stays:
            return STOPPED
        if _or_none(lambda: self.spool.jobs.cancel_requested(self.job.spec.id)):
            return JobError(type="cancelled", message="cancelled while it ran")
        return None

    def _overdue(self, seconds: float, ranks: list[RankProgress]) -> JobError | None:
        """The error if the ranks have run for too long, or made no progress for too long; None if
        not. `ranks`: the ranks' progress; the rank that has been silent for the longest time comes
        first."""
        spec = self.job.spec
        if seconds > spec.deadline_seconds:
            message = (
                f"not done within deadline_seconds={spec.deadline_seconds:g};"
                f" {'; '.join(map(str, ranks))}"
            )
            return JobError(type="deadline", message=message, retriable=True)
        start = max(spec.stall_seconds, START_SECONDS)
        if silent := [
            rank for rank in ranks if rank.silent > (start if rank.starts else spec.stall_seconds)
        ]:
            bound = f"{start:g} s" if silent[0].starts else f"stall_seconds={spec.stall_seconds:g}"
            message = f"no progress for {bound}: {'; '.join(map(str, silent))}"
            return JobError(type="rank_hung", message=message, retriable=True)
        return None

    def _beat(self, phase: str) -> None:
        """Renew the job's lease every `heartbeat_seconds`."""
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + self.settings.heartbeat_seconds
        liveness.beat("runner")
        write = self.spool.leases.write
        _or_none(lambda: write(self.job, self.runner, phase, self._wait.since))

    def _memory(self) -> dict[str, object]:
        """The ranks' memory as fields of the event `released`. Memory is read from heartbeats,
        which also exist for a rank that died or ran out of memory."""
        beats = _or_none(self._files.beats) or {}
        before: dict[str, int] = {}
        for beat in beats.values():
            if beat.uuid not in (None, "cpu") and beat.device_used_peak is not None:
                before[beat.uuid] = max(before.get(beat.uuid, 0), beat.device_used_peak)
        fields = set(RankMemory.model_fields)
        memory = {rank: beat.model_dump(include=fields) for rank, beat in beats.items()}
        return {"before": before, "memory": memory}

    def _append_event(self, kind: EventType, data: dict[str, object]) -> None:
        append = partial(self._files.event, kind, **data)
        self.stop.retry(f"write the event {kind}", append)


def _or_none[T](action: Callable[[], T]) -> T | None:
    """The result of `action`, or None if the volume is unusable."""
    with suppress(TandemError, OSError):
        return action()
    return None
