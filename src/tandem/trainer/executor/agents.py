"""The code that all executors of several hosts share. On each host an agent (`trainer/agent`)
starts the attempt's ranks. Runner and agents communicate through files in the attempt's directory;
the runner makes no connection to a host. An engine is a system that places agents on hosts, such as
Kubernetes or Slurm. Each subclass calls one engine, to start the agents, to stop them and to read
their state.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

from tandem.config import Settings
from tandem.errors import TandemError
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.spool.schema import EventType, JobError
from tandem.system import liveness
from tandem.system.logs import Log
from tandem.trainer.agent.hosts import (
    DONE,
    FAILED,
    AgentOrder,
    HostBeat,
    HostEnd,
    HostRecord,
    Meeting,
    misfit,
)
from tandem.trainer.executor import Ended, Order, Running, Waiting
from tandem.trainer.stop import Stop

log = Log("runner")

LOOK_SECONDS = 0.2
AWAY_SECONDS = 5.0
"""The runner reads the hosts' files far more often than this. After a longer pause between two
reads the volume has kept the runner and the agents waiting, and the runner may read a heartbeat
file before its agent can renew it."""
SILENT_SECONDS = 10.0
"""Seconds without a heartbeat after which the runner no longer waits for an agent. An agent beats
twice a second."""
END_SECONDS = 40.0
"""Seconds that the other hosts may take, after one host's ranks failed, to end their ranks and
measure their devices."""
KILL_SECONDS = 25.0
"""Seconds that hosts may take, after the runner asked the agents to kill the ranks, to end the
ranks and measure the devices."""
REPORT_SECONDS = 60.0
"""Seconds for which an engine may be away before the runner reports that it is not ready."""


class AgentsExecution:
    """An `Execution`. Subclasses implement the methods that call the engine, which are the last
    methods of this class."""

    def __init__(self, order: Order, settings: Settings, plan: AgentOrder, stop: Stop) -> None:
        self._order, self._settings, self._plan, self._stop = order, settings, plan, stop
        self._meeting = Meeting(order.files)
        self._state: Waiting | Running | Ended = Waiting("the hosts' agents")
        self._next_look = 0.0
        self._start_begin: float | None = None  # begin of the time limit for hosts to arrive
        self._failed_since: float | None = None
        self._met = False
        self._records: dict[int, HostRecord] = {}
        self._ends: dict[int, HostEnd] = {}
        # Maps a host to its last heartbeat, and to the time at which the heartbeat last changed.
        # The time is measured by the runner's clock.
        self._beats: dict[int, tuple[HostBeat, float]] = {}
        self._polled = time.monotonic()

    def start(self) -> None:
        """Writes the order for the agents, unless an earlier runner has written it."""

        def give() -> bool:
            if (known := self._meeting.order()) is None:
                self._meeting.give_order(self._plan)
            self._plan = known or self._plan
            return True

        if self._stop.retry("give the order to the agents", give) is None:
            self._state = Ended(error=self._order.interrupted())
            return
        self._start_engine()

    def poll(self) -> Waiting | Running | Ended:
        now = time.monotonic()
        if not isinstance(self._state, Ended) and now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            try:
                self._look(now)
            except (TandemError, OSError):
                # While the volume can't be read, a missing heartbeat does not show that a host is
                # dead.
                self._beats = {host: (beat, now) for host, (beat, _) in self._beats.items()}
            else:
                self._forgive(time.monotonic())
                self._state = self._judge(now)
        self._polled = time.monotonic()
        return self._state

    def _forgive(self, now: float) -> None:
        """Moves the times of the hosts' heartbeats later by the time in which this runner could not
        read the volume. This time then does not count as silence of a host."""
        if (away := now - self._polled) > AWAY_SECONDS:
            self._beats = {
                host: (beat, min(changed + away, now))
                for host, (beat, changed) in self._beats.items()
            }

    def stop(self) -> None:
        self._ask_agents("stop")
        self._stop_engine()

    def kill(self) -> None:
        if self._unfinished(time.monotonic()):
            self._ask_agents("kill")
        self._kill_engine()
        end = time.monotonic() + KILL_SECONDS
        while self._unfinished(now := time.monotonic()) and now < end:
            time.sleep(LOOK_SECONDS)
            with suppress(TandemError, OSError):
                self._look(time.monotonic())

    def give_back(self) -> list[tuple[EventType, dict[str, object]]]:
        ends = self._ends
        if not ends:
            return []
        devices = {uuid: size for end in ends.values() for uuid, size in end.devices.items()}
        unmeasured = sorted(set(range(self._plan.hosts)) - ends.keys())
        data: dict[str, object] = {
            "processes": sum(end.processes for end in ends.values()),
            "bytes": None if None in devices.values() else sum(filter(None, devices.values())),
            "devices": devices,
            "seconds": max(end.seconds for end in ends.values()),
            "hosts": {
                str(host): {"devices": end.devices, "seconds": end.seconds}
                for host, end in sorted(ends.items())
            },
            **({"unmeasured": unmeasured} if unmeasured else {}),
        }
        return [("released", data)]

    # ---- methods that read or write the hosts' files

    def _ask_agents(self, what: str) -> None:
        with suppress(TandemError, OSError):
            self._meeting.ask(what)

    def _look(self, now: float) -> None:
        for host in range(self._plan.hosts):
            if host in self._ends:
                continue
            if not self._met and (record := self._meeting.record(host)) is not None:
                self._records[host] = record
            beat = self._meeting.beat(host)
            if beat is not None and (host not in self._beats or beat != self._beats[host][0]):
                self._beats[host] = beat, now
            if (end := self._meeting.end(host)) is not None:
                self._ends[host] = end
                for lost in end.network:
                    self._order.say(f"{self._records.get(host, f'host {host}')}: {lost}")

    def _judge(self, now: float) -> Waiting | Running | Ended:
        """The attempt's status, from the hosts' records and the engine's answers."""
        if (error := misfit([*self._records_in_order()], self._plan)) is not None:
            return Ended(1, error)
        if (ended := self._ended(now)) is not None:
            return ended
        engine = self._ask_engine()
        if isinstance(engine, Ended):
            return engine
        arrived = [record for record in self._records.values() if not record.waits]
        self._met = self._met or len(arrived) == self._plan.hosts
        if self._met:
            ran = [beat.seconds for beat, _ in self._beats.values() if beat.seconds is not None]
            return Running(max(ran, default=0.0))
        if isinstance(engine, Waiting):
            self._start_begin = None
            return engine
        self._start_begin = self._start_begin or now
        missing = "; ".join(self._missing())
        if now - self._start_begin > self._settings.start_seconds:
            message = (
                f"not all hosts were there after {self._settings.start_seconds:g} s: {missing}"
            )
            return Ended(error=JobError(type="launch_failed", message=message, retriable=True))
        return Waiting(missing)

    def _records_in_order(self) -> list[HostRecord]:
        return [self._records[host] for host in sorted(self._records)]

    def _missing(self) -> list[str]:
        """One line for each host that is not ready, with the reason."""
        of, lines = self._plan.hosts, []
        for host in range(of):
            record, engine = self._records.get(host), self._lacks(host)
            if record is not None and record.waits:
                lines.append(f"{record} waits: {record.waits}")
            elif record is None:
                arrived = "has begun" if host in self._beats else "has not arrived"
                lines.append(f"host {host} of {of} {arrived}{f' ({engine})' if engine else ''}")
        return lines

    def _ended(self, now: float) -> Ended | None:
        """The attempt's end. Returns None until every host has reported its end or can't report any
        more."""
        failed = any(end.status != DONE for end in self._ends.values())
        if failed and self._failed_since is None:
            self._failed_since = now
        lost = self._silent(now, SILENT_SECONDS if failed else self._settings.lease_seconds)
        if lost and not failed:
            return Ended(1, self._lost(lost))
        late = self._failed_since is not None and now - self._failed_since > END_SECONDS
        others_end = failed and not self._beats.keys() - self._ends.keys() - set(lost)
        if not (late or others_end or len(self._ends) == self._plan.hosts):
            return None
        errors = [end.error for _, end in sorted(self._ends.items()) if end.error is not None]
        if errors:
            return Ended(1, errors[0])
        return Ended(1 if failed else 0, self._lost(lost) if lost else None)

    def _lost(self, hosts: list[int]) -> JobError:
        names = [str(self._records.get(host, f"host {host}")) for host in hosts]
        message = f"no sign of {' and '.join(names)}: killed, stopped, or cut off"
        return JobError(type="host_lost", message=message, retriable=True)

    def _silent(self, now: float, seconds: float) -> list[int]:
        """The hosts whose last heartbeat is more than `seconds` old, except hosts that have
        reported their end."""
        return [
            host
            for host, (_, changed) in self._beats.items()
            if host not in self._ends and now - changed > seconds
        ]

    def _unfinished(self, now: float) -> set[int]:
        """Hosts whose agents still have to end their ranks."""
        return self._beats.keys() - self._ends.keys() - set(self._silent(now, SILENT_SECONDS))

    # ---- methods that call the engine

    def _start_engine(self) -> None:
        """Makes the engine start an agent on each host, or finds the agents that an earlier runner
        has started."""

    def _ask_engine(self) -> Waiting | Running | Ended:
        """Returns Waiting while the agents wait for hosts, Running once the agents may have
        started, and Ended if the agents can't go on. Time in the state Waiting does not count
        towards `start_seconds`."""
        return Running()

    def _lacks(self, _host: int) -> str:
        """The engine's explanation for a host that has not arrived; empty if the engine gives
        none."""
        return ""

    def _stop_engine(self) -> None:
        """Asks the engine to end the agents. The agents also read the request from a file on the
        volume."""

    def _kill_engine(self) -> None:
        """Makes the engine kill the agents."""


