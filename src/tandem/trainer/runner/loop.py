"""The runner: claims jobs, starts ranks for them, watches, judges. One per spool; no torch in this process.

    python -m tandem.trainer.runner          (or `tandem runner`)

Every claimed job ends in a state with a reason, within deadline_seconds (or stall_seconds without progress) per attempt
plus the bounds of `attempt` and RELEASE_SECONDS, and where the GPUs are shared with vLLM, those of `sharing`. SIGTERM
or SIGINT: the ranks are stopped, the job goes back to the queue without the attempt being counted, and the runner exits
with 0 within STOP_SECONDS. `kill -9` of the runner takes ranks and launchers with it (PR_SET_PDEATHSIG); what could
outlive it is found by its mark and ended by the next runner, before that one settles the jobs it left.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from tandem.config import Settings, load_settings
from tandem.errors import SpoolUnusable, TandemError
from tandem.spool import Spool, fs
from tandem.spool.recovery import made_checkpoint, recover
from tandem.spool.schema import EventType, Job, JobError, JobResult, JobState, RankMemory, RankProcess
from tandem.system import liveness, logs, processes
from tandem.system.gpus import STAYING_BYTES, Devices, beyond, over
from tandem.system.logs import Log
from tandem.system.processes import Process
from tandem.trainer.launch import DEFAULT_ENTRY, Launch, make_launcher
from tandem.trainer.runner import attempt, sharing
from tandem.trainer.runner.attempt import JobLog, Watch
from tandem.trainer.runner.echo import Echo

log = Log("runner")

RELEASE_SECONDS = 10.0
"""How long a device's memory may take to be free after its last process is gone."""
STOP_SECONDS = attempt.GRACE_SECONDS + attempt.KILL_SECONDS + RELEASE_SECONDS + sharing.STOP_SECONDS + 5.0
"""Bound between SIGTERM and the runner's exit."""
_IDLE_SECONDS = 0.2
_LONGEST_PAUSE = 30.0
_MARKER = "TANDEM_RUNNER_OF"
_QUEUED: tuple[JobState, ...] = ("queued",)


