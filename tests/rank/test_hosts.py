"""Real ranks on two hosts that share only the spool. A host is a network namespace with an agent.
The runner and each agent have clocks of their own. In some tests the network between the hosts is
bad, or the runner dies."""

import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.agent_stack import AgentStack
from agent.namespaces import ROUTED, Routed, inside, routed_hosts, within
from rank import jobs
from tandem.spool.attempt import Attempt
from tandem.spool.schema import JobError
from tandem.trainer.launch import DEFAULT_ENTRY

pytestmark = pytest.mark.sample(1, of="processes of jobs")

HUB_NAME = "tandem-tests/tiny"
TOPOLOGIES = sorted(jobs.TOPOLOGIES)
DEFAULT = {"dp", "tp"}
ORDERS = {"epochs": 2, "grad_accumulation_sequences": 2}
LONG = ORDERS | {"epochs": 100}
STALL_SECONDS = 20.0


@dataclass(frozen=True)
class Fault:
    """A fault of the network between the hosts. `begin` starts the fault; its arguments are the
    network and the port of the ranks' store."""

    begin: Callable[[Routed, int], AbstractContextManager[None]]
    before: bool = False
    """Whether the fault begins as soon as the hosts have met, before the ranks' first step."""
    lost: bool = True
    """Whether the kernel still knows the data that it has sent in vain, so that the job's log names
    the loss."""


FAULTS = {
    "cable": Fault(lambda net, _: net.cut(), lost=False),
    "data": Fault(lambda net, port: net.silence(f"tcp dport != {port} tcp sport != {port}")),
    "mtu": Fault(lambda net, _: net.narrow(1300), before=True),
}
PACES: dict[str, tuple[Callable[[Routed], AbstractContextManager[None]], float]] = {
    "8 Mbit/s": (lambda net: net.slow("8mbit"), 0.9),
    "50 ms": (lambda net: net.far(0.05), 0.2),
}
"""Networks that are slow or long, with the seconds that a megabyte takes there at least."""
CLOCKS = ("86400", "-7200")
"""The difference of each host's clock from the runner's clock, in seconds."""


def hub_cache(directory: Path, model: Path) -> Path:
    """A cache of the hub's files in which `HUB_NAME` is `model`."""
    revision = directory / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    (revision / "refs").mkdir(parents=True)
    (revision / "refs" / "main").write_text("0" * 40)
    shutil.copytree(model, revision / "snapshots" / ("0" * 40))
    return directory


class NetStack(AgentStack):
    net: Routed

    def long_job(self, model: Path, run: str) -> str:
        jobs.make_run(self.spool, model, run)
        self.environment |= jobs.TOPOLOGIES["dp"].variables()
        self.start()
        return jobs.submit_sft(self.spool, run, run, **LONG)

    def until_training(self, job_id: str) -> None:
        attempt = Attempt(self.spool, job_id, 1)

        def trains() -> bool:
            beats = attempt.beats()
            return len(beats) == 2 and all(beat.step > 2 for beat in beats.values())

        self.until(trains, "the first steps")

    def error(self, job_id: str) -> JobError:
        """Waits until the job's first attempt has ended in an error. Returns the error."""
        error = self.until(lambda: self.spool.jobs.get(job_id)[1].last_error, "its end")
        assert error is not None
        return error

    def until_same(self, job_id: str, attempt: int, wanted: Path) -> None:
        """Waits until the job succeeds in the attempt number `attempt`, and ends the runner. The
        job's checkpoint must have the same bytes as `wanted`."""
        state, job = self.wait(job_id)
        assert (state, job.attempt) == ("succeeded", attempt), self.job_log(job_id)
        assert self.stop() == 0
        assert jobs.same_bytes(wanted, self.spool.checkpoints.path(job.spec.run, 1))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[NetStack]:
    """Two hosts with an agent each. Each host has the base model in a hub cache of its own."""
    directory = tmp_path_factory.mktemp("hosts")
    with routed_hosts() as net:
        stack = NetStack(
            directory / "spool",
            entry=DEFAULT_ENTRY,
            TANDEM_HOST_ADDRESS="",
            HF_HUB_OFFLINE="1",
            HF_HOME=str(hub_cache(directory / "runner", model)),
        )
        try:
            stack.net = net
            for host, name in enumerate(net.hosts):
                stack.prefixes[host] = inside(name)
                cache = hub_cache(directory / name, model)
                own = {"HF_HOME": str(cache), "TEST_CLOCK_SECONDS": CLOCKS[host]}
                stack.agents[host] = stack.start_agent(host, **own)
            yield stack
        finally:
            stack.close()


