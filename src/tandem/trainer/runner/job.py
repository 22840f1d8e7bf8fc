"""A claimed job: check it, make one attempt (get the GPUs, run the ranks, give the GPUs back),
record its end."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from tandem.config import Settings
from tandem.errors import SpoolUnusable, TandemError
from tandem.spool import Spool, fs
from tandem.spool.attempt import Attempt
from tandem.spool.schema import EventType, Job, JobError, JobResult, RankMemory, SessionJob
from tandem.system import liveness
from tandem.system.logs import Log
from tandem.system.processes import Process
from tandem.trainer.launch.launcher import Launcher
from tandem.trainer.runner.failure import Heartbeats, RankProgress, failure
from tandem.trainer.runner.gpus import JobGpus
from tandem.trainer.runner.joblog import JobLog
from tandem.trainer.runner.shared_gpus import Asleep
from tandem.trainer.runner.stop import LONGEST_PAUSE_SECONDS, Stop

log = Log("runner")

TERMINATE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL."""
KILL_SECONDS = 10.0
"""How long killed processes may take to be gone. The kernel may hold one in an uninterruptible
sleep."""

START_SECONDS = 300.0
"""How long a rank may at least take to its first heartbeat, whatever `stall_seconds` is. A shorter
bound would end a new fork server in its imports, which the next attempt would begin again."""

STOPPED = JobError(type="runner_stopped", message="the runner was asked to stop", retriable=True)


