"""The records on the volume by which the hosts of an attempt find each other. The tests start no
ranks. The tests cover missing hosts, hosts that differ, lost hosts, and the address in a host's
record."""

import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from agent.namespaces import ADDRESSES, ROUTED, done, inside, routed_hosts, two_hosts, within
from spool.spool_tools import spool_with_run, start
from tandem.config import Settings
from tandem.errors import InvalidInput
from tandem.families.model_config import base_model_digest
from tandem.spool import fence
from tandem.spool.attempt import Attempt
from tandem.spool.schema import JobError
from tandem.system import network
from tandem.trainer.agent import agent
from tandem.trainer.agent.__main__ import host_index
from tandem.trainer.agent.agent import LeavingError, _check_reach, _listener
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
from tandem.trainer.executor import Ended, Order, Running, Waiting, agents
from tandem.trainer.executor.agents import AgentsExecution
from tandem.trainer.executor.hosts import HostsExecutor
from tandem.trainer.stop import Stop

HOSTS = 3
SETTINGS = Settings(
    executor="hosts", trainer_hosts=HOSTS, trainer_ranks=HOSTS, device="cpu", start_seconds=900
)
ORDER = AgentOrder.of(SETTINGS, "entry")


def record(host: int, **fields: object) -> HostRecord:
    known = {"address": f"10.0.0.{host}", "threads": ORDER.threads, "base_files": "same"}
    return HostRecord(host=host, name=f"machine-{host}", pid=1, **(known | fields))


class Clock:
    """A clock that takes the place of the module `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Hosts:
    """The runner's side of an attempt. The test writes the records that agents would write."""

    def __init__(self, root: Path, clock: Clock) -> None:
        self.spool, self.clock = spool_with_run(root), clock
        job = start(self.spool, "j")
        self.attempt = Attempt(self.spool, "j", 1)
        self.meeting = Meeting(self.attempt)
        self.said: list[str] = []  # the lines for the job's log
        self.order = Order(job, self.attempt, lambda: None, self.said.append, lambda *_: None)
        self.execution = self.runner()
        self._beats = 0

    def runner(self) -> AgentsExecution:
        return HostsExecutor(SETTINGS, "entry", Stop()).start(self.order)

    def poll(self, seconds: float = 1.0, *, beating: range = range(0)) -> Running | Waiting | Ended:
        """Advances the clock by `seconds`. The hosts `beating` write a heartbeat in each second.
        Returns the execution's state after the last second."""
        for _ in range(int(seconds)):
            self.clock.now += 1
            self._beats += 1
            for host in beating:
                self.meeting.write(host, HostBeat(count=self._beats, seconds=None))
            state = self.execution.poll()
        return state

    def arrive(self, *hosts: int) -> None:
        for host in hosts:
            self.meeting.write(host, record(host))


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    clock = Clock()
    monkeypatch.setattr(agents, "time", clock)
    return Hosts(tmp_path, clock)


def test_missing_hosts_are_named_until_all_are_there(hosts: Hosts) -> None:
    hosts.arrive(0)
    waits = record(2, waits="its devices are not free")
    hosts.meeting.write(2, waits)
    reason = (
        "host 1 of 3 has not arrived; host 2 (machine-2, 10.0.0.2) waits: its devices are not free"
    )
    assert hosts.poll(500) == Waiting(reason)
    hosts.arrive(1, 2)
    assert hosts.poll() == Running(0.0)


def test_hosts_that_never_arrive_end_the_attempt_after_start_seconds(hosts: Hosts) -> None:
    hosts.arrive(0)
    assert isinstance(hosts.poll(899), Waiting)
    ended = hosts.poll(3)
    assert isinstance(ended, Ended)
    assert ended.error is not None
    assert (ended.error.type, ended.error.retriable) == ("launch_failed", True)
    assert ended.error.message == (
        "not all hosts were there after 900 s: host 1 of 3 has not arrived; host 2 of 3 has not"
        " arrived"
    )
    begin = hosts.clock.now
    hosts.execution.kill()
    assert hosts.clock.now == begin  # `kill` returns without waiting for the hosts


