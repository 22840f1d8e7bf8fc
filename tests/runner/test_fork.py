"""A runner that forks its ranks. The jobs fail in every way, and each job ends in a state with a
reason."""

import os
import shutil
import signal
import sys
import time

import pytest

from runner.runner_stack import HERE, Stack
from tandem.spool import Spool
from tandem.system import processes
from tandem.trainer.launch import Launch
from tandem.trainer.launch.forkserver import ForkServer
from waiting import alive, until

pytestmark = pytest.mark.sample(1, of="processes of jobs")

ENTRY = "rank_that_changes"


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """A stack whose runner runs a copy of `fake_rank`. No other file's tests use this copy, because
    the tests of this file change its code."""
    directory = tmp_path_factory.mktemp("fork")
    stack = Stack(directory / "spool", "fork", entry=ENTRY)
    shutil.copy(HERE / "fake_rank.py", directory / f"{ENTRY}.py")
    stack.environment["PYTHONPATH"] = os.pathsep.join(
        [str(directory), stack.environment["PYTHONPATH"]]
    )
    stack.start()
    yield stack
    stack.close()


@pytest.mark.slow
def test_success(stack):
    job_id, state, job = stack.ended("good")
    assert (state, job.result.step, job.attempt) == ("succeeded", 1, 1)
    assert stack.kinds(job_id) == ["claimed", "released", "succeeded"]
    released = stack.event(job_id, "released")
    assert (released["processes"], released["bytes"]) == (0, 0)
    # The ranks have ended, and the runner has removed the job's data.
    assert not stack.spool.paths.data_dir(job_id).exists()
    # Only the fork server is left.
    assert len(stack.children()) == 1
    lines = stack.job_log(job_id).splitlines()
    assert "[rank 0] rank 0 of 1 says hello" in lines
    # The runner's own output also contains the lines of the job's log.
    shown = [line for line in stack.logged().splitlines() if line.startswith(f"job {job_id} ")]
    assert [line.removeprefix(f"job {job_id} ") for line in shown] == lines


ONCE = {"attempts": 1}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("do", "orders", "state", "attempt", "error", "text"),
    [
        ("die", {"until": 1}, "succeeded", 2, "rank_crashed", "SIGKILL (out of memory?)"),
        ("segfault", {"attempts": 2}, "failed", 2, "rank_crashed", "SIGSEGV"),
        ("raise", ONCE, "failed", 1, "rank_crashed", "ValueError: the fake rank raises"),
        (
            "fail",
            {"attempts": 3},
            "failed",
            1,
            "checkpoint_damaged",
            "rank 0: adapter_model.safetensors is truncated",
        ),
        ("leave", ONCE, "failed", 1, "no_checkpoint", "exited with 0"),
        ("no_checkpoint", ONCE, "failed", 1, "no_checkpoint", "exited with 0"),
        # The rank crashes after it has committed the checkpoint.
        ("crash_after", {}, "succeeded", 1, None, ""),
        ("hang", ONCE | {"stall": 5}, "failed", 1, "rank_hung", "rank 0 (phase 'begin 0'"),
        ("wait", ONCE | {"deadline": 20, "stall": 60}, "failed", 1, "deadline", "phase 'wait"),
    ],
)
def test_every_end_of_a_rank_is_a_state_with_a_reason(
    stack, do, orders, state, attempt, error, text
):
    job_id, ended, job = stack.ended(do.replace("_", "-"), do=do, **orders)
    last = job.result.error or job.last_error
    assert (ended, job.attempt, last and last.type) == (state, attempt, error)
    if last is not None:
        assert text in last.message or text in last.log_tail
        assert "says hello" in last.log_tail
    assert stack.kinds(job_id) == [
        *["claimed", "released", "requeued"] * (attempt - 1),
        "claimed",
        "released",
        state,
    ]


@pytest.mark.slow
def test_a_fork_server_may_take_longer_to_start_than_stall_seconds(tmp_path):
    """The start of the fork server does not count as a stall. If the start counted as a stall, each
    attempt would end the fork server during its imports. The next attempt would begin the imports
    again."""
    stack = Stack(tmp_path / "spool", "fork", entry="rank_that_imports_slowly")
    code = (HERE / "fake_rank.py").read_text()
    slow = "\n\ndef preload(device: str):\n    time.sleep(12)\n"
    (tmp_path / "rank_that_imports_slowly.py").write_text(code + slow)
    stack.environment["PYTHONPATH"] = f"{tmp_path}:{stack.environment['PYTHONPATH']}"
    try:
        stack.start()
        _, state, job = stack.ended("slow", stall=6)
        assert (state, job.attempt, job.last_error) == ("succeeded", 1, None)
    finally:
        stack.close()


