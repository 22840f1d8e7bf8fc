"""Runners are killed or stopped, lose their volume, or start while another runner runs. The next
runner continues the jobs."""

import os
import signal
import time
from contextlib import suppress

import pytest

from runner.runner_stack import Stack
from spool.volume_tools import mounted, read_only
from tandem.spool.attempt import Attempt
from tandem.supervise.supervisord import PROGRAMS
from tandem.system import processes
from tandem.trainer.runner import loop
from waiting import alive

pytestmark = pytest.mark.sample(1, of="processes of jobs")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    stack = Stack(tmp_path_factory.mktemp("lives"), "fork")
    yield stack
    stack.close()


@pytest.fixture
def stack(shared):
    """A stack with a running runner. Each test leaves a runner running."""
    shared.forget()
    if not shared._processes or shared.runner.poll() is not None:
        shared.start()
        shared.until_logged("runner is up")
    return shared


@pytest.fixture
def make(tmp_path):
    stacks = []

    def start(launch: str = "fork") -> Stack:
        stacks.append(Stack(tmp_path / "spool", launch))
        stacks[-1].start()
        return stacks[-1]

    yield start
    for stack in stacks:
        stack.close()


def test_a_second_runner_is_refused_and_the_first_goes_on(stack):
    first = stack.runner
    assert stack.start().wait(60) == 1
    assert f"has a runner already: {os.uname().nodename}:{first.pid}" in stack.logged()
    assert first.poll() is None
    stack._processes.remove(stack.runner)


@pytest.mark.slow
def test_sigterm_puts_the_job_back_without_using_up_an_attempt(stack):
    job_id = stack.submit(stack.run("stopped"), do="wait", until=1, attempts=1)
    stack.until_beating(job_id)
    assert stack.stop(timeout=loop.STOP_SECONDS) == 0
    assert stack.marked() == []
    state, job = stack.spool.jobs.get(job_id)
    assert (state, job.attempt, job.stopped, job.last_error.type) == (
        "queued",
        1,
        1,
        "runner_stopped",
    )
    assert stack.event(job_id, "requeued")["counts"] is False
    stack.start()
    state, job = stack.wait(job_id)
    assert (state, job.attempt) == ("succeeded", 2)
    assert "attempt 2 (1 of 1 that count)" in stack.job_log(job_id)


@pytest.mark.parametrize("launch", ["fork", pytest.param("resident", marks=pytest.mark.slow)])
def test_sigterm_to_all_processes_uses_up_no_attempt_either(make, launch):
    """systemd with KillMode=control-group and batch systems stop all processes of the runner's unit
    at the same time. The ranks are gone before the runner checks them."""
    stack = make(launch)
    job_id = stack.submit(stack.run(), do="wait", until=1, attempts=1)
    stack.until_beating(job_id)
    for process in (stack.runner.pid, *(child.pid for child in stack.children())):
        # The parent of the process may have ended the process already.
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    assert stack.runner.wait(loop.STOP_SECONDS) == 0
    state, job = stack.spool.jobs.get(job_id)
    assert (state, job.stopped, job.last_error.type) == ("queued", 1, "runner_stopped")


def test_supervisord_gives_the_runner_enough_time_to_stop():
    (runner,) = (program for program in PROGRAMS["trainer"] if program.name == "runner")
    assert runner.stop_seconds > loop.STOP_SECONDS


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "launch",
    ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("resident", "torchrun"))],
)
def test_kill_9_of_the_runner_takes_the_ranks_with_it(make, launch):
    stack = make(launch)
    job_id = stack.submit(stack.run(), do="wait", until=1)
    stack.until_beating(job_id)
    pids = stack.pids()
    assert pids
    stack.kill()
    stack.until(lambda: not any(alive(pid) for pid in pids), "the ranks to die")
    stack.start()
    state, job = stack.wait(job_id)
    assert (state, job.attempt, job.last_error.type) == ("succeeded", 2, "runner_lost")


@pytest.mark.slow
def test_a_process_that_outlives_a_killed_runner_is_ended_by_the_next_before_it_claims(stack):
    # The rank's child does not watch its parent, and ignores SIGTERM.
    job_id = stack.submit(stack.run("orphan"), do="leak_and_wait", until=1)
    stack.until_beating(job_id)
    stack.until(lambda: len(stack.children()) == 4, "server, leader, rank and its child")
    stack.kill()
    stack.until(lambda: len(stack.marked()) == 1, "the orphan to be alone")
    (orphan,) = stack.marked()
    stack.start()
    assert stack.wait(job_id)[0] == "succeeded"
    assert not alive(orphan.pid)
    log = stack.logged()
    assert log.index("ending a process of an earlier runner") < log.index(
        "settled a job of an earlier runner"
    )


