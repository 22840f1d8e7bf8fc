"""Two ranks, under the real torchrun and forked: whoever is killed, everything ends and the reason is named."""

import os
import re
import signal
from pathlib import Path

import pytest

from runner.runner_stack import Stack
from tandem.system import processes
from tandem.trainer.launch import SHUTDOWN_SECONDS

pytestmark = pytest.mark.slow


LAUNCHES = ["torchrun", "fork"]
WAITS = {"stays": {"do": "one_dies_one_stays", "stall": 60}, "stubborn": {"do": "stubborn", "stall": 8}}


@pytest.fixture(scope="module")
def waits(tmp_path_factory):
    """(launch, name) -> a stack and its job whose end takes long; it comes while other tests run."""
    found = {}
    try:
        for launch in LAUNCHES:
            for name, orders in WAITS.items():
                stack = Stack(tmp_path_factory.mktemp(launch), launch, ranks=2)
                found[launch, name] = stack, stack.submit(stack.run(name), attempts=1, **orders)
                stack.start()
        yield found
    finally:
        for stack, _ in found.values():
            print(stack.log.read_text())
            stack.close()


@pytest.fixture(scope="module", params=LAUNCHES)
def stack(request, waits, tmp_path_factory):
    stack = Stack(tmp_path_factory.mktemp(request.param), request.param, ranks=2)
    stack.start()
    yield stack
    print(stack.log.read_text())
    stack.close()


def kept(stack: Stack) -> list[int]:
    """Pids of what the launcher keeps between jobs: the fork server (the oldest of that name), or nothing."""
    pids = [child.pid for child in stack.children()]
    return [pid for pid in pids if "forkserver" in Path(f"/proc/{pid}/cmdline").read_text()][:1]


def idle(stack: Stack) -> bool:
    return [child.pid for child in stack.children()] == kept(stack) and len(stack.marked()) == len(kept(stack))


def held(stack: Stack, job_id: str) -> dict[str, int]:
    """Rank -> what the end tells of its memory."""
    (released,) = (event.data for event in stack.spool.events.read(job_id) if event.type == "released")
    return {rank: told["phases"]["build"]["allocated"] for rank, told in released["memory"].items()}


def test_two_ranks_train_together_and_nothing_is_left(stack):
    stack.run("good")
    job_id = stack.submit("good")
    state, job = stack.wait(job_id, 120)
    assert (state, job.attempt) == ("succeeded", 1)
    log = stack.job_log(job_id)
    assert "[rank 0] rank 0 of 2 says hello" in log
    assert "[rank 1] rank 1 of 2 says hello" in log
    assert held(stack, job_id) == {"0": 1000, "1": 1001}
    assert idle(stack)


@pytest.mark.parametrize("do", ["die", "segfault"])
def test_a_killed_rank_is_named_with_its_signal(stack, do):
    stack.run(f"rank-{do}")
    job_id = stack.submit(f"rank-{do}", do=do, rank=1, attempts=1)
    state, job = stack.wait(job_id, 120)
    assert (state, job.result.error.type) == ("failed", "rank_crashed")
    assert f"rank 1 ended with signal {'SIGKILL' if do == 'die' else 'SIGSEGV'}" in job.result.error.message
    assert held(stack, job_id)["1"] == 1001
    assert idle(stack)


def test_a_killed_agent_takes_its_ranks_with_it(stack):
    stack.run("agent")
    job_id = stack.submit("agent", do="wait", until=1)
    stack.until_beating(job_id, ranks=2)
    server = kept(stack)
    tree = [process for process in stack.children() if process.pid not in server]
    assert len(tree) == 3  # parents first
    os.kill(tree[0].pid, signal.SIGKILL)
    state, job = stack.wait(job_id, 120)
    assert (state, job.attempt, job.last_error.type) == ("succeeded", 2, "rank_crashed")
    assert all(processes.read(process.pid) is None for process in tree)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_rank_that_stays_after_its_peer_died_is_killed_and_not_blamed(waits, launch):
    stack, job_id = waits[launch, "stays"]
    state, job = stack.wait(job_id, 120)
    assert (state, job.result.error.type) == ("failed", "rank_crashed")
    assert "rank 1 ended with signal SIGKILL" in job.result.error.message
    (died,) = re.findall(r"dies at (\S+)", stack.job_log(job_id))
    assert job.result.finished - float(died) < SHUTDOWN_SECONDS[launch] + 15
    assert idle(stack)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_ranks_that_ignore_sigterm_are_killed_in_their_sessions(waits, launch):
    stack, job_id = waits[launch, "stubborn"]
    state, job = stack.wait(job_id, 120)
    assert (state, job.result.error.type) == ("failed", "rank_hung")
    assert "silent for 8 s" in job.result.error.message
    assert idle(stack)
