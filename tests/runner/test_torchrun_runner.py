"""Two ranks under the real torchrun: they work together, and whoever is killed, everything ends and the job is tried
again."""

import os
import signal

import pytest

from runner.runner_stack import Stack
from tandem import processes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    stack = Stack(tmp_path_factory.mktemp("torchrun"), "torchrun", ranks=2)
    stack.start()
    yield stack
    print(stack.log.read_text())
    stack.close()


def agent(stack: Stack) -> processes.Process:
    (found,) = [process for process in stack.children() if process.parent == stack.runner.pid]
    return found


def test_two_ranks_train_together_and_nothing_is_left(stack):
    stack.run("good")
    job_id = stack.submit("good")
    state, job = stack.wait(job_id, 120)
    assert (state, job.attempt) == ("succeeded", 1)
    log = stack.job_log(job_id)
    assert "[rank 0] rank 0 of 2 says hello" in log
    assert "[rank 1] rank 1 of 2 says hello" in log
    assert stack.children() == []
    assert stack.marked() == []


@pytest.mark.parametrize("do", ["die", "segfault"])
def test_a_killed_rank_is_named_with_its_signal(stack, do):
    stack.run(f"rank-{do}")
    job_id = stack.submit(f"rank-{do}", do=do, rank=1, attempts=1)
    state, job = stack.wait(job_id, 120)
    assert (state, job.result.error.type) == ("failed", "rank_crashed")
    assert f"rank 1 ended with signal {'SIGKILL' if do == 'die' else 'SIGSEGV'}" in job.result.error.message
    assert stack.marked() == []


def test_a_killed_agent_takes_its_ranks_with_it(stack):
    stack.run("agent")
    job_id = stack.submit("agent", do="wait", until=1)
    stack.until_beating(job_id, ranks=2)
    tree = stack.children()
    assert len(tree) == 3
    os.kill(agent(stack).pid, signal.SIGKILL)
    state, job = stack.wait(job_id, 120)
    assert (state, job.attempt, job.last_error.type) == ("succeeded", 2, "rank_crashed")
    assert all(processes.read(process.pid) is None for process in tree)


def test_ranks_that_ignore_sigterm_are_killed_in_their_sessions(stack):
    stack.run("stubborn")
    job_id = stack.submit("stubborn", do="stubborn", stall=8, attempts=1)
    state, job = stack.wait(job_id, 120)
    assert (state, job.result.error.type) == ("failed", "rank_hung")
    assert "rank 0" in job.result.error.message
    assert "rank 1" in job.result.error.message
    assert stack.marked() == []