class Runner:
    """`entry`: module whose `main(root, job_id, attempt)` is a rank."""

    def __init__(self, settings: Settings, *, entry: str = DEFAULT_ENTRY) -> None:
        self._settings = settings
        self._entry = entry
        self._stop = False
        self._status = 0
        self._survivors: list[Process] = []
        self._floor: dict[str, int] = {}  # bytes per device UUID that may stay in use after a job
        self._beside: dict[str, int] = {}  # those that a vLLM has in use beside it, while it sleeps

    def request_stop(self, *_: object) -> None:
        self._stop = True

    def run(self) -> int:
        """Until SIGTERM. Raises SpoolUnusable when the spool can't be opened or has a runner already."""
        self._spool = Spool.create(self._settings.root)
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        with self._spool.runner_lock(self._name):
            self._volume = self._identity()
            # Not the path: the same volume may have another name in another life of this container.
            marker = (_MARKER, self._volume)
            processes.adopt_orphans()
            self._sweep(marker)
            self._devices = Devices(self._settings, "trainer")
            self._gpus = sharing.sharing(self._settings, self._spool, self._devices, self._name, lambda: self._stop)
            self._launcher = make_launcher(self._settings, entry=self._entry, marker=marker)
            log.info("runner is up", spool=self._spool.root, pid=os.getpid(), launch=self._launcher.name,
                     ranks=self._settings.trainer_ranks, devices=",".join(self._devices.uuids) or "cpu")  # fmt: skip
            for state, job in recover(self._spool, self._name):
                log.info("settled a job of an earlier runner", job=job.spec.id, run=job.spec.run, state=state)
            try:
                self._loop()
            finally:
                self._launcher.close()
            log.info("runner is down")
        return self._status

    def _sweep(self, marker: tuple[str, str]) -> None:
        """End what a dead runner of this spool left. Holding the lock, we know that it is dead."""
        orphans = processes.marked(*marker)
        for orphan in orphans:
            log.warning("ending a process of an earlier runner", pid=orphan.pid, command=orphan.command)
        self._survivors = processes.kill_all(lambda: processes.marked(*marker), timeout=attempt.KILL_SECONDS)

    # ---------------------------------------------------------------- the loop

    def _loop(self) -> None:
        self._launcher.prepare()
        while not self._stop:
            liveness.beat("runner")
            job = self._insist("look for a job", self._next)
            if job is not None:
                self._run_job(job)
            elif not self._stop:
                time.sleep(_IDLE_SECONDS)

    def _identity(self) -> str:
        root = self._spool.root
        with fs.volume_errors(root):
            status = root.stat()
        return f"{status.st_dev}:{status.st_ino}"

    def _next(self) -> Job | None:
        if self._identity() != self._volume:
            # Without its volume a mount point is an empty directory, which looks like a spool without jobs.
            if fs.exists(self._spool.paths.version_file):
                self._stop, self._status = True, 1
                log.error(
                    "another volume is mounted here, on which this runner holds no lock; ending, to be started again"
                )
                return None
            raise SpoolUnusable(f"the volume is gone from {self._spool.root}; mount it again")
        self._gpus.tidy()
        if not self._spool.jobs.list(states=_QUEUED):
            return None
        self._wait_for_devices()
        if self._stop:
            return None
        return self._spool.queue.claim(self._name)

    def _wait_for_devices(self) -> None:
        """Return when the devices are free; a job whose attempt could only fail on full devices is not claimed."""
        said = ""
        if not self._launcher.kept():
            self._floor = {}
        while not self._stop:
            self._survivors = [left for left in self._survivors if _lives(left)]
            why, about = self._gpus.blocked(), dict[str, object]()
            # What is in use on shared devices is vLLM's, until it sleeps.
            busy = self._devices.busy(self._floor) if self._settings.gpu_mode == "dedicated" else {}
            if why is None and (busy or self._survivors):
                why = "the devices are not free"
                about = {"bytes_in_use": busy or None, "processes": [left.pid for left in self._survivors] or None}
            if why is None:
                break
            if why != said:
                log.warning(f"jobs wait: {why}", **about)
                said = why
            self._pause(2.0)
        if said and not self._stop:
            log.info("the devices are free again")

    def _run_job(self, job: Job) -> None:
        spec = job.spec
        begin = time.monotonic()
        log.info("claimed", job=spec.id, run=spec.run, kind=spec.kind, base_step=spec.base_step,
                 attempt=f"{job.attempt}/{spec.max_attempts}")  # fmt: skip
        decided = self._decide(job)
        state = self._insist("record the job's end", lambda: self._record(job, decided))
        if state is None:
            log.warning("stopped before the job's end could be written; the next runner settles it", job=spec.id)
            return
        error = decided.error if isinstance(decided, JobResult) else decided
        why = {} if error is None else {"type": error.type, "error": error.message}
        log.info(f"job {state}", job=spec.id, run=spec.run, seconds=time.monotonic() - begin, **why)
        if state == "queued" and not self._stop:
            self._pause(min(2.0 ** (job.attempt - 1), _LONGEST_PAUSE))

    def _decide(self, job: Job) -> JobResult | JobError:
        try:
            verdict = self._insist("check the job's base", lambda: self._beforehand(job))
            if verdict is None and not self._stop:
                verdict = self._attempt(job)
        except TandemError as error:  # not retriable: the run was removed, a manifest is damaged, ...
            return JobError(type=error.code, message=str(error))
        stopped = JobError(type="runner_stopped", message="the runner was asked to stop", retriable=True)
        return verdict or stopped

    def _beforehand(self, job: Job) -> JobResult | JobError | None:
        """The verdict where it is known without running anything."""
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
                message += f": job {other.spec.id}, which was to make it, is {state}"
                break
        return JobError(type="base_missing", message=f"{message}; submit this job again on the newest checkpoint")

    def _attempt(self, job: Job) -> JobResult | JobError:
        spec, paths = job.spec, self._spool.paths
        work = paths.work_dir(spec.id, job.attempt)
        joblog = JobLog(paths.log_file(spec.id), work, self._settings.trainer_ranks, Echo(spec.id))
        joblog.say(
            f"attempt {job.attempt} of {spec.max_attempts}, {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}"
        )
        launch = Launch(
            root=self._spool.root, job=spec.id, attempt=job.attempt, ranks=self._settings.trainer_ranks, work=work,
            entry=self._entry,
        )  # fmt: skip
        watch = Watch(
            cancelled=lambda: _quietly(lambda: self._spool.jobs.cancel_requested(spec.id)) or False,
            stopping=lambda: self._stop,
            beat=lambda phase, ranks: self._beat(job, phase, ranks),
        )
        error = self._take(job, joblog, watch)
        if error is None:
            ended = attempt.run(job, self._launcher, launch, joblog, watch, self._settings.heartbeat_seconds)
            error = ended.error
            self._release(job, ended.survivors)
        self._give_back(job, joblog)
        if self._insist("look for the checkpoint", lambda: made_checkpoint(self._spool, job)):
            # Committed before whatever came after: the chain has it, so the job is done.
            joblog.say(f"checkpoint {spec.base_step + 1} is there: succeeded")
            return JobResult(state="succeeded", step=spec.base_step + 1, finished=time.time())
        joblog.say(f"no checkpoint: {error.type}: {error.message}")
        if error.type == "cancelled":
            return JobResult(state="cancelled", error=error, finished=time.time())
        return error.model_copy(update={"log_tail": joblog.tail()})

    def _take(self, job: Job, joblog: JobLog, watch: Watch) -> JobError | None:
        """Get the devices from vLLM where they are shared with it; why not, else None."""

        def leave() -> bool:
            return watch.stopping() or watch.cancelled()

        taken = self._insist("take the GPUs", lambda: self._gpus.take(job, leave))
        if isinstance(taken, sharing.Taken):
            self._floor = self._beside = taken.floor
            joblog.say(f"vLLM sleeps after {taken.seconds:.1f} s; in use beside it: {taken.floor}")
            data = {"before": taken.before, "devices": taken.floor, "seconds": taken.seconds}
            self._tell(job, "slept", data)
        if watch.stopping():
            return JobError(type="runner_stopped", message="the runner was asked to stop", retriable=True)
        if taken is not None and watch.cancelled():
            return JobError(type="cancelled", message="cancelled before its ranks were started")
        return taken if isinstance(taken, JobError) else None

    def _give_back(self, job: Job, joblog: JobLog) -> None:
        """The opposite of `_take`, whatever came of it: before the job's end is told (R15)."""
        woken = self._insist("give the GPUs back", lambda: self._gpus.give_back(self._floor))
        if woken is not None:
            joblog.say(f"vLLM is awake after {woken.seconds:.1f} s")
            self._tell(job, "woken", {"devices": woken.devices, "seconds": woken.seconds})

    def _tell(self, job: Job, kind: EventType, data: dict[str, object]) -> None:
        append = self._spool.events.append
        self._insist(f"tell that the job has {kind}", lambda: append(job.spec.id, kind, attempt=job.attempt, **data))

    def _release(self, job: Job, survivors: list[Process]) -> None:
        """Measure what is left on the devices and tell; the terminal state comes after this (R15)."""
        self._survivors = survivors
        begin = time.monotonic()
        self._gpus.beat("releasing")
        most = {uuid: size + STAYING_BYTES for uuid, size in self._beside.items()}
        if most and self._launcher.kept() and (left := self._devices.busy(most)):
            log.error("the ranks keep too much for vLLM to wake beside them; ending them", bytes_in_use=left)
            self._launcher.close()
        if stay := bool(self._launcher.kept()):
            # They have given back what they can; what a process can't is measured, told, and not in the next job's way.
            used = self._devices.used()
            self._floor = {uuid: size for uuid, size in used.items() if size is not None}
        else:
            self._floor = self._beside
            used = self._devices.wait_free(RELEASE_SECONDS, self._floor)
        left = over(used, self._floor)
        if survivors or left:
            log.error("the ranks are gone but memory is not free" if left else "processes survive SIGKILL",
                      job=job.spec.id, bytes_in_use=left or None,
                      processes=[process.pid for process in survivors] or None)  # fmt: skip
        before: dict[str, int] = {}
        beats = _quietly(lambda: self._spool.jobs.beats(job.spec.id, job.attempt)) or {}
        for beat in beats.values():
            if beat.uuid is not None and beat.uuid != "cpu" and beat.device_used_peak is not None:
                before[beat.uuid] = max(before.get(beat.uuid, 0), beat.device_used_peak)
        data: dict[str, object] = {
            "processes": len(survivors),
            "before": before,
            # From the ranks' last signs of life, so that of one that died, or ran out of memory, it is told as well.
            "memory": {rank: beat.model_dump(include=set(RankMemory.model_fields)) for rank, beat in beats.items()},
            # null where the driver didn't answer: not measured is not zero.
            "bytes": None if None in used.values() else sum(filter(None, beyond(used, self._beside).values())),
            "devices": used,
            **({"floor": self._beside} if self._beside else {}),
            **({"resident": beyond(used, self._beside)} if stay else {}),
            "seconds": time.monotonic() - begin,
        }  # fmt: skip
        self._tell(job, "released", data)

    def _record(self, job: Job, verdict: JobResult | JobError) -> str:
        if isinstance(verdict, JobResult):
            if verdict.state == "succeeded":
                # Nobody maps the arrays any more, and with the checkpoint there nobody needs them: gone before "done".
                fs.remove_tree(self._spool.paths.data_dir(job.spec.id))
            return self._spool.queue.finish(job, verdict)
        return self._spool.queue.requeue(job, verdict, counts=verdict.type != "runner_stopped")

    def _beat(self, job: Job, phase: str, ranks: list[Process]) -> None:
        liveness.beat("runner")
        self._gpus.beat()
        recorded = [RankProcess(pid=rank.pid, start_time=rank.started) for rank in ranks]
        _quietly(lambda: self._spool.leases.renew(job.spec.id, self._name, phase, recorded))

    # ---------------------------------------------------------------- patience

    def _insist[T](self, what: str, action: Callable[[], T]) -> T | None:
        """Do it; while the volume is unusable (full, gone, read-only) wait and try again, said once. None if stopped
        meanwhile."""
        pause, said = 0.5, False
        while True:
            try:
                result = action()
            except (TandemError, OSError) as error:
                if isinstance(error, TandemError) and not error.retriable:
                    raise
                if not said:
                    log.error(f"can't {what}; trying again until the volume is back", error=error)
                    said = True
                if self._stop:
                    return None
                self._pause(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            else:
                if said:
                    log.info(f"could {what} again")
                return result

    def _pause(self, seconds: float) -> None:
        liveness.beat("runner")
        end = time.monotonic() + seconds
        while not self._stop and time.monotonic() < end:
            time.sleep(0.1)


def _lives(process: Process) -> bool:
    now = processes.read(process.pid)
    return now is not None and now.started == process.started and not now.zombie


def _quietly[T](action: Callable[[], T]) -> T | None:
    """The result, or None where the volume is unusable just now: the ranks' own trouble with it decides."""
    with suppress(TandemError, OSError):
        return action()
    return None


def main(entry: str = DEFAULT_ENTRY) -> int:
    """Run until SIGTERM; the exit status."""
    logs.configure()
    try:
        runner = Runner(load_settings(), entry=entry)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, runner.request_stop)
        return runner.run()
    except TandemError as error:
        log.error("the runner can't run", type=error.code, error=error)
        return 1
