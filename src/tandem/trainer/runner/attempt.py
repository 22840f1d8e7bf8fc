"""One attempt at a job: get the GPUs, run the ranks, watch them, end them, give the GPUs back."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tandem.config import Settings
from tandem.errors import TandemError
from tandem.spool import Spool
from tandem.spool.schema import EventType, Job, JobError, RankMemory, RankProcess
from tandem.system import liveness
from tandem.system.processes import Process
from tandem.trainer.launch import Handle, Launch, Launcher, read_exits
from tandem.trainer.runner.failure import failure, rank_errors
from tandem.trainer.runner.gpus import JobGpus
from tandem.trainer.runner.heartbeats import Heartbeats, RankProgress
from tandem.trainer.runner.joblog import JobLog, JobStdout
from tandem.trainer.runner.shared_gpus import Asleep
from tandem.trainer.runner.stop import Stop

TERMINATE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL."""
KILL_SECONDS = 10.0
"""How long killed processes may take to be gone. The kernel may hold one in an uninterruptible sleep."""
_POLL_SECONDS = 0.1

STOPPED = JobError(type="runner_stopped", message="the runner was asked to stop", retriable=True)


@dataclass(frozen=True)
class Services:
    """What the parts of a runner share."""

    settings: Settings
    spool: Spool
    launcher: Launcher
    gpus: JobGpus
    stop: Stop
    name: str  # the runner's, in leases and holds
    entry: str  # module whose `main(root, job_id, attempt)` is a rank


