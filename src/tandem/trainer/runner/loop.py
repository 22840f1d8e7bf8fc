"""The runner: claims jobs, starts their ranks, watches them and records how they end. A spool has
one runner. The runner imports no torch.

Every attempt of a claimed job ends with a recorded reason. The ranks are stopped once they have run
for `deadline_seconds`, or have made no progress for `stall_seconds`. Stopped ranks end within the
limits in `job` and in the executor. On SIGTERM or SIGINT the runner stops the ranks, and puts the
job back into the queue without counting the attempt. Attempts under Kubernetes or Slurm continue
without the runner. The runner exits with 0 within STOP_SECONDS.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from tandem.config import Settings
from tandem.errors import Conflict, InvalidInput, SpoolUnusable, VolumeFull
from tandem.planning.plan import automatic, describe
from tandem.spool import Spool, fs
from tandem.spool.attempt import Attempt
from tandem.spool.recovery import recover
from tandem.spool.schema import Job
from tandem.spool.session_jobs import queue_waiting
from tandem.system import liveness
from tandem.system.gpus import Devices
from tandem.system.logs import Log
from tandem.trainer.executor import Executor, hosts, local, slurm
from tandem.trainer.runner import job
from tandem.trainer.runner.running import RunningJobs
from tandem.trainer.stop import Stop

log = Log("runner")

STOP_SECONDS = job.TERMINATE_SECONDS + local.STOP_SECONDS + 5.0
"""The longest time in seconds between SIGTERM and the runner's exit."""


