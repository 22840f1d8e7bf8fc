"""The agent of one host. The agent claims its host's part of an attempt, waits for the other hosts
and starts its host's ranks. The agent watches the ranks until they end or the attempt ends. Without
torch."""

import os
import platform
import secrets
import shutil
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

import tandem
from tandem.config import Settings, resolve_model
from tandem.errors import InvalidInput, SpoolUnusable, TandemError
from tandem.families.model_config import base_model_digest
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.spool.schema import JobError
from tandem.system import liveness, network
from tandem.system.environment import installed_version
from tandem.system.gpus import Devices
from tandem.system.logs import Log
from tandem.trainer.agent.hosts import (
    DONE,
    FAILED,
    FENCED,
    STOPPED,
    UNUSABLE,
    AgentOrder,
    HostEnd,
    HostRecord,
    Meeting,
    misfit,
)
from tandem.trainer.agent.watch import AttemptWatch, Leave
from tandem.trainer.launch import DEFAULT_ENTRY, HostPart, Launch
from tandem.trainer.launch.launcher import Handle, Launcher
from tandem.trainer.stop import Stop

log = Log("agent")

POLL_SECONDS, FOLLOW_SECONDS = 0.05, 0.3
TERMINATE_SECONDS = 12.0
"""Seconds between SIGTERM and SIGKILL for the ranks. The ranks' own parent kills ranks that still
run 10 s after SIGTERM."""
KILL_SECONDS = 10.0
RELEASE_SECONDS = 10.0
"""Seconds that a device's memory may take to be free after the device's last process has ended."""
CONNECT_SECONDS = 5.0


class LeavingError(Exception):
    """The agent has to give up an attempt whose ranks have not started yet."""

    def __init__(self, leave: Leave) -> None:
        super().__init__(leave.why)
        self.leave = leave


