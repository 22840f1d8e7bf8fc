"""Two ranks, started by the real torchrun or by the fork server. If any process is killed, all
ranks end, and the job names the reason."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner.runner_stack import Stack
from tandem.system import processes
from tandem.trainer.launch import SHUTDOWN_SECONDS
from waiting import alive

pytestmark = pytest.mark.sample(1, of="processes of jobs")

LAUNCHES = ["torchrun", "fork"]
SLOW_ENDS = {
    "stays": {"do": "one_dies_one_stays", "stall": 120},
    "stubborn": {"do": "stubborn", "stall": 40},
}


@pytest.fixture(scope="module")
def stacks(tmp_path_factory):
    """(launch, name) -> a stack and the id of its job. All jobs start at once, because the jobs of
    SLOW_ENDS take long to end. These jobs end while other tests run."""
    stacks = {}
    try:
        for launch in LAUNCHES:
            for name, orders in (SLOW_ENDS | {"good": {"meet": True}}).items():
                stack = Stack(tmp_path_factory.mktemp(launch), launch, ranks=2)
                stacks[launch, name] = stack, stack.submit(stack.run(name), attempts=1, **orders)
                stack.start()
        yield stacks
    finally:
        for stack, _ in stacks.values():
            stack.close()


def standby(stack: Stack) -> list[int]:
    """The pid of the process that the launcher keeps between jobs. `fork` keeps the fork server,
    which is the oldest process whose command line contains `forkserver`. `torchrun` keeps none."""
    pids = []
    for child in stack.children():
        with suppress(OSError):  # The child process may have ended since the list was made.
            if "forkserver" in Path(f"/proc/{child.pid}/cmdline").read_text():
                pids.append(child.pid)
    return pids[:1]


def idle(stack: Stack) -> bool:
    return [child.pid for child in stack.children()] == standby(stack) and len(
        stack.marked()
    ) == len(standby(stack))


def allocated(stack: Stack, job_id: str) -> dict[str, int]:
    """Rank -> bytes allocated in the phase `build`, according to the event `released`."""
    memory = stack.event(job_id, "released")["memory"]
    return {rank: of_rank["phases"]["build"]["allocated"] for rank, of_rank in memory.items()}


@pytest.mark.slow
@pytest.mark.parametrize("launch", LAUNCHES)
def test_two_ranks_train_together_and_nothing_is_left(stacks, launch):
    stack, job_id = stacks[launch, "good"]
    state, job = stack.wait(job_id)
    assert (state, job.attempt) == ("succeeded", 1)
    log = stack.job_log(job_id)
    assert "[rank 0] rank 0 of 2 says hello" in log
    assert "[rank 1] rank 1 of 2 says hello" in log
    assert allocated(stack, job_id) == {"0": 1000, "1": 1001}
    assert idle(stack)


@pytest.mark.slow
def test_a_killed_agent_takes_its_ranks_with_it(stacks):
    stack, first = stacks["torchrun", "good"]
    stack.wait(first)
    job_id = stack.submit("good", do="wait", until=1)
    stack.until_beating(job_id, ranks=2)
    agent, *ranks = stack.children()  # In the list, a parent comes before its children.
    assert len(ranks) == 2
    processes.send(agent, signal.SIGKILL)
    state, job = stack.wait(job_id)
    assert (state, job.attempt, job.last_error.type) == ("succeeded", 2, "rank_crashed")
    assert "the parent of the ranks ended with signal SIGKILL" in job.last_error.message
    assert not any(alive(process.pid) for process in (agent, *ranks))


def test_a_rank_whose_agent_died_during_its_imports_ends():
    """The rank ends because the pid of its parent is not the agent's pid. The parent of an orphan
    is the runner, which adopts orphans."""
    command = [sys.executable, "-m", "tandem.trainer.launch.bootstrap", "no launch"]
    rank = subprocess.run(
        command, env=os.environ | {"TANDEM_AGENT_PID": "1"}, check=False, capture_output=True
    )
    assert rank.returncode == -signal.SIGKILL


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_rank_that_stays_after_its_peer_died_is_killed_and_not_blamed(stacks, launch):
    stack, job_id = stacks[launch, "stays"]
    state, job = stack.wait(job_id)
    assert (state, job.result.error.type) == ("failed", "rank_crashed")
    assert "rank 1 ended with signal SIGKILL" in job.result.error.message
    # The event `released` has the memory record of the dead rank too.
    assert allocated(stack, job_id)["1"] == 1001
    (died,) = re.findall(r"dies at (\S+)", stack.job_log(job_id))
    assert job.result.finished - float(died) < SHUTDOWN_SECONDS[launch] + 25
    assert idle(stack)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("launch", LAUNCHES)
def test_ranks_that_ignore_sigterm_are_killed_in_their_sessions(stacks, launch):
    stack, job_id = stacks[launch, "stubborn"]
    state, job = stack.wait(job_id)
    assert (state, job.result.error.type) == ("failed", "rank_hung")
    [silent] = re.findall(r"\(phase 'begin 0', silent for (\d+) s\)$", job.result.error.message)
    assert int(silent) >= SLOW_ENDS["stubborn"]["stall"]
    assert idle(stack)


@pytest.mark.parametrize(
    ("failures", "own"),
    [
        # Rank -> (exit status, time in seconds). torch's elastic agent also records the ranks that
        # it has ended after the first failure.
        ({1: (1, 50), 0: (-15, 50)}, {1: 1}),
        ({0: (-15, 50)}, {0: -15}),
        ({0: (-9, 80), 2: (1, 51), 1: (-11, 50)}, {1: -11, 2: 1}),
        ({1: (1, 50), 0: (-9, 50), 2: (-15, 52)}, {1: 1, 0: -9}),
    ],
)
def test_ranks_that_the_agent_ended_did_not_fail_by_themselves(failures, own):
    from tandem.trainer.launch.torchrun_agent import own_failures

    records = {
        rank: SimpleNamespace(exitcode=code, timestamp=at) for rank, (code, at) in failures.items()
    }
    assert list(own_failures(records).items()) == list(own.items())