class AgentsExecutor:
    """The base class of executors of several hosts; its subclasses add `start`.

    Args:
        entry: the module whose `main` runs a rank.
        stop: says whether the runner has to stop.
    """

    stays = False

    def __init__(self, settings: Settings, entry: str, stop: Stop) -> None:
        self._settings, self._stop = settings, stop
        self._plan = AgentOrder.of(settings, entry)
        self.devices = f"{settings.trainer_hosts} hosts of {settings.ranks_per_host} ranks"

    def prepare(self) -> None:
        """Does nothing, because the agents prepare themselves."""

    def wait_until_free(self) -> None:
        """Does nothing, because each agent waits for its own devices."""

    def rest(self) -> None:
        """Does nothing, because no process stays between attempts; subclasses may override this."""

    def adopts(self, attempt: Attempt, /) -> bool:
        order = Meeting(attempt).order()
        return order is not None and order.settings == self._plan.settings

    def close(self) -> None:
        """Does nothing, because the agents stay alive."""


class EngineExecution(AgentsExecution):
    """An `Execution` whose engine may stop agents. A subclass finds the engine's reason."""

    def _ended(self, now: float) -> Ended | None:
        """The attempt's end, from the agents' records. If an agent was stopped or is silent, the
        reason comes from the engine."""
        ended = super()._ended(now)
        if ended is None or ended.error is None:
            return ended
        if ended.error.type not in ("preempted", "host_lost"):
            return ended
        failed = [end for end in self._ends.values() if end.status == FAILED]
        if failed:  # ranks failed, so the engine stopped the other hosts
            return Ended(1, next((end.error for end in failed if end.error is not None), None))
        return self._explained(ended, now)

    def _explained(self, ended: Ended, _now: float) -> Ended | None:
        """Replaces the reason in `ended` by the engine's reason. Returns None while the engine may
        still report its reason."""
        return ended