@dataclass
class HostAgent:
    settings: Settings
    spool: Spool
    host: int
    stop: Stop

    def __post_init__(self) -> None:
        name, pid = socket.gethostname(), os.getpid()
        self._identity = f"{name}:{pid}:{secrets.token_hex(8)}"
        self._record = HostRecord(host=self.host, name=name, pid=pid)
        self._marker = ("TANDEM_AGENT", f"{name}:{pid}")
        self._others: list[str] = []  # addresses of the attempt's other hosts
        self._lost: tuple[str, ...] = ()  # connections to other hosts that lost data
        self._launcher: Launcher | None = None
        self._made_for: tuple[object, ...] = ()
        self._begin = time.monotonic()
        self.pods, self.linger_seconds = "", 0.0
        """The Kubernetes Job, as in `AgentOrder`, and the seconds for which its pods stay without
        an attempt."""
        self.lingers = 0.0
        """`HostEnd.lingers` of the last attempt."""

    def serve(self, job: str, number: int, hosts: int | None = None) -> int:
        """Run this host's part of an attempt; returns the agent's exit status. Raises
        SpoolUnusable, and InvalidInput if the attempt has no host with this number.

        Args:
            number: the attempt's number.
            hosts: the expected number of hosts; None: any number.
        """
        meeting = Meeting(Attempt(self.spool, job, number))
        order = meeting.order()
        if order is None:
            log.error("the attempt was ended, or waits for no agents", job=job, attempt=number)
            return FENCED
        if self.host >= order.hosts or order.hosts != (hosts or order.hosts):
            problem = f"the attempt has {order.hosts} hosts, this agent is host {self.host}"
            raise InvalidInput(f"{problem} of {hosts or 'any number'}", field="--hosts")
        if not meeting.take_ticket(self.host, self._identity):
            log.error("another agent serves this host", job=job, attempt=number, host=self.host)
            return FENCED
        log.info("serves an attempt", job=job, attempt=number, host=self.host, of=order.hosts)
        watch = AttemptWatch(meeting, self.host, order)
        watch.start()
        try:
            leave = self._attend(meeting, order, watch)
        finally:
            watch.close()
        log.info("leaves the attempt", job=job, attempt=number, status=leave.status, why=leave.why)
        return leave.status

    def _attend(self, meeting: Meeting, order: AgentOrder, watch: AttemptWatch) -> Leave:
        settings = self._settings_of(order)
        handle: Handle | None = None
        self._others, self._lost, self.lingers = [], (), 0.0
        try:
            address, interface = self._address(order)
            self._launcher_for(settings, order, interface).prepare()
            with ExitStack() as opened:
                listener = None
                known: dict[str, object] = {"address": address}
                if self.host == 0:
                    listener = opened.enter_context(_listener(address))
                    known["port"] = listener.getsockname()[1]
                records = self._meet(meeting, order, watch, settings, known)
                self._others = [one.address for one in records if one.host != self.host]
                _check_reach(records[0])
                handle = self._start(meeting, order, records[0], listener)
            watch.running_since = time.monotonic()
            leave = self._watch(handle, watch)
            if leave.status == FAILED and not meeting.is_open():  # the directory is gone
                leave = Leave(FENCED, "the attempt was ended")
        except LeavingError as leaving:
            leave = leaving.leave
        except (TandemError, OSError) as error:
            leave = watch.leave() or self._refuse(meeting, error)
        end = self._clear(settings, handle, leave)
        if leave.status != UNUSABLE:  # writing to an unusable volume may hang
            with suppress(TandemError, OSError):  # raised if the attempt has ended
                meeting.write(self.host, end)
        return leave

    def _settings_of(self, order: AgentOrder) -> Settings:
        """This host's settings, with the values that the runner has chosen for all hosts."""
        decided = {
            "device": order.settings.device,
            "trainer_ranks": order.settings.sizes.world,
            "trainer_hosts": order.hosts,
            "launch": "fork",
        }
        return self.settings.model_copy(update=decided)

    def _address(self, order: AgentOrder) -> tuple[str, str]:
        """The address that this host gives to the other hosts, and its network interface."""
        if order.hosts == 1:
            return network.LOOPBACK, "lo"
        network.check_interface_names()
        return network.host_address(self.settings.host_address)

    def prepare(self) -> None:
        """Start the processes that can be started ahead of an attempt. Ahead of the first attempt,
        the processes are started with options from the settings. Ahead of a later attempt, they are
        started with options from the `AgentOrder` of the previous attempt."""
        if self._launcher is not None:
            self._launcher.prepare()
            return
        order = AgentOrder.of(self.settings, DEFAULT_ENTRY)
        with suppress(TandemError):  # the attempt will report the error
            settings = self._settings_of(order)
            self._launcher_for(settings, order, self._address(order)[1]).prepare()

    def _launcher_for(self, settings: Settings, order: AgentOrder, interface: str) -> Launcher:
        made_for = (order.entry, order.threads, interface, settings)
        if self._launcher is None or self._made_for != made_for:
            self.close()
            defaults = {
                "OMP_NUM_THREADS": str(order.threads),
                "GLOO_SOCKET_IFNAME": interface,
                "NCCL_SOCKET_IFNAME": f"={interface}",
            }
            self._launcher = Launcher(settings, order.entry, self._marker, defaults)
            self._made_for = made_for
        return self._launcher

    def _meet(
        self,
        meeting: Meeting,
        order: AgentOrder,
        watch: AttemptWatch,
        settings: Settings,
        known: dict[str, object],
    ) -> list[HostRecord]:
        """Write this host's record once the host can start ranks, then wait for the other hosts.
        Returns all hosts' records. The agent may first download the base model. Raises
        LeavingError."""
        turn = partial(self._turn, watch)
        devices = Devices(settings, "trainer")
        if devices.uuids and len(devices.uuids) < settings.ranks_per_host:
            problem = f"{len(devices.uuids)} GPUs for {settings.ranks_per_host} ranks"
            raise InvalidInput(problem, field="TANDEM_TRAINER_DEVICES")
        spec = self.spool.jobs.get(meeting.attempt.job)[1].spec
        run = self.spool.runs.get(spec.run)
        model, digest = liveness.in_thread(
            lambda: base_model_digest(resolve_model(self.spool.root, run.base_model)), turn, 0.2
        )
        known |= {
            "gpus": devices.uuids,
            "versions": _versions(),
            "base_model": model,
            "base_files": digest,
            "threads": int(os.environ.get("OMP_NUM_THREADS") or order.threads),
        }
        record = self._record.model_copy(update=known)
        waits = ""
        while devices.busy({}):
            if not waits:
                waits = "its devices are not free"
                meeting.write(self.host, record.model_copy(update={"waits": waits}))
            turn()
            time.sleep(1.0)
        meeting.write(self.host, record)
        while True:
            found = [meeting.record(host) for host in range(order.hosts)]
            there = [one for one in found if one is not None]
            if (error := misfit(there, order)) is not None:
                raise LeavingError(Leave(FAILED, error.message, error))
            if len(there) == order.hosts and not any(one.waits for one in there):
                return there
            turn()
            time.sleep(POLL_SECONDS)

    def _turn(self, watch: AttemptWatch) -> None:
        if (leave := self._must_leave(watch)) is not None:
            raise LeavingError(leave)

    def _must_leave(self, watch: AttemptWatch) -> Leave | None:
        if (leave := watch.leave()) is not None:
            return leave
        if self.stop.requested:
            why = f"host {self.host} ({self._record.name}) was asked to stop (SIGTERM)"
            return Leave(STOPPED, why, JobError(type="preempted", message=why, retriable=True))
        return None

    def _start(
        self,
        meeting: Meeting,
        order: AgentOrder,
        first: HostRecord,
        listener: socket.socket | None,
    ) -> Handle:
        attempt = meeting.attempt
        store = (first.address, first.port)
        launch = Launch(
            root=self.spool.root,
            job=attempt.job,
            attempt=attempt.number,
            settings=order.settings,
            entry=order.entry,
            host=HostPart(number=self.host, hosts=order.hosts, store=store),
        )
        assert self._launcher is not None
        return self._launcher.launch(launch, listener)

    def _watch(self, handle: Handle, watch: AttemptWatch) -> Leave:
        """Wait until the ranks end, or end them if the attempt has to stop."""
        leaving: Leave | None = None
        kill_time = 0.0
        while (status := handle.poll()) is None:
            leave = self._must_leave(watch)
            if leave is not None and leaving is None:
                log.info("ends its ranks", why=leave.why)
                leaving, kill_time = leave, time.monotonic() + TERMINATE_SECONDS
                self._look_at_network()
                handle.terminate()
            if leave is not None and (leave.at_once or time.monotonic() > kill_time):
                return leave if leave.at_once else (leaving or leave)
            time.sleep(POLL_SECONDS)
        if status == 0:
            return Leave(DONE, "the ranks are done")
        self._look_at_network()
        # Slurm sends SIGTERM to the ranks, too, so ranks may end before the agent sees the signal.
        return leaving or self._must_leave(watch) or Leave(FAILED, "ranks failed")

    def _look_at_network(self) -> None:
        """The network is measured while the ranks' connections still exist."""
        with suppress(OSError, ValueError):
            self._lost = self._lost or tuple(network.lost_data(self._others).values())

    def _refuse(self, meeting: Meeting, error: TandemError | OSError) -> Leave:
        """Writes into this host's record why this host can't train. All other hosts read the
        record."""
        if isinstance(error, FileNotFoundError) and not meeting.is_open():
            return Leave(FENCED, "the attempt was ended")
        if isinstance(error, SpoolUnusable):
            return Leave(UNUSABLE, str(error))
        refused = JobError(type="launch_failed", message=str(error), retriable=True)
        if isinstance(error, TandemError):
            update = {"type": error.code, "retriable": error.retriable}
            refused = refused.model_copy(update=update)
        with suppress(TandemError, OSError):
            meeting.write(self.host, self._record.model_copy(update={"refused": refused}))
        return Leave(FAILED, str(error), refused)

    def _clear(self, settings: Settings, handle: Handle | None, leave: Leave) -> HostEnd:
        """Kill the rank processes that are still alive. Returns the record of the ranks' end, with
        the bytes that are still in use on the devices."""
        left = [] if handle is None else handle.kill_all(KILL_SECONDS)
        begin, used, free = time.monotonic(), dict[str, int | None](), False
        with suppress(TandemError):
            devices = Devices(settings, "trainer")
            used = devices.wait_free(RELEASE_SECONDS, {})
            free = not devices.over(used, {})
        clean = leave.status == DONE and free and not left
        # The pods stay only if the agent has run for less than `start_seconds` so far. After a
        # longer time, the pod's own deadline could end the next attempt too early.
        if clean and time.monotonic() - self._begin < self.settings.start_seconds:
            self.lingers = self.linger_seconds
        return HostEnd(
            status=leave.status,
            error=leave.error,
            processes=len(left),
            devices=used,
            seconds=time.monotonic() - begin,
            network=self._lost,
            lingers=self.lingers,
        )

    def follow(self) -> int:
        """Serve the attempts of the spool, one after the other, until SIGTERM; returns the exit
        status."""
        log.info("waits for attempts", spool=self.spool.root, host=self.host)
        problem = ""
        while not self.stop.requested:
            try:
                if (found := self.next_attempt()) is not None:
                    if self.serve(*found) == UNUSABLE:
                        return UNUSABLE
                    self.prepare()
                elif self._launcher is None:
                    self.prepare()
                problem = ""
            except (TandemError, OSError) as error:
                if str(error) != problem:
                    problem = str(error)
                    log.error("can't look for attempts; trying again", error=error)
            time.sleep(FOLLOW_SECONDS)
        return DONE

    def next_attempt(self) -> tuple[str, int] | None:
        """An attempt that this agent may serve, and that has no agent for this host yet."""
        for key in self.spool.jobs.index.running():
            _, job = self.spool.jobs.get(key.id)
            meeting = Meeting(Attempt(self.spool, key.id, job.attempt))
            order = meeting.order()
            if order is None or order.pods != self.pods or self.host >= order.hosts:
                continue
            if meeting.has_ticket(self.host):
                continue
            return key.id, job.attempt
        return None

    def close(self) -> None:
        if self._launcher is not None:
            self._launcher.close()
            shutil.rmtree(self._launcher.scratch, ignore_errors=True)
            self._launcher = None


def _listener(address: str) -> socket.socket:
    """The socket of the ranks' store, bound only to the address that the other hosts use."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=1024)


def _check_reach(first: HostRecord) -> None:
    """Raises LeavingError if this host can't reach the ranks' store. Without this check torch would
    wait long, and torch's error would not name the address."""
    try:
        socket.create_connection((first.address, first.port), CONNECT_SECONDS).close()
    except OSError as error:
        why = f"can't reach {first} at port {first.port}: {error}"
        refused = JobError(type="launch_failed", message=why, retriable=True)
        raise LeavingError(Leave(FAILED, why, refused)) from error


def _versions() -> dict[str, str]:
    packages = ("torch", "megatron-core", "numpy", "safetensors")
    return {
        "Tandem": tandem.__version__,
        "Python": platform.python_version(),
        **{name: installed_version(name) for name in packages},
    }
