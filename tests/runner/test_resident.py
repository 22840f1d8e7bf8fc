"""Ranks that stay between jobs. The same processes run several jobs in turn. After a job that did
not succeed, the next job gets new processes."""

import os
import signal
from pathlib import Path

import pytest

from listening import LOOPBACK, listening
from runner.runner_stack import Stack
from waiting import alive

# Each test of this file waits for an agent and two ranks that import torch.
pytestmark = [pytest.mark.sample(1, of="processes of jobs"), pytest.mark.slow]


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    stack = Stack(tmp_path_factory.mktemp("resident"), "resident", ranks=2)
    stack.start()
    yield stack
    stack.close()


def ranks(stack):
    """Waits until torchrun's agent and the two ranks run. Returns their pids."""
    stack.until(lambda: len(stack.children()) == 3, "agent and ranks")
    return stack.pids()


def test_the_same_processes_run_job_after_job(stack):
    before = ranks(stack)
    for name in ("first", "second"):
        job_id, state, job = stack.ended(name, meet=True)
        assert (state, job.result.step, job.attempt) == ("succeeded", 1, 1)
        assert stack.kinds(job_id) == ["claimed", "released", "succeeded"]
        log = stack.job_log(job_id)  # Each job has a log file of its own.
        assert (
            log.count("[rank 0] rank 0 of 2 says hello")
            == log.count("[rank 1] rank 1 of 2 says hello")
            == 1
        )
        assert ranks(stack) == before
    # With more than one malloc arena, the threads of each job would leave heaps of their own.
    for pid in before:
        assert b"MALLOC_ARENA_MAX=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def test_agent_and_ranks_listen_on_loopback_only(stack):
    """The agent unpickles values from its store, so anybody who could reach the store's port could
    run code on this machine."""
    stack.ended("listening", meet=True)
    found = {address for pid in ranks(stack) for address in listening(pid)}
    assert found
    assert found <= LOOPBACK


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("order", "told"),
    [
        # The error names rank 1, which has failed. The error does not name rank 0, which SIGTERM
        # has ended.
        ({"do": "raise", "rank": 1}, "rank 1 ended with exit code 1"),
        # A rank exits with 0 in the middle of a job.
        ({"do": "leave"}, ""),
    ],
)
def test_after_a_failure_the_next_attempt_has_new_ranks(stack, order, told):
    before = ranks(stack)
    job_id, state, job = stack.ended(order["do"], until=1, **order)
    assert (state, job.attempt, job.last_error.type) == ("succeeded", 2, "rank_crashed")
    assert told in job.last_error.message
    assert ("ValueError" in stack.job_log(job_id)) == ("rank" in order)
    assert stack.kinds(job_id) == [
        "claimed",
        "released",
        "requeued",
        "claimed",
        "released",
        "succeeded",
    ]
    assert not ranks(stack) & before


def test_cancel_ends_the_ranks_and_the_next_job_has_new_ones(stack):
    before = ranks(stack)
    stack.run("cancelled")
    job_id = stack.submit("cancelled", do="wait")
    stack.until_beating(job_id, ranks=2)
    stack.spool.queue.cancel(job_id)
    assert stack.wait(job_id)[0] == "cancelled"
    assert not any(alive(pid) for pid in before)
    assert stack.ended("after-cancel")[1] == "succeeded"


def test_a_process_that_a_rank_started_is_killed_and_the_ranks_stay(stack):
    before = ranks(stack)
    assert stack.ended("leaks", do="leak")[1] == "succeeded"
    assert ranks(stack) == before


def test_ranks_that_died_between_jobs_are_replaced(stack):
    before = ranks(stack)
    victim = next(process for process in stack.children() if process.parent != stack.runner.pid)
    os.kill(victim.pid, signal.SIGKILL)
    stack.until(lambda: not stack.children(), "the agent to notice")
    _, state, job = stack.ended("after-death")
    assert (state, job.attempt) == ("succeeded", 1)
    assert not ranks(stack) & before
    assert stack.stop() == 0
    assert stack.marked() == []