@pytest.mark.slow
def test_kills_leave_nothing_more_in_tmpdir(make, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    stack = make("resident")
    job_id = stack.submit(stack.run(), do="wait", until=4, attempts=9, litter=1)
    counts = []
    for attempt in range(1, 5):
        stack.until_beating(job_id, attempt)
        counts.append(
            len(
                [
                    path
                    for path in tmp_path.rglob("*")
                    if stack.spool.root not in (path, *path.parents)
                ]
            )
        )
        if attempt % 2:
            stack.kill()
            stack.start()
        else:
            rank = next(
                process for process in stack.children() if process.parent != stack.runner.pid
            )
            processes.send(rank, signal.SIGKILL)
    assert stack.wait(job_id)[0] == "succeeded"
    assert len(set(counts)) == 1


@pytest.mark.slow
def test_a_volume_that_goes_and_comes_back_is_waited_for(make):
    stack = make()
    stack.run()
    stack.until_logged("runner is up")
    root, log, away = stack.spool.root, stack.log, stack.spool.root.parent / "away"
    root.rename(away)
    root.mkdir()  # The mount point of a volume that is not mounted is an empty directory.
    stack.log = away / log.name
    stack.until_logged("the volume is gone")
    time.sleep(2)
    assert stack.logged().count("the volume is gone") == 1
    root.rmdir()
    away.rename(root)
    stack.log = log
    assert stack.wait(stack.submit("run"))[0] == "succeeded"
    assert "could look for a job again" in stack.logged()


def test_a_volume_that_refuses_every_write_delays_the_end_of_a_job_and_loses_nothing(stack):
    """The job's directory is read-only, so its log, lease, events and end can't be written."""
    job_id = stack.submit(stack.run("refused"), do="wait", until=1, attempts=1)
    stack.until_beating(job_id)
    stack.runner.send_signal(signal.SIGSTOP)
    with read_only(stack.spool.paths.job_dir(job_id)):
        for process in stack.children():
            if process.parent != stack.runner.pid:  # This child is the leader or a rank.
                processes.send(process, signal.SIGKILL)
        stack.runner.send_signal(signal.SIGCONT)
        stack.until_logged("can't write the event released")
        time.sleep(1)
        assert stack.runner.poll() is None
    state, job = stack.wait(job_id)
    assert (state, job.result.error.type) == ("failed", "rank_crashed")
    assert stack.kinds(job_id) == ["claimed", "released", "failed"]
    stack.until_logged("could write the event released again")
    assert stack.wait(stack.submit("refused"))[0] == "succeeded"


@pytest.mark.slow
def test_a_runner_that_starts_on_a_full_volume_waits(tmp_path):
    root = tmp_path / "volume"
    with mounted(root, "-t", "tmpfs", "-o", "size=2m", "tmpfs"):
        stack = Stack(root, "fork")
        stack.log = tmp_path / "runner.log"
        job_id = stack.submit(stack.run())
        stack.spool.queue.claim("dead")
        filler = root / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass
        try:
            stack.start()
            stack.until_logged("trying again until the volume is back")
            assert stack.runner.poll() is None
            filler.unlink()
            assert stack.wait(job_id)[0] == "succeeded"
        finally:
            stack.close()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_a_checkpoint_that_fills_the_volume_is_removed_so_that_the_jobs_end_can_be_written(
    tmp_path, killed
):
    """If `killed` is true, the job's runner has died, and the next runner finds the volume full."""
    root = tmp_path / "volume"
    with mounted(root, "-t", "tmpfs", "-o", "size=2m", "tmpfs"):
        stack = Stack(root, "fork")
        stack.log = tmp_path / "runner.log"
        try:
            run = stack.run()
            if killed:
                stack.start()
                stack.until_logged("runner is up")
                assert stack.stop() == 0
            job_id = stack.submit(run, do="fill", until=1)
            if killed:
                job = stack.spool.queue.claim("dead")
                part = Attempt(stack.spool, job_id, job.attempt).staged
                part.mkdir()
                with suppress(OSError), (part / "part").open("wb", buffering=0) as file:
                    while file.write(b"\0" * 4096):
                        pass
            stack.start()
            state, job = stack.wait(job_id, 60)
            assert (state, job.attempt) == ("succeeded", 2)
        finally:
            stack.close()