def test_a_new_runner_finds_the_attempt_and_how_long_its_ranks_have_run(hosts: Hosts) -> None:
    hosts.arrive(0, 1, 2)
    assert HostsExecutor(SETTINGS, "entry", Stop()).adopts(hosts.attempt)
    other = SETTINGS.model_copy(update={"trainer_ranks": 2 * HOSTS})
    assert not HostsExecutor(other, "entry", Stop()).adopts(hosts.attempt)
    hosts.meeting.write(1, HostBeat(count=7, seconds=42.0))
    assert hosts.runner().poll() == Running(42.0)
    fence.mark(hosts.attempt.work).touch()
    assert not HostsExecutor(SETTINGS, "entry", Stop()).adopts(hosts.attempt)


def test_a_host_without_a_sign_of_life_is_lost(hosts: Hosts) -> None:
    hosts.arrive(0, 1, 2)
    assert hosts.poll(5, beating=range(3)) == Running(0.0)
    ended = hosts.poll(SETTINGS.lease_seconds + 2, beating=range(2))
    assert isinstance(ended, Ended)
    assert ended.error is not None
    assert ended.error.type == "host_lost"
    assert "no sign of host 2 (machine-2, 10.0.0.2)" in ended.error.message


def test_while_the_volume_is_away_nobody_is_lost(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.arrive(0, 1, 2)
    assert hosts.poll(5, beating=range(3)) == Running(0.0)
    with monkeypatch.context() as patch:

        def gone(*_: object) -> None:
            raise OSError("stale")

        patch.setattr(Meeting, "beat", gone)
        assert hosts.poll(1000) == Running(0.0)
    assert hosts.poll(30) == Running(0.0)


def test_a_volume_that_kept_all_waiting_makes_nobody_lost(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow volume delays the agents as well as the runner. After the delay the runner may read
    the records before the agents write their next heartbeats."""
    hosts.arrive(0, 1, 2)
    assert hosts.poll(5, beating=range(3)) == Running(0.0)
    with monkeypatch.context() as patch:
        read = Meeting.beat

        def late(meeting: Meeting, host: int) -> HostBeat | None:
            hosts.clock.now += SETTINGS.lease_seconds
            return read(meeting, host)

        patch.setattr(Meeting, "beat", late)
        assert hosts.poll() == Running(0.0)
    assert hosts.poll(5) == Running(0.0)
    ended = hosts.poll(SETTINGS.lease_seconds + 2, beating=range(2))
    assert isinstance(ended, Ended)
    assert ended.error is not None
    assert ended.error.message.startswith("no sign of host 2 (")


def test_the_error_of_a_host_goes_before_the_ranks_of_others_and_a_lost_host(hosts: Hosts) -> None:
    hosts.arrive(0, 1, 2)
    hosts.poll(5, beating=range(3))
    hosts.meeting.write(0, HostEnd(status=FAILED))
    # The attempt still runs after one host has failed, because other hosts may report the cause
    # later.
    assert hosts.poll(5, beating=range(1, 3)) == Running(0.0)
    error = JobError(type="preempted", message="host 1 was stopped", retriable=True)
    devices = {"GPU-1": 5, "GPU-2": None}
    lost = "TCP to 10.0.0.2 was sent again"
    hosts.meeting.write(1, HostEnd(status=75, error=error, devices=devices, network=(lost,)))
    ended = hosts.poll(12)
    assert isinstance(ended, Ended)
    assert (ended.status, ended.error) == (1, error)
    assert hosts.said == [f"host 1 (machine-1, 10.0.0.1): {lost}"]
    ((kind, released),) = hosts.execution.give_back()
    assert (kind, released["bytes"], released["unmeasured"]) == ("released", None, [2])


def test_all_hosts_end_with_0(hosts: Hosts) -> None:
    hosts.arrive(0, 1, 2)
    for host in range(HOSTS):
        assert isinstance(hosts.poll(), Running)
        hosts.meeting.write(host, HostEnd(status=DONE, devices={f"GPU-{host}": host}))
    assert hosts.poll() == Ended(0)
    ((_, released),) = hosts.execution.give_back()
    assert released["bytes"] == 3
    assert "unmeasured" not in released


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"versions": {"torch": "2.11"}}, "torch none and 2.11; use the same image"),
        ({"base_files": "other"}, "the base model's files in  and  are not the same"),
        ({"gpus": ("GPU-1",)}, "0 and 1 GPUs; give all hosts as many"),
        ({"threads": 99}, f"OMP_NUM_THREADS={ORDER.threads} and 99"),
    ],
)
def test_hosts_that_differ_are_both_named(fields: dict[str, object], words: str) -> None:
    error = misfit([record(0), record(1, **fields)], ORDER)
    assert error is not None
    assert (error.type, error.retriable) == ("hosts_differ", False)
    assert error.message.startswith("host 0 (machine-0, 10.0.0.0) and host 1 (machine-1, 10.0.0.1)")
    assert words in error.message


def test_hosts_that_fit() -> None:
    assert misfit([record(host, gpus=(f"GPU-{host}",)) for host in range(HOSTS)], ORDER) is None
    error = misfit([record(host, gpus=("GPU-0",)) for host in range(2)], ORDER)
    assert error is not None
    assert "host 1 (machine-1, 10.0.0.1) both have GPU-0" in error.message
    error = misfit([record(host, threads=77) for host in range(HOSTS)], ORDER)
    assert error is not None
    assert "host 0 (machine-0, 10.0.0.0) has OMP_NUM_THREADS=77, the runner" in error.message
    refused = JobError(type="invalid_input", message="no such model")
    error = misfit([record(1, refused=refused)], ORDER)
    assert error is not None
    assert error.message == "host 1 (machine-1, 10.0.0.1): no such model"


def test_a_ticket_is_taken_once(hosts: Hosts) -> None:
    assert hosts.meeting.take_ticket(1, "first")
    assert not hosts.meeting.take_ticket(1, "second")
    assert hosts.meeting.has_ticket(1)
    assert not hosts.meeting.has_ticket(0)
    fence.end(hosts.attempt.work)
    assert not hosts.meeting.take_ticket(0, "late")
    assert hosts.meeting.order() is None
    with pytest.raises(FileNotFoundError):
        hosts.meeting.write(0, HostEnd(status=DONE))
    assert not hosts.attempt.work.exists()


def test_the_same_files_have_the_same_digest(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
        (tmp_path / name / "README.md").write_text(f"what {name} downloaded does not count")
    one, two = (base_model_digest(str(tmp_path / name)) for name in "ab")
    assert (one[0], one[1]) == (str(tmp_path / "a"), two[1])
    (tmp_path / "b" / "model.safetensors").write_bytes(b"Weights")
    assert base_model_digest(str(tmp_path / "b"))[1] != one[1]


def test_a_host_knows_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JOB_COMPLETION_INDEX", "SLURM_PROCID", "TANDEM_HOST_INDEX"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidInput, match="JOB_COMPLETION_INDEX or SLURM_PROCID or TANDEM"):
        host_index(None)
    for number, name in enumerate(("TANDEM_HOST_INDEX", "SLURM_PROCID", "JOB_COMPLETION_INDEX")):
        monkeypatch.setenv(name, str(number))
        assert host_index(None) == number
    assert host_index(5) == 5
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "one")
    with pytest.raises(InvalidInput, match="JOB_COMPLETION_INDEX: 'one'"):
        host_index(None)


def test_an_address_is_chosen_without_a_name_and_a_wrong_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_names(*_: object) -> None:
        raise AssertionError("a name is looked up")

    known = [("lo", "127.0.0.1"), ("eth0", "10.0.0.7"), ("ib0", "10.1.0.7"), ("eth0", "fd00::7")]
    monkeypatch.setattr(network, "interface_addresses", lambda: known)
    monkeypatch.setattr(network, "_ELSEWHERE", ())
    monkeypatch.setattr(socket, "gethostname", no_names)
    assert network.host_address(None) == ("10.0.0.7", "eth0")
    with monkeypatch.context() as patch:
        patch.setattr(network, "_ELSEWHERE", ("192.0.2.1",))
        patch.setattr(network, "own_address", lambda _: "10.1.0.7")
        assert network.host_address(None) == ("10.1.0.7", "ib0")
    assert network.host_address("10.1.0.7") == ("10.1.0.7", "ib0")
    assert network.host_address("fd00:0::7") == ("fd00::7", "eth0")
    with pytest.raises(
        InvalidInput, match=r"TANDEM_HOST_ADDRESS: 10\.9\.9\.9 is not .*10\.1\.0\.7"
    ):
        network.host_address("10.9.9.9")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth")
    network.check_interface_names()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(InvalidInput, match=r"GLOO_SOCKET_IFNAME: eth7 .* has eth0, ib0, lo"):
        network.check_interface_names()


@pytest.mark.parametrize("six", [False, True])
def test_a_host_without_a_way_elsewhere_has_the_address_of_its_cable(six: bool) -> None:
    program = "from tandem.system import network; print(*network.host_address(None))"
    with two_hosts(six=six) as names:
        found = [
            subprocess.run(
                [*inside(name), sys.executable, "-c", program],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split()
            for name in names
        ]
    addresses = ("fd77::1", "fd77::2") if six else ADDRESSES
    assert found == [[address, "eth0"] for address in addresses]


def test_a_store_that_nobody_reaches_is_named_with_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        _check_reach(record(0, address="127.0.0.1", port=port))
    with pytest.raises(LeavingError, match=rf"can't reach host 0 .*at port {port}: .*refused"):
        _check_reach(record(0, address="127.0.0.1", port=port))


def test_a_store_whose_port_is_silent_is_named_with_its_address_and_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent, "CONNECT_SECONDS", 0.5)
    with routed_hosts() as net, within(net.hosts[0], lambda: _listener(ROUTED[0])) as store:
        port = store.getsockname()[1]
        first = record(0, address=ROUTED[0], port=port)
        within(net.hosts[1], lambda: _check_reach(first))
        with net.silence(f"tcp dport {port}"):
            with pytest.raises(LeavingError, match=rf"{ROUTED[0]}\) at port {port}: timed out"):
                within(net.hosts[1], lambda: _check_reach(first))
            assert net.counted()


def test_the_stores_port_is_open_on_the_hosts_own_address_alone_and_to_everybody_there() -> None:
    """Only the network's own rules keep other hosts away from the store's port, as
    docs/topologies.md says."""
    with routed_hosts() as net:
        host, third = net.hosts[0], net.router
        done(f"ip -n {host} addr add 10.231.79.1/24 dev eth0")
        done(f"ip -n {third} route add 10.231.79.0/24 via {ROUTED[0]}")
        with within(host, lambda: _listener(ROUTED[0])) as store:
            port = store.getsockname()[1]

            def answers(address: str) -> str:
                try:
                    socket.create_connection((address, port), 1).close()
                except OSError as error:
                    return type(error).__name__
                return "open"

            assert within(third, lambda: answers(ROUTED[0])) == "open"
            assert within(third, lambda: answers("10.231.79.1")) == "ConnectionRefusedError"
            assert within(host, lambda: answers("127.0.0.1")) == "ConnectionRefusedError"
            with net.silence(f"tcp dport {port}", chain="output"):
                assert within(third, lambda: answers(ROUTED[0])) == "TimeoutError"


def test_what_the_network_loses_is_named_with_the_mtu() -> None:
    """The network passes small packets and drops large packets."""
    with routed_hosts() as net, within(net.hosts[0], lambda: _listener(ROUTED[0])) as store:
        address = store.getsockname()
        connect = partial(socket.create_connection, address, 5)
        with within(net.hosts[1], connect) as end, store.accept()[0] as other:

            def sent(size: int, seconds: float) -> bool:
                end.sendall(b"x" * size)
                until = time.monotonic() + seconds
                while size > 0 and (left := until - time.monotonic()) > 0:
                    other.settimeout(left)
                    with suppress(TimeoutError):
                        size -= len(other.recv(size))
                return size == 0

            def lost() -> dict[str, str]:
                return within(net.hosts[1], lambda: network.lost_data(ROUTED))

            assert sent(100_000, seconds=30)
            with net.narrow(1300):
                assert sent(1000, seconds=30)
                assert not sent(20_000, seconds=0.5)
                for _ in range(100):
                    if found := lost():
                        break
                    time.sleep(0.1)
                assert list(found) == [ROUTED[0]]
                assert f"`ping -M do -s 1472 {ROUTED[0]}` tells" in found[ROUTED[0]]


@pytest.mark.parametrize(
    ("digits", "address"),
    [
        ("0100007F", "127.0.0.1"),
        ("0000000000000000FFFF00000100007F", "127.0.0.1"),
        ("000080FE000000000000000001000000", "fe80::1"),
    ],
)
def test_addresses_of_the_kernels_tables(digits: str, address: str) -> None:
    assert str(network._address(digits)) == address