def test_cancel(stack):
    stack.run("cancelled")
    job_id = stack.submit("cancelled", do="wait")
    follower = stack.submit("cancelled")
    stack.until_beating(job_id)
    assert stack.spool.queue.cancel(job_id) == "running"
    state, job = stack.wait(job_id)
    assert (state, job.result.error.type) == ("cancelled", "cancelled")
    # The run's next job has no checkpoint to start from. The error of the next job names the
    # cancelled job, which should have made a checkpoint.
    state, job = stack.wait(follower)
    assert (state, job.result.error.type, job.attempt) == ("failed", "base_missing", 1)
    assert job_id in job.result.error.message


def test_a_process_that_a_rank_leaves_behind_is_killed(stack):
    before = stack.pids()
    _, state, _ = stack.ended("leaks", do="leak")
    assert (state, stack.pids()) == ("succeeded", before)


def test_a_checkpoint_that_somebody_else_made_is_a_conflict(stack):
    stack.run("taken")
    first = stack.submit("taken", do="wait")
    second = stack.submit("taken")
    stack.until_beating(first)
    staged = stack.spool.root / "jobs/foreign"
    for step in (1, 2):
        staged.mkdir()
        (staged / "weights").write_text("x")
        stack.spool.checkpoints.commit(staged, "taken", step, "somebody")
    stack.spool.queue.cancel(first)
    _, job = stack.wait(second)
    assert job.result.error.type == "conflict"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "leader"])
def test_ranks_die_with_the_fork_server_and_with_their_leader(stack, victim):
    stack.run(f"no-{victim}")
    job_id = stack.submit(f"no-{victim}", do="wait", until=1)
    stack.until_beating(job_id)
    server, leader, rank = stack.children()
    assert (server.parent, leader.parent, rank.parent) == (stack.runner.pid, server.pid, leader.pid)
    processes.send(server if victim == "server" else leader, signal.SIGKILL)
    state, job = stack.wait(job_id)
    assert (state, job.attempt, job.last_error.type) == ("succeeded", 2, "rank_crashed")
    assert "SIGKILL" in job.last_error.message
    assert not alive(leader.pid)
    assert not alive(rank.pid)
    assert alive(server.pid) == (victim == "leader")


@pytest.mark.slow
def test_the_fork_server_is_replaced_when_the_code_changed(stack):
    before = stack.pids()
    os.utime(stack.spool.root.with_name(f"{ENTRY}.py"))
    assert stack.ended("changed")[1] == "succeeded"
    assert len(stack.pids()) == 1
    assert not stack.pids() & before
    assert "replacing the fork server reason='the code changed'" in stack.logged()


WAITING_RANK = """
import time
def preload(device): pass
def main(attempt, settings): time.sleep(float(attempt.job))
"""


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
def test_a_late_report_about_a_killed_launch_does_not_end_the_next_one(tmp_path, early):
    """The fork server reports the end of a killed launch. `early`: whether the report comes before
    the next launch."""
    (tmp_path / "waiting_rank.py").write_text(WAITING_RANK)
    root = Spool.create(tmp_path / "spool").root
    server = ForkServer(
        "waiting_rank",
        "cpu",
        os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )

    def launch(seconds):
        request = Launch(root=root, job=str(seconds), attempt=1, entry="waiting_rank")
        request.work.mkdir(parents=True)
        return server.launch(request)

    try:
        killed = launch(600)
        until(
            "the leader and its rank",
            lambda: killed.poll() is None and len(killed.processes()) == 2,
        )
        os.kill(server.pid, signal.SIGSTOP)
        assert killed.kill_all(10) == []
        assert killed.poll() is None  # The stopped fork server can't report the launch's end yet.
        following = None if early else launch(0.5)
        os.kill(server.pid, signal.SIGCONT)
        if following is None:
            time.sleep(0.5)
            following = launch(0.5)
        until("its end", lambda: following.poll() is not None)
        assert following.poll() == 0
    finally:
        server.close()


@pytest.mark.slow
def test_a_job_that_waits_for_its_next_attempt_keeps_no_other_run_waiting(stack):
    """The job `unlucky` waits 1 s after its first attempt, and 2 s after its second attempt. The
    job of the run `lucky` starts during the pauses of `unlucky`."""
    for run in ("unlucky", "lucky"):
        stack.run(run)
    stack.runner.send_signal(signal.SIGSTOP)  # The runner stops until all three jobs are queued.
    unlucky = stack.submit("unlucky", do="die", until=2, attempts=3)
    follower, lucky = stack.submit("unlucky"), stack.submit("lucky")
    stack.runner.send_signal(signal.SIGCONT)
    assert stack.wait(unlucky)[0] == stack.wait(follower)[0] == stack.wait(lucky)[0] == "succeeded"
    events = [event for job in (unlucky, follower, lucky) for event in stack.spool.events.read(job)]
    claims = [
        event.job
        for event in sorted(events, key=lambda event: event.time)
        if event.type == "claimed"
    ]
    assert claims.index(lucky) < 3
    assert [job for job in claims if job != lucky] == [unlucky] * 3 + [follower]
