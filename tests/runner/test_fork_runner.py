"""A runner that forks its ranks meets every way a job can go wrong; each job ends in a state with a reason."""

import os
import signal
import time

import pytest

from runner.runner_stack import HERE, Stack
from tandem.system import processes


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    stack = Stack(tmp_path_factory.mktemp("fork"), "fork")
    stack.start()
    yield stack
    print(stack.log.read_text())
    stack.close()


def test_success(stack):
    job_id, state, job = stack.ended("good")
    assert (state, job.result.step, job.attempt) == ("succeeded", 1, 1)
    assert stack.kinds(job_id) == ["claimed", "released", "succeeded"]
    released = stack.spool.events.read(job_id)[1].data
    assert (released["processes"], released["bytes"]) == (0, 0)
    assert "[rank 0] rank 0 of 1 says hello" in stack.job_log(job_id)
    assert not stack.spool.paths.data_dir(job_id).exists()  # gone before it counts as done
    # The fork server is all that is left.
    assert len(stack.children()) == 1


@pytest.mark.parametrize("do", ["segfault", "die"])
def test_a_crash_is_retried(stack, do):
    job_id, state, job = stack.ended(f"crash-{do}", do=do, until=1)
    assert (state, job.attempt, job.last_error.type) == ("succeeded", 2, "rank_crashed")
    assert {"segfault": "SIGSEGV", "die": "SIGKILL"}[do] in job.last_error.message
    assert stack.kinds(job_id) == ["claimed", "released", "requeued", "claimed", "released", "succeeded"]


def test_crashes_end_failed_when_the_attempts_are_used_up(stack):
    job_id, state, job = stack.ended("crashes", do="segfault", attempts=2)
    assert (state, job.attempt, job.result.error.type) == ("failed", 2, "rank_crashed")
    assert "says hello" in job.result.error.log_tail
    assert stack.kinds(job_id)[-2:] == ["released", "failed"]


def test_a_tandem_error_fails_at_once(stack):
    _, state, job = stack.ended("bad", do="fail", attempts=3)
    assert (state, job.attempt, job.result.error.type) == ("failed", 1, "checkpoint_damaged")
    assert job.result.error.message == "rank 0: adapter_model.safetensors is truncated"


@pytest.mark.parametrize("do", ["exit_zero", "leave", "no_checkpoint"])
def test_exit_0_without_a_checkpoint_is_no_success(stack, do):
    _, state, job = stack.ended(f"liar-{do.replace('_', '-')}", do=do, attempts=1)
    assert (state, job.result.error.type) == ("failed", "no_checkpoint")


def test_a_crash_after_the_checkpoint_is_a_success(stack):
    _, state, job = stack.ended("late", do="crash_after")
    assert (state, job.result.step, job.attempt) == ("succeeded", 1, 1)


def test_an_exception_reaches_the_log(stack):
    _, state, job = stack.ended("raises", do="raise", attempts=1)
    assert (state, job.result.error.type) == ("failed", "rank_crashed")
    assert "ValueError: the fake rank raises" in job.result.error.log_tail


def test_a_hang_is_ended_within_its_bound(stack):
    begin = time.monotonic()
    _, state, job = stack.ended("hangs", do="hang", stall=1.5, attempts=1)
    assert (state, job.result.error.type) == ("failed", "rank_hung")
    assert "rank 0 (phase 'begin 0'" in job.result.error.message
    assert time.monotonic() - begin < 8


def test_a_rank_that_ignores_sigterm_is_killed(stack):
    begin = time.monotonic()
    _, state, job = stack.ended("stubborn", do="stubborn", stall=1, attempts=1)
    assert (state, job.result.error.type) == ("failed", "rank_hung")
    assert time.monotonic() - begin < 18
    assert len(stack.children()) == 1


def test_the_deadline_ends_a_job_that_makes_progress(stack):
    _, state, job = stack.ended("slow", do="wait", deadline=2, stall=60, attempts=1)
    assert (state, job.result.error.type) == ("failed", "deadline")
    assert "phase 'wait" in job.result.error.message


def test_cancel(stack):
    stack.run("cancelled")
    job_id = stack.submit("cancelled", do="wait")
    follower = stack.submit("cancelled")
    stack.until_beating(job_id)
    assert stack.spool.queue.cancel(job_id) == "running"
    state, job = stack.wait(job_id)
    assert (state, job.result.error.type) == ("cancelled", "cancelled")
    # What was to start from its checkpoint can't, and says whose fault that is.
    state, job = stack.wait(follower)
    assert (state, job.result.error.type, job.attempt) == ("failed", "base_missing", 1)
    assert job_id in job.result.error.message


def test_what_a_rank_leaves_behind_is_killed(stack):
    before = {process.pid for process in stack.children()}
    _, state, _ = stack.ended("leaks", do="leak")
    assert state == "succeeded"
    assert {process.pid for process in stack.children()} == before


def test_a_checkpoint_that_somebody_else_made_is_a_conflict(stack):
    stack.run("taken")
    first = stack.submit("taken", do="wait")
    second = stack.submit("taken")
    stack.until_beating(first)
    staged = stack.spool.root / "jobs/work/foreign"
    for step in (1, 2):
        staged.mkdir()
        (staged / "weights").write_text("x")
        stack.spool.checkpoints.commit(staged, "taken", step, "somebody")
    stack.spool.queue.cancel(first)
    _, job = stack.wait(second)
    assert job.result.error.type == "conflict"


def test_a_dead_fork_server_takes_the_job_with_it_and_is_replaced(stack):
    stack.run("forkless")
    job_id = stack.submit("forkless", do="wait", until=1)
    stack.until_beating(job_id)
    (server,) = [process for process in stack.children() if process.parent == stack.runner.pid]
    tree = stack.children()
    assert len(tree) == 3  # server, leader, rank
    os.kill(server.pid, signal.SIGKILL)
    state, job = stack.wait(job_id)
    assert (state, job.attempt, job.last_error.type) == ("succeeded", 2, "rank_crashed")
    assert all(processes.read(process.pid) is None for process in tree)


def test_a_dead_leader_takes_its_ranks_with_it(stack):
    stack.run("leaderless")
    job_id = stack.submit("leaderless", do="wait", until=1)
    stack.until_beating(job_id)
    (server,) = [process for process in stack.children() if process.parent == stack.runner.pid]
    (leader,) = [process for process in stack.children() if process.parent == server.pid]
    os.kill(leader.pid, signal.SIGKILL)
    state, job = stack.wait(job_id)
    assert (state, job.attempt, job.last_error.type) == ("succeeded", 2, "rank_crashed")
    assert "SIGKILL" in job.last_error.message


def test_the_fork_server_is_replaced_when_the_code_changed(stack):
    (before,) = stack.children()
    os.utime(HERE / "fake_rank.py")
    _, state, _ = stack.ended("changed")
    assert state == "succeeded"
    (after,) = stack.children()
    assert after.pid != before.pid
    assert "replacing the fork server reason='the code changed'" in stack.log.read_text()