@dataclass
class JobRun:
    """One attempt at a claimed job. Its terminal event comes after the events `slept`, `released`
    and `woken`, so that vLLM never wakes beside the job's memory."""

    settings: Settings
    spool: Spool
    launcher: Launcher
    gpus: JobGpus
    stop: Stop
    runner: str  # its name, in leases
    job: Job

    def __post_init__(self) -> None:
        self._files = Attempt(self.spool, self.job.spec.id, self.job.attempt)
        self._log = JobLog(self._files, self.settings.trainer_ranks)
        self._next_beat = 0.0

    def run(self) -> float:
        """Run the job until its end is recorded, or until the runner is asked to stop; returns how
        many seconds the job should wait before its next attempt."""
        job, spec = self.job, self.job.spec
        begin = time.monotonic()
        log.info(
            "claimed",
            job=spec.id,
            run=spec.run,
            kind=spec.kind,
            base_step=spec.base_step,
            attempt=job.attempt,
            counted=f"{self._counted}/{spec.max_attempts}",
        )
        result = self._result()
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
        """This attempt's number among those that count against `max_attempts`."""
        return self.job.attempt - self.job.stopped

    def _result(self) -> JobResult | JobError:
        """The job's end, or the error of this attempt."""
        try:
            known = self.stop.retry("check the job's base", self._known_result)
            if known is not None or self.stop.requested:
                return known or STOPPED
            error = self._attempt()
            if self.stop.retry("look for the checkpoint", self._is_done):
                # What went wrong after the commit doesn't matter: the checkpoint is in the chain.
                done = self._success()
                self._log.say(f"checkpoint {done.step} exists: succeeded")
                return done
        # Not retriable: the run was removed, a manifest is damaged, ...
        except TandemError as refusal:
            return JobError(type=refusal.code, message=str(refusal))
        self._log.say(f"no checkpoint: {error.type}: {error.message}")
        if error.type == "cancelled":
            return JobResult(state="cancelled", error=error, finished=time.time())
        return error.model_copy(update={"log_tail": self._log.last_lines()})

    def _known_result(self) -> JobResult | JobError | None:
        """The result where no attempt is needed: the checkpoint exists, or the one to start from
        does not."""
        spec = self.job.spec
        if isinstance(spec, SessionJob):  # it starts from the newest
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
        """Write the job's end, or put it back into the queue; returns its new state."""
        if isinstance(result, JobError):
            return self.spool.queue.requeue(
                self.job, result, counts=result.type != "runner_stopped"
            )
        if result.state == "succeeded":
            # With the checkpoint committed nobody needs the packed data. It is gone before the job
            # shows its end.
            fs.remove_tree(self.spool.paths.data_dir(self.job.spec.id))
        return self.spool.queue.finish(self.job, result)

    def _attempt(self) -> JobError:
        """Returns why the attempt failed, if it made no checkpoint."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        counted = f"{self._counted} of {self.job.spec.max_attempts} that count"
        self._log.say(f"attempt {self.job.attempt} ({counted}), {now}")
        released = woken = None
        error = self._acquire_gpus()
        if error is None:
            error, survivors = self._run_ranks()
            released = self._measure_release(survivors)
        # Before the events: these wait for a volume that is gone or read-only, and vLLM must not
        # sleep meanwhile.
        if (shared := self.gpus.shared) is not None:
            woken = self.stop.retry("give the GPUs back", lambda: shared.wake_vllm(self.gpus.floor))
        if released is not None:
            self._append_event("released", released)
        if woken is not None:
            self._log.say(f"vLLM is awake after {woken['seconds']:.1f} s")
            self._append_event("woken", woken)
        return error

    def _acquire_gpus(self) -> JobError | None:
        """Put a vLLM that shares the GPUs to sleep; the error says why the ranks can't start."""
        if (shared := self.gpus.shared) is None:
            return STOPPED if self.stop.requested else None
        result = self.stop.retry(
            "take the GPUs", lambda: shared.put_vllm_to_sleep(self.job, self._interrupted)
        )
        if isinstance(result, Asleep):
            self.gpus.vllm_sleeps(result.devices)
            self._log.say(
                f"vLLM sleeps after {result.seconds:.1f} s; bytes in use: {result.devices}"
            )
            self._append_event("slept", vars(result))
            # The event may have waited for the volume for long, and nobody renews the hold
            # meanwhile.
            result = self.stop.retry("renew the hold", shared.renew)
        return self._interrupted() or result

    def _run_ranks(self) -> tuple[JobError, list[Process]]:
        """Run the ranks until they exit, or at the latest `deadline_seconds` after the launch or
        `stall_seconds` after their last progress, plus TERMINATE_SECONDS + KILL_SECONDS.

        Returns why they failed, if they made no checkpoint, and the processes that survived
        SIGKILL.
        """
        begin = time.monotonic()
        try:
            handle = self.launcher.launch(self._files)
        except (OSError, SpoolUnusable) as error:
            return (
                JobError(
                    type="launch_failed", message=f"can't start the ranks: {error}", retriable=True
                ),
                [],
            )
        heartbeats = Heartbeats(self._files, self.settings.trainer_ranks)
        reason: JobError | None = None
        kill_time = math.inf
        while (status := handle.poll()) is None:
            self._log.collect()
            ranks = heartbeats.read()
            now = time.monotonic()
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
                handle.terminate()
                kill_time = now + TERMINATE_SECONDS
            self._beat("stopping" if reason else ranks[-1].phase)
            time.sleep(0.1)
        survivors = handle.kill_all(KILL_SECONDS)
        self._log.collect(final=True)
        if reason is None:
            assert status is not None
            # A signal to all processes ends the ranks before the loop above looks.
            reason = STOPPED if self.stop.requested else failure(status, self._files)
        self._files.remove_staged()
        return reason, survivors

    def _interrupted(self) -> JobError | None:
        """Why the attempt has to end early: the runner is asked to stop, or the job was
        cancelled."""
        if self.stop.requested:
            return STOPPED
        if _or_none(lambda: self.spool.jobs.cancel_requested(self.job.spec.id)):
            return JobError(type="cancelled", message="cancelled while it ran")
        return None

    def _overdue(self, seconds: float, ranks: list[RankProgress]) -> JobError | None:
        """Why ranks have run too long, or too long without progress. `ranks`: the longest silent
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
        """Renew the job's lease and the hold, every `heartbeat_seconds`."""
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + self.settings.heartbeat_seconds
        liveness.beat("runner")
        if self.gpus.shared is not None:
            self.gpus.shared.beat()
        _or_none(lambda: self.spool.leases.write(self.job, self.runner, phase))

    def _measure_release(self, survivors: list[Process]) -> dict[str, object]:
        """What the ranks left on the devices: the fields of the event `released`."""
        beats = _or_none(self._files.beats) or {}
        before: dict[str, int] = {}
        for beat in beats.values():
            if beat.uuid not in (None, "cpu") and beat.device_used_peak is not None:
                before[beat.uuid] = max(before.get(beat.uuid, 0), beat.device_used_peak)
        # From heartbeats, which also exist for a rank that died or ran out of memory.
        memory = {
            rank: beat.model_dump(include=set(RankMemory.model_fields))
            for rank, beat in beats.items()
        }
        data = {"processes": len(survivors), "before": before, "memory": memory}
        return data | self.gpus.measure_release(self.job, survivors)

    def _append_event(self, kind: EventType, data: dict[str, object]) -> None:
        append = partial(self._files.event, kind, **data)
        self.stop.retry(f"write the event {kind}", append)


def _or_none[T](action: Callable[[], T]) -> T | None:
    """The result of `action`, or None where the volume is unusable."""
    with suppress(TandemError, OSError):
        return action()
    return None
