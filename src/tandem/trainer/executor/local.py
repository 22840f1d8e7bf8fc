"""Attempts on the runner's own host. The ranks are descendants of the runner, and may share their
devices with vLLM.

`kill -9` of the runner ends ranks and launchers too (PR_SET_PDEATHSIG). Some processes may outlive
the runner. The next runner finds these processes by an environment variable, and ends them before
it handles the dead runner's jobs.
"""

from tandem.config import Settings
from tandem.errors import SpoolUnusable
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.spool.schema import EventType, JobError
from tandem.system import processes
from tandem.system.logs import Log
from tandem.system.processes import Process
from tandem.trainer.executor import Ended, Order, Running, gpus, shared_gpus
from tandem.trainer.executor.gpus import JobGpus
from tandem.trainer.executor.shared_gpus import Asleep
from tandem.trainer.launch import Launch, RankSettings
from tandem.trainer.launch.launcher import Handle, Launcher
from tandem.trainer.stop import Stop

log = Log("runner")

KILL_SECONDS = 10.0
"""Seconds that killed processes may take to be gone. The kernel may keep a process in an
uninterruptible sleep."""
STOP_SECONDS = KILL_SECONDS + gpus.RELEASE_SECONDS + shared_gpus.STOP_SECONDS
"""The longest time, in seconds, from the decision to kill an attempt's ranks to the attempt's
end."""


class LocalExecutor:
    """An `Executor`."""

    stays = False

    def __init__(
        self,
        settings: Settings,
        spool: Spool,
        entry: str,
        *,
        volume: str,
        runner: str,
        stop: Stop,
    ) -> None:
        """Ends processes that an earlier runner of the volume left. The earlier runner is dead,
        because this runner holds the runner lock. Raises InvalidInput when the settings name
        devices that don't exist.

        Args:
            entry: the module whose `main` runs a rank.
            volume: a name of the volume that does not depend on the mount point.
            runner: this runner's name.
        """
        marker = ("TANDEM_RUNNER_OF", volume)
        processes.adopt_orphans()
        for orphan in processes.marked(*marker):
            log.warning(
                "ending a process of an earlier runner", pid=orphan.pid, command=orphan.command
            )
        survivors = processes.kill_all(lambda: processes.marked(*marker), timeout=KILL_SECONDS)
        self._stop = stop
        self._entry, self._rank_settings = entry, RankSettings.of(settings)
        self._launcher = Launcher(settings, entry, marker)
        self._gpus = JobGpus(settings, spool, self._launcher, runner, stop)
        self._gpus.survivors = survivors
        self.devices = self._gpus.names

    def prepare(self) -> None:
        self._launcher.prepare()

    def wait_until_free(self) -> None:
        self._gpus.wait_until_free()

    def rest(self) -> None:
        """Does nothing, because the fork server stays until the runner ends."""

    def adopts(self, _attempt: Attempt) -> bool:
        """Returns False, because the attempt's ranks ended with the earlier runner."""
        return False

    def start(self, order: Order) -> "LocalExecution":
        files = order.files
        launch = Launch(
            root=files.spool.root,
            job=files.job,
            attempt=files.number,
            settings=self._rank_settings,
            entry=self._entry,
        )
        execution = LocalExecution(order, launch, self._launcher, self._gpus, self._stop)
        execution.start()
        return execution

    def close(self) -> None:
        self._launcher.close()


class LocalExecution:
    """An `Execution`. The job's terminal event comes after the events `slept`, `released` and
    `woken`, so vLLM never wakes while the job uses memory."""

    def __init__(
        self, order: Order, launch: Launch, launcher: Launcher, gpus: JobGpus, stop: Stop
    ) -> None:
        self._order, self._launch = order, launch
        self._launcher, self._gpus, self._stop = launcher, gpus, stop
        self._handle: Handle | None = None
        self._error: JobError | None = None  # reason why there are no ranks
        self._has_gpus = False
        self._survivors: list[Process] = []

    def start(self) -> None:
        self._error = self._acquire_gpus()
        if self._error is not None:
            return
        self._has_gpus = True
        try:
            self._handle = self._launcher.launch(self._launch)
        except (OSError, SpoolUnusable) as error:
            self._error = JobError(
                type="launch_failed", message=f"can't start the ranks: {error}", retriable=True
            )

    def _acquire_gpus(self) -> JobError | None:
        """Put vLLM to sleep if it shares the GPUs. Returns the reason why the ranks can't start;
        None if they can."""
        order = self._order
        if (shared := self._gpus.shared) is None:
            return order.interrupted()
        result = self._stop.retry(
            "take the GPUs", lambda: shared.put_vllm_to_sleep(order.job, order.interrupted)
        )
        if isinstance(result, Asleep):
            self._gpus.vllm_sleeps(result.devices)
            order.say(f"vLLM sleeps after {result.seconds:.1f} s; bytes in use: {result.devices}")
            order.tell("slept", vars(result))
            # The event's write may have waited long for the volume. While the runner waits, it does
            # not renew its hold, the request for vLLM's GPUs.
            result = self._stop.retry("renew the hold", shared.renew)
        return order.interrupted() or result

    def poll(self) -> Running | Ended:
        if self._gpus.shared is not None:
            self._gpus.shared.beat()
        if self._handle is None:
            return Ended(error=self._error)
        status = self._handle.poll()
        return Running() if status is None else Ended(status)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.terminate()

    def kill(self) -> None:
        if self._handle is not None:
            self._survivors = self._handle.kill_all(KILL_SECONDS)

    def give_back(self) -> list[tuple[EventType, dict[str, object]]]:
        # No event is written before vLLM is awake. Writing an event waits while the volume is
        # unreachable or read-only, and vLLM must not sleep during such a wait.
        events = list[tuple[EventType, dict[str, object]]]()
        if self._has_gpus:
            left = self._gpus.measure_release(self._order.job, self._survivors)
            events.append(("released", {"processes": len(self._survivors), **left}))
        if (shared := self._gpus.shared) is not None:
            woken = self._stop.retry(
                "give the GPUs back", lambda: shared.wake_vllm(self._gpus.floor)
            )
            if woken is not None:
                self._order.say(f"vLLM is awake after {woken['seconds']:.1f} s")
                events.append(("woken", woken))
        return events