@pytest.fixture(scope="module")
def alone(stack: NetStack, model: Path, request: pytest.FixtureRequest) -> dict[str, Path]:
    """Topology -> the checkpoint that two ranks of one host make."""
    wanted = TOPOLOGIES if request.config.option.all_cases else sorted(DEFAULT)
    experts = jobs.make_model(model.with_name("experts"), "qwen3_moe") if "ep" in wanted else None
    for name in wanted:
        base = experts if name == "ep" else None
        for run in ("one", "two"):
            own = str(base or (model if run == "one" else HUB_NAME))
            jobs.make_run(stack.spool, base or model, f"{name}-{run}", base_model=own)
        jobs.submit_sft(stack.spool, f"{name}-one", f"{name}-one", **ORDERS)
    topologies = {f"{name}-one": name for name in wanted}
    if request.config.option.all_cases:
        jobs.make_run(stack.spool, model, "long-one")
        topologies[jobs.submit_sft(stack.spool, "long-one", "long-one", **LONG)] = "dp"
    made = jobs.run_two_ranks(stack.spool, topologies)
    return {job_id.removesuffix("-one"): checkpoint for job_id, (checkpoint, _) in made.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_two_hosts_train_what_one_host_trains(
    stack: NetStack, alone: dict[str, Path], name: str
) -> None:
    if name not in alone:
        pytest.skip("runs with --all-cases")
    sizes = jobs.TOPOLOGIES[name]
    stack.environment |= sizes.variables()
    stack.start()
    job_id = jobs.submit_sft(stack.spool, f"{name}-two", f"{name}-two", **ORDERS)
    addresses = stack.until(lambda: stack.addresses(job_id), "both hosts' records")
    state, job = stack.wait(job_id)
    assert (state, job.attempt) == ("succeeded", 1), stack.job_log(job_id)
    assert stack.stop() == 0
    assert addresses == ROUTED
    assert jobs.same_bytes(alone[name], stack.spool.checkpoints.path(f"{name}-two", 1))
    assert stack.event(job_id, "started")["topology"]["world_size"] == 2
    assert stack.event(job_id, "released")["hosts"].keys() == {"0", "1"}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_network_that_fails_is_noticed_and_the_next_attempt_makes_the_same_bytes(
    stack: NetStack,
    alone: dict[str, Path],
    model: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hosts get no message about the fault, and both agents still reach the volume."""
    if "long" not in alone:
        pytest.skip("runs with --all-cases")
    monkeypatch.setattr(jobs, "STALL_SECONDS", STALL_SECONDS)
    fault = FAULTS[name]
    job_id = stack.long_job(model, f"{name}-fails")
    stack.until(lambda: stack.addresses(job_id), "both hosts' records")
    first = stack.meeting(job_id).record(0)
    assert first is not None
    if not fault.before:
        stack.until_training(job_id)
    begin = time.monotonic()
    with fault.begin(stack.net, first.port):
        error = stack.error(job_id)
        assert name == "cable" or stack.net.counted()
    assert error.type in ("rank_hung", "rank_error"), error.message
    # If the fault begins before the first step, the ranks have not sent a message yet. So the test
    # does not limit the time until the error if a fault begins before the first step.
    assert fault.before or time.monotonic() - begin < STALL_SECONDS + 20
    stack.until_same(job_id, 2, alone["long"])
    log = stack.job_log(job_id)
    told = any(f"`ping -M do -s 1472 {address}` tells" in log for address in ROUTED)
    assert told or not fault.lost, log


@pytest.mark.slow
def test_a_store_whose_port_is_silent_ends_the_meeting(
    stack: NetStack, alone: dict[str, Path], model: Path
) -> None:
    if "long" not in alone:
        pytest.skip("runs with --all-cases; tests/agent/test_hosts_meet.py has an agent's part")
    stack.signal_host(1, signal.SIGSTOP)
    try:
        job_id = stack.long_job(model, "store-fails")
        first = stack.until(lambda: stack.meeting(job_id).record(0), "host 0's record")
    except BaseException:
        stack.signal_host(1, signal.SIGCONT)
        raise
    with stack.net.silence(f"tcp dport {first.port}"):
        stack.signal_host(1, signal.SIGCONT)
        error = stack.error(job_id)
    assert error.type == "launch_failed"
    assert f"can't reach {first} at port {first.port}: timed out" in error.message
    assert ROUTED[0] in error.message
    stack.until_same(job_id, 2, alone["long"])


@pytest.mark.slow
@pytest.mark.parametrize("name", PACES)
def test_a_slow_or_long_way_makes_nobody_silent(
    stack: NetStack,
    alone: dict[str, Path],
    model: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "long" not in alone:
        pytest.skip("runs with --all-cases")
    monkeypatch.setattr(jobs, "STALL_SECONDS", STALL_SECONDS)
    begin, fewest = PACES[name]
    with begin(stack.net):
        assert seconds_of_a_megabyte(stack.net) >= fewest
        job_id = stack.long_job(model, f"way-{fewest}")
        stack.until_same(job_id, 1, alone["long"])
    times = {event.type: event.time for event in stack.spool.events.read(job_id)}
    print(f"{name}: {times['checkpoint'] - times['loaded']:.1f} s of steps")


def seconds_of_a_megabyte(net: Routed) -> float:
    """The seconds in which host 1 connects to host 0, sends a megabyte and gets host 0's reply."""
    with within(net.hosts[0], lambda: socket.create_server((ROUTED[0], 0))) as server:
        address = server.getsockname()
        begin = time.monotonic()
        with within(net.hosts[1], lambda: socket.create_connection(address, 30)) as end:
            other, _ = server.accept()
            with other, ThreadPoolExecutor(1) as sender:
                sender.submit(end.sendall, bytes(10**6))
                other.settimeout(60)
                left = 10**6
                while left:
                    left -= len(other.recv(left))
                other.sendall(b"1")
                assert end.recv(1) == b"1"
    return time.monotonic() - begin


@pytest.mark.slow
def test_ranks_train_on_while_runners_are_killed(
    stack: NetStack, alone: dict[str, Path], model: Path
) -> None:
    if "long" not in alone:
        pytest.skip("runs with --all-cases; tests/agent/test_agents.py has ranks that do nothing")
    job_id = stack.long_job(model, "killed")
    stack.until_training(job_id)
    for kill in range(5):
        stack.kill()
        stack.forget()
        time.sleep(kill / 10)
        stack.start()
        stack.until_logged("adopted")
    stack.until_same(job_id, 1, alone["long"])
    kinds = stack.kinds(job_id)
    assert kinds.count("claimed") == kinds.count("succeeded") == kinds.count("released") == 1