class Runner:
    """`entry`: the module whose `main(attempt, settings)` runs a rank."""

    def __init__(self, settings: Settings, entry: str) -> None:
        self._settings, self._entry = settings, entry
        # Maps a job's id to the monotonic time from which the job may be claimed again.
        self._waiting: dict[str, float] = {}
        # The runner's name contains a random part, because a restarted container has the same host
        # name and pid as before.
        self._name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self.stop = Stop()

    def run(self) -> None:
        """Run jobs until SIGTERM. Waits for space if the volume is full.

        Raises SpoolUnusable if the spool can't be opened or already has a runner. Raises
        InvalidInput if the settings name devices that don't exist, and Conflict if another volume
        is mounted.
        """
        with ExitStack() as held:

            def open_spool() -> Spool:
                spool = Spool.create(self._settings.root)
                held.enter_context(spool.runner_lock(self._name))
                return spool

            spool = self.stop.retry("open the spool", open_spool, errors=(VolumeFull,))
            if spool is not None:
                self._spool = spool
                self._run_jobs()

    def _run_jobs(self) -> None:
        """End or adopt the attempts that an earlier runner left, then run jobs."""
        settings = self._settings = with_topology(self._settings)
        # `_volume` identifies the volume without its path, because the volume may be mounted
        # elsewhere after a restart of this container.
        self._volume = self._mounted_volume()
        self._executor = self._make_executor()
        log.info(
            "runner is up",
            spool=self._spool.root,
            pid=os.getpid(),
            launch=settings.launch,
            ranks=settings.trainer_ranks,
            jobs=settings.parallel_jobs,
            devices=self._executor.devices,
        )
        settled = self.stop.retry(
            "settle the jobs of an earlier runner",
            lambda: recover(self._spool, self._name, self._adopts),
        )
        for state, ended in settled or []:
            log.info(
                "settled a job of an earlier runner",
                job=ended.spec.id,
                run=ended.spec.run,
                state=state,
            )
        job_run = partial(job.JobRun, settings, self._spool, self._executor, self.stop, self._name)
        try:
            self._executor.prepare()
            with RunningJobs(settings.parallel_jobs, self._executor, self.stop) as running:
                self._go_on(running, job_run)
                while not self.stop.requested:
                    liveness.beat("runner")
                    self._note(running.ended())
                    self._executor.rest()
                    if (claimed := self._claim(running)) is not None:
                        running.start(job_run(claimed))
                    elif not self.stop.requested:
                        time.sleep(0.1)
        finally:
            self._executor.close()
        log.info("runner is down")

    def _make_executor(self) -> Executor:
        if self._settings.executor == "hosts":
            return hosts.HostsExecutor(self._settings, self._entry, self.stop)
        if self._settings.executor == "kubernetes":
            return _kubernetes(self._settings, self._entry, self.stop, self._spool)
        if self._settings.executor == "slurm":
            return slurm.SlurmExecutor(self._settings, self._entry, self.stop, self._spool)
        return local.LocalExecutor(
            self._settings,
            self._spool,
            self._entry,
            volume=self._volume,
            runner=self._name,
            stop=self.stop,
        )

    def _adopts(self, running: Job) -> bool:
        """Whether the attempt continues although its runner has died."""
        files = Attempt(self._spool, running.spec.id, running.attempt)
        return self._executor.adopts(files)

    def _go_on(self, running: RunningJobs, job_run: Callable[[Job], job.JobRun]) -> None:
        """Watch the attempts that continued without a runner."""
        for key in self._spool.jobs.index.running():
            if self.stop.requested:
                return
            adopted = job_run(self._spool.jobs.get(key.id)[1])
            running.start(replace(adopted, adopted=True))

    def _claim(self, running: RunningJobs) -> Job | None:
        return None if running.full else self.stop.retry("look for a job", self._next_job)

    def _note(self, ended: dict[str, float]) -> None:
        """Remember how long the jobs of the ended attempts have to wait before they are claimed
        again. `ended`: job id -> seconds to wait."""
        now = time.monotonic()
        self._waiting = {job_id: end for job_id, end in self._waiting.items() if end > now}
        self._waiting |= {job_id: now + pause for job_id, pause in ended.items()}

    def _mounted_volume(self) -> str:
        with fs.volume_errors(self._spool.root):
            status = self._spool.root.stat()
        return f"{status.st_dev}:{status.st_ino}"

    def _next_job(self) -> Job | None:
        """Claim the next job once the devices are free. Returns None if there is no job or the
        runner must stop."""
        if self._mounted_volume() != self._volume:
            # A mount point without its volume is an empty directory, which would look like a spool
            # without jobs.
            if not fs.exists(self._spool.paths.version_file):
                raise SpoolUnusable(f"the volume is gone from {self._spool.root}; mount it again")
            problem = (
                f"another volume is mounted at {self._spool.root}, on which this runner holds no"
                " lock"
            )
            raise Conflict(f"{problem}; it exits to be restarted")
        queue_waiting(self._spool)
        index = self._spool.jobs.index
        busy = {key.run for key in index.running()}
        if all(head.run in busy or head.id in self._waiting for head in index.heads()):
            return None
        self._executor.wait_until_free()
        return (
            None
            if self.stop.requested
            else self._spool.queue.claim(self._name, waiting=self._waiting)
        )


def _kubernetes(settings: Settings, entry: str, stop: Stop, spool: Spool) -> Executor:
    """Raises InvalidInput if the client for Kubernetes is not installed."""
    try:
        from tandem.trainer.executor.kubernetes import KubernetesExecutor
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"kubernetes needs {error.name}; install tandem-rl[kubernetes]", field="TANDEM_EXECUTOR"
        ) from error
    return KubernetesExecutor(settings, entry, stop, spool)


def with_topology(settings: Settings) -> Settings:
    """The settings, with the sizes that `TANDEM_TOPOLOGY=auto` chooses. Raises InvalidInput as
    `automatic` does."""
    if settings.topology != "auto":
        return settings
    made = automatic(settings, Devices(settings, "trainer", most=settings.trainer_ranks).smallest())
    sizes = made.recommended.sizes
    log.info(
        "chose the topology", topology=describe(sizes), settings=sizes.settings(), why=made.why
    )
    return settings.model_copy(update={"topology": "given", **sizes.fields()})
