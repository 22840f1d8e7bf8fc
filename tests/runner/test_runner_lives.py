"""Runners that are killed, stopped, doubled, or lose their volume; whoever comes next finds everything in order."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from runner.runner_stack import Stack, read_lease_pids
from tandem.system import processes
from tandem.trainer.runner import loop


@pytest.fixture
def make(tmp_path):
    stacks = []

    def start(launch: str = "fork", log: Path | None = None) -> Stack:
        stacks.append(Stack(tmp_path / "spool", launch, log=log))
        stacks[-1].start()
        return stacks[-1]

    yield start
    for stack in stacks:
        print(stack.log.read_text())
        stack.close()


def test_a_second_runner_is_refused_and_the_first_goes_on(make):
    stack = make()
    first = stack.runner
    stack.until(lambda: "runner is up" in stack.log.read_text(), 60, "the first runner")
    assert stack.start().wait(60) == 1
    assert f"has a runner already: {os.uname().nodename}:{first.pid}" in stack.log.read_text()
    assert first.poll() is None


def test_sigterm_puts_the_job_back_without_using_up_an_attempt(make):
    stack = make()
    stack.run()
    job_id = stack.submit("run", do="wait", until=1, attempts=1)
    stack.until_beating(job_id)
    begin = time.monotonic()
    assert stack.stop() == 0
    assert time.monotonic() - begin < loop.STOP_SECONDS
    assert stack.marked() == []
    state, job = stack.spool.jobs.get(job_id)
    assert (state, job.attempt, job.stopped, job.last_error.type) == ("queued", 1, 1, "runner_stopped")
    stack.start()
    state, job = stack.wait(job_id)
    assert (state, job.attempt) == ("succeeded", 2)


@pytest.mark.parametrize("launch", ["fork", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_kill_9_of_the_runner_takes_the_ranks_with_it(make, launch):
    stack = make(launch)
    stack.run()
    job_id = stack.submit("run", do="wait", until=1)
    stack.until_beating(job_id)
    stack.until(lambda: read_lease_pids(stack, job_id), 10, "ranks in the lease")
    ranks = [process.pid for process in stack.children()]
    assert set(read_lease_pids(stack, job_id)) <= set(ranks)
    stack.runner.kill()
    stack.runner.wait()
    stack.until(lambda: not any(_alive(pid) for pid in ranks), 5, "the ranks to die")
    stack.start()
    state, job = stack.wait(job_id)
    assert (state, job.attempt, job.last_error.type) == ("succeeded", 2, "runner_lost")


def test_what_outlives_a_killed_runner_is_ended_by_the_next_before_it_claims(make):
    stack = make()
    stack.run()
    # The child has no idea that its parent may die, and ignores SIGTERM.
    job_id = stack.submit("run", do="leak_and_wait", until=1)
    stack.until_beating(job_id)
    stack.until(lambda: len(stack.children()) == 4, 10, "server, leader, rank and its child")
    stack.runner.kill()
    stack.runner.wait()
    stack.until(lambda: len(stack.marked()) == 1, 5, "the orphan to be alone")
    (orphan,) = stack.marked()
    stack.start()
    state, _ = stack.wait(job_id)
    assert state == "succeeded"
    assert not _alive(orphan.pid)
    log = stack.log.read_text()
    assert log.index("ending a process of an earlier runner") < log.index("settled a job of an earlier runner")


def test_a_runner_killed_before_the_launch_leaves_a_job_that_runs_again(make):
    """The job is claimed while the fork server still imports: nothing runs yet when the runner dies."""
    stack = make()
    stack.run()
    job_id = stack.submit("run")
    stack.until(lambda: "claimed" in stack.kinds(job_id), 30, "the claim")
    stack.runner.kill()
    stack.runner.wait()
    stack.until(lambda: not stack.marked(), 5, "the fork server to die")
    stack.start()
    state, job = stack.wait(job_id)
    assert (state, job.result.step) == ("succeeded", 1)


def test_a_volume_that_goes_and_comes_back_is_waited_for(make):
    stack = make()
    stack.run()
    stack.until(lambda: "runner is up" in stack.log.read_text(), 60, "the runner")
    root, log, away = stack.spool.root, stack.log, stack.spool.root.parent / "away"
    root.rename(away)
    root.mkdir()  # as an unmounted mount point looks
    stack.log = away / log.name
    stack.until(lambda: "the volume is gone" in stack.log.read_text(), 20, "the complaint")
    time.sleep(3)
    assert stack.log.read_text().count("the volume is gone") == 1
    root.rmdir()
    away.rename(root)
    stack.log = log
    job_id = stack.submit("run")
    assert stack.wait(job_id)[0] == "succeeded"
    assert "could look for a job again" in stack.log.read_text()


@pytest.mark.slow
def test_a_volume_that_refuses_delays_the_end_of_a_job_and_loses_nothing(make):
    """A file in the place of `jobs/succeeded` makes the last rename fail."""
    stack = make()
    stack.run()
    job_id = stack.submit("run", do="wait", until=1, stall=60)
    stack.until_beating(job_id)
    succeeded: Path = stack.spool.root / "jobs/succeeded"
    succeeded.rmdir()
    succeeded.write_text("in the way")
    staged = stack.spool.root / "jobs/work/foreign"
    staged.mkdir()
    (staged / "weights").write_text("x")
    stack.spool.checkpoints.commit(staged, "run", 1, job_id)
    for process in stack.children():
        if process.parent != stack.runner.pid:
            processes.send(process, signal.SIGKILL)
    stack.until(lambda: "can't record the job's end" in stack.log.read_text(), 20, "the complaint")
    succeeded.unlink()
    succeeded.mkdir()
    state, job = stack.wait(job_id)
    assert (state, job.result.step) == ("succeeded", 1)
    stack.until(lambda: "could record the job's end again" in stack.log.read_text(), 40, "the good news")
    assert stack.kinds(job_id).count("succeeded") == 1


def test_a_really_full_volume(make, tmp_path):
    """A small file system of its own: the job's rank, the runner's lease, events and verdict all meet ENOSPC."""
    volume = tmp_path / "spool"
    volume.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", volume]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting needs privileges that are not here")
    stack = make(log=tmp_path / "loop.log")
    try:
        stack.run()
        job_id = stack.submit("run", do="wait", until=1, attempts=1)
        stack.until_beating(job_id)
        stack.runner.send_signal(signal.SIGSTOP)
        for process in stack.children():
            if process.parent != stack.runner.pid:
                processes.send(process, signal.SIGKILL)
        stack.until(lambda: len(stack.children()) == 1, 10, "the ranks to be gone")
        ballast = volume / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        stack.runner.send_signal(signal.SIGCONT)
        stack.until(lambda: "the volume is full" in stack.log.read_text(), 30, "the complaint")
        time.sleep(2)
        assert stack.runner.poll() is None
        ballast.unlink()
        state, job = stack.wait(job_id)
        assert (state, job.result.error.type) == ("failed", "rank_crashed")
        assert stack.kinds(job_id) == ["claimed", "released", "failed"]
        other = stack.submit("run")
        assert stack.wait(other)[0] == "succeeded"
    finally:
        stack.close()
        subprocess.run(["umount", "-l", volume], check=True)


def _alive(pid: int) -> bool:
    process = processes.read(pid)
    return process is not None and not process.zombie