class Attempt:
    """Writes the events `slept`, `released` and `woken`; the job's terminal event comes after them (R15)."""

    def __init__(self, services: Services, job: Job) -> None:
        self._services, self._job = services, job
        self._spool, self._gpus, self._stop = services.spool, services.gpus, services.stop
        self._ranks = services.settings.trainer_ranks
        self._work = self._spool.paths.work_dir(job.spec.id, job.attempt)
        self._next_beat = 0.0
        self.log = JobLog(self._spool.paths.log_file(job.spec.id), self._work, self._ranks, JobStdout(job.spec.id))

    def run(self) -> JobError:
        """Returns why the attempt failed, if it made no checkpoint."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.log.say(f"attempt {self._job.attempt} of {self._job.spec.max_attempts}, {now}")
        error = self._acquire_gpus()
        if error is None:
            error, survivors = self._run_ranks()
            self._release_gpus(survivors)
        if (shared := self._gpus.shared) is not None:
            woken = self._stop.retry("give the GPUs back", lambda: shared.wake_vllm(self._gpus.floor))
            if woken is not None:
                self.log.say(f"vLLM is awake after {woken['seconds']:.1f} s")
                self._append_event("woken", woken)
        return error

    def _acquire_gpus(self) -> JobError | None:
        """Put a vLLM that shares the GPUs to sleep; the error says why the ranks can't start."""
        if (shared := self._gpus.shared) is None:
            return STOPPED if self._stop.requested else None
        result = self._stop.retry("take the GPUs", lambda: shared.put_vllm_to_sleep(self._job, self._interrupted))
        if isinstance(result, Asleep):
            self._gpus.floor = self._gpus.vllm_bytes = result.devices
            self.log.say(f"vLLM sleeps after {result.seconds:.1f} s; bytes in use: {result.devices}")
            self._append_event("slept", vars(result))
        return self._interrupted() or (result if isinstance(result, JobError) else None)

    def _run_ranks(self) -> tuple[JobError, list[Process]]:
        """Run the ranks until they exit or have to stop.

        That is at the latest `deadline_seconds` after the launch, or `stall_seconds` after their last progress, plus
        TERMINATE_SECONDS + KILL_SECONDS. Returns why they failed, if they made no checkpoint, and the processes that
        survived SIGKILL.
        """
        begin = time.monotonic()
        launch = Launch(
            self._spool.root, self._job.spec.id, self._job.attempt, self._ranks, self._work, self._services.entry
        )
        try:
            handle = self._services.launcher.launch(launch)
        except OSError as error:
            return JobError(type="launch_failed", message=f"can't start the ranks: {error}", retriable=True), []
        heartbeats = Heartbeats(self._work, self._ranks)
        while (status := handle.poll()) is None:
            self.log.collect()
            ranks = heartbeats.read()
            reason = self._interrupted() or self._overdue(time.monotonic() - begin, ranks)
            if reason is not None:
                self.log.say(f"stopping the ranks: {reason.type}: {reason.message}")
                self._terminate(handle)
                break
            self._beat(ranks[-1].phase, handle)
            time.sleep(_POLL_SECONDS)
        survivors = handle.kill_all(KILL_SECONDS)
        self.log.collect(final=True)
        if status is not None:
            reason = failure(status, read_exits(self._work), rank_errors(self._work))
        assert reason is not None
        return reason, survivors

    def _interrupted(self) -> JobError | None:
        """Why the attempt has to end early: the runner is asked to stop, or the job was cancelled."""
        if self._stop.requested:
            return STOPPED
        if _or_none(lambda: self._spool.jobs.cancel_requested(self._job.spec.id)):
            return JobError(type="cancelled", message="cancelled while it ran")
        return None

    def _overdue(self, seconds: float, ranks: list[RankProgress]) -> JobError | None:
        """Why ranks have run too long, or too long without progress. `ranks`: the longest silent first."""
        spec = self._job.spec
        if seconds > spec.deadline_seconds:
            message = f"not done within deadline_seconds={spec.deadline_seconds:g}; {'; '.join(map(str, ranks))}"
            return JobError(type="deadline", message=message, retriable=True)
        if ranks[0].silent > spec.stall_seconds:
            silent = "; ".join(str(rank) for rank in ranks if rank.silent > spec.stall_seconds)
            message = f"no progress for stall_seconds={spec.stall_seconds:g}: {silent}"
            return JobError(type="rank_hung", message=message, retriable=True)
        return None

    def _terminate(self, handle: Handle) -> None:
        handle.terminate()
        end = time.monotonic() + TERMINATE_SECONDS
        while handle.poll() is None:
            if time.monotonic() > end:
                self.log.say(f"the ranks did not stop within {TERMINATE_SECONDS:g} s of SIGTERM; killing them")
                return
            self.log.collect()
            self._beat("stopping", handle)
            time.sleep(_POLL_SECONDS)

    def _beat(self, phase: str, handle: Handle) -> None:
        """Renew the job's lease and the hold, every `heartbeat_seconds`."""
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + self._services.settings.heartbeat_seconds
        liveness.beat("runner")
        if self._gpus.shared is not None:
            self._gpus.shared.beat()
        ranks = [RankProcess(pid=process.pid, start_time=process.started) for process in handle.processes()]
        _or_none(lambda: self._spool.leases.renew(self._job.spec.id, self._services.name, phase, ranks))

    def _release_gpus(self, survivors: list[Process]) -> None:
        """Measure what the ranks left on the devices."""
        beats = _or_none(lambda: self._spool.jobs.beats(self._job.spec.id, self._job.attempt)) or {}
        before: dict[str, int] = {}
        for beat in beats.values():
            if beat.uuid is not None and beat.uuid != "cpu" and beat.device_used_peak is not None:
                before[beat.uuid] = max(before.get(beat.uuid, 0), beat.device_used_peak)
        # From heartbeats, which also exist for a rank that died or ran out of memory.
        memory = {rank: beat.model_dump(include=set(RankMemory.model_fields)) for rank, beat in beats.items()}
        data = {"processes": len(survivors), "before": before, "memory": memory}
        self._append_event("released", data | self._gpus.measure_release(self._job, survivors))

    def _append_event(self, kind: EventType, data: dict[str, object]) -> None:
        job, append = self._job, self._spool.events.append
        self._stop.retry(f"write the event {kind}", lambda: append(job.spec.id, kind, attempt=job.attempt, **data))


def _or_none[T](action: Callable[[], T]) -> T | None:
    """The result of `action`, or None where the volume is unusable."""
    with suppress(TandemError, OSError):
        return action()
    return None
