"""An agent process stays after its attempt has ended. The agent then serves the next attempt, or
exits if no order for a next attempt comes."""

import threading
import time
from pathlib import Path

import pytest

from spool.spool_tools import add_run, spool_with_run, start
from tandem.config import Settings
from tandem.spool.attempt import Attempt
from tandem.trainer.agent import agent as agent_module
from tandem.trainer.agent import lingering
from tandem.trainer.agent.agent import HostAgent
from tandem.trainer.agent.hosts import DONE, FAILED, STOPPED, AgentOrder, HostEnd, Meeting
from tandem.trainer.agent.lingering import serve_and_linger
from tandem.trainer.agent.watch import Leave
from tandem.trainer.stop import Stop

SETTINGS = Settings(executor="kubernetes", device="cpu")


class Scripted(HostAgent):
    """An agent whose attempts end with the statuses of `script`. Further attempts end with the last
    status."""

    def script(self, *statuses: int) -> None:
        self.statuses, self.served = list(statuses), list[tuple[str, int]]()

    def serve(self, job: str, number: int, hosts: int | None = None) -> int:
        self.served.append((job, number))
        assert Meeting(Attempt(self.spool, job, number)).take_ticket(0, "mine")
        self.lingers = self.linger_seconds
        return self.statuses[min(len(self.served), len(self.statuses)) - 1]

    def prepare(self) -> None: ...


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """An agent in the pods of Job `a` in namespace `ns`. The first attempt of the job `first` has
    an order."""
    monkeypatch.setattr(lingering, "TAKE_SECONDS", 0.3)
    agent = Scripted(SETTINGS, spool_with_run(tmp_path / "spool"), 0, Stop())
    agent.pods, agent.linger_seconds = "ns/a", 0.7
    agent.script(DONE)
    give(agent, "first", "")
    return agent


def give(agent: HostAgent, name: str, pods: str) -> None:
    """Starts the job `name`, and gives its first attempt an order for `pods`."""
    if name != "first":
        add_run(agent.spool, name)
    start(agent.spool, name, "r" if name == "first" else name)
    order = AgentOrder.of(SETTINGS, "entry").model_copy(update={"pods": pods})
    Meeting(Attempt(agent.spool, name, 1)).give_order(order)


@pytest.mark.parametrize("pods", ["", "ns/b", "other/a", "/a", "a"])
def test_orders_of_other_pods_are_left_to_them(agent: Scripted, pods: str) -> None:
    give(agent, "foreign", pods)
    begin = time.monotonic()
    assert serve_and_linger(agent, "first", 1, 1) == DONE
    assert time.monotonic() - begin >= 1.0, "it stays for its seconds, and for a late order"
    assert agent.served == [("first", 1)]
    assert not Meeting(Attempt(agent.spool, "foreign", 1)).has_ticket(0)


def test_it_serves_its_own_orders_until_one_fails(agent: Scripted) -> None:
    agent.script(DONE, DONE, FAILED)
    for name in ("second", "third"):
        give(agent, name, "ns/a")
    assert serve_and_linger(agent, "first", 1, 1) == FAILED
    assert agent.served[0] == ("first", 1)
    assert {job for job, _ in agent.served} == {"first", "second", "third"}


def test_without_linger_it_leaves_at_once(agent: Scripted) -> None:
    agent.linger_seconds = 0.0
    give(agent, "second", "ns/a")
    assert serve_and_linger(agent, "first", 1, 1) == DONE
    assert agent.served == [("first", 1)]


@pytest.mark.parametrize("volume", ["answers", "hangs", "fails"])
@pytest.mark.parametrize("stopped", [True, False])
def test_it_leaves_in_time_whatever_the_volume_does(
    agent: Scripted, volume: str, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an agent was asked to leave, its exit status must not count as success for Kueue."""

    def look() -> None:
        if volume == "hangs":
            time.sleep(60)
        raise OSError

    if volume != "answers":
        monkeypatch.setattr(agent, "next_attempt", look)
    if stopped:
        agent.linger_seconds = 600.0
        threading.Timer(0.5, agent.stop.request).start()
    begin = time.monotonic()
    assert serve_and_linger(agent, "first", 1, 1) == (STOPPED if stopped else DONE)
    assert time.monotonic() - begin < 10


class Ranks:
    """The handle of ranks that have ended. `left`: the number of processes that survive."""

    def __init__(self, left: int) -> None:
        self.left = left

    def kill_all(self, _timeout: float) -> list[int]:
        return [1] * self.left


@pytest.mark.parametrize(
    ("what", "status", "left", "used", "age", "stays"),
    [
        ("all is well", DONE, 0, 0, 0.0, True),
        ("its ranks failed", FAILED, 0, 0, 0.0, False),
        ("a process survives", DONE, 1, 0, 0.0, False),
        ("a GPU is not free", DONE, 0, 2**40, 0.0, False),
        ("a GPU does not answer", DONE, 0, None, 0.0, False),
        ("its pod's deadline comes near", DONE, 0, 0, SETTINGS.start_seconds, False),
    ],
)
def test_it_stays_only_with_free_gpus_and_time(
    agent: Scripted, monkeypatch, what, status, left, used, age, stays
) -> None:
    monkeypatch.setattr(agent_module, "RELEASE_SECONDS", 0.0)
    monkeypatch.setattr(agent_module.Devices, "used", lambda _: {"GPU-a": used})
    agent._begin -= age
    end = agent._clear(SETTINGS, Ranks(left), Leave(status, what))  # type: ignore[arg-type]
    assert end.lingers == agent.lingers == (0.7 if stays else 0.0), what


def test_records_without_linger_are_those_of_before() -> None:
    assert "pods" not in AgentOrder.of(SETTINGS, "entry").model_dump()
    assert "lingers" not in HostEnd(status=DONE).model_dump()