class EngineExecutor(AgentsExecutor):
    """An `Executor` whose engine is reached over a network. Subclasses add `start`. Attempts of
    this executor go on when the runner stops. Several attempts may run at once, each in its own
    thread of the runner."""

    stays = True
    engine: ClassVar[str]
    """The engine's name in the log."""
    jobs: ClassVar[str]
    """The name of the engine's own jobs in the log."""
    away: ClassVar[type[TandemError]]
    """The type of the error that a call raises if the engine does not answer."""

    def __init__(self, settings: Settings, entry: str, stop: Stop, spool: Spool) -> None:
        super().__init__(settings, entry, stop)
        self._spool = spool
        self._away_since: float | None = None

    def ask[T](self, action: Callable[[], T]) -> T:
        """The result of `action`, which calls the engine. If the engine does not answer for
        REPORT_SECONDS, the runner is reported as not ready."""
        try:
            result = action()
        except self.away as error:
            now = time.monotonic()
            self._away_since = since = self._away_since or now
            if now - since > REPORT_SECONDS:
                liveness.report("runner", str(error))
            raise
        self._away_since = None
        liveness.report("runner", "")
        return result

    def prepare(self) -> None:
        """Ends the engine's jobs that belong to no running job, if the engine answers."""
        try:
            self._sweep()
        except (TandemError, OSError) as error:
            log.warning(f"can't look for {self.jobs} that no job has", error=error)

    def wait_until_free(self) -> None:
        """Waits for the engine, and ends the engine's jobs that belong to no running job."""
        self._stop.retry(f"ask {self.engine} for its jobs", self._sweep, until="it answers")

    def _sweep(self) -> None:
        """Ends the engine's jobs that belong to no running job."""
