"""An ended attempt can't commit a checkpoint, append an event or offer weights, however late its
processes go on. The tests use one mount, and a second mount (bindfs) that caches names and shares
no locks."""

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spool.spool_tools import LOST, commit, failed, spool_with_run, stage, start, succeeded
from spool.volume_tools import full_disk, tree
from tandem.errors import Conflict, SpoolUnusable, TandemError
from tandem.spool import Spool, fence, fs
from tandem.spool.attempt import Attempt
from tandem.spool.fence import LivingAttempts
from tandem.spool.schema import Event, Job

FORK = multiprocessing.get_context("fork")
RACES = {False: 30, True: 1000}
"""The number of races between commit and fence, without and with --all-cases."""


@pytest.fixture(params=["one mount", "bindfs"])
def seen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The spool's root as the ranks see it; the runner sees `tmp_path / "spool"`."""
    root = tmp_path / "spool"
    spool_with_run(root)
    if request.param == "one mount":
        yield root
        return
    if shutil.which("bindfs") is None or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs bindfs and the right to mount")
    mount = tmp_path / "seen"
    mount.mkdir()
    caches = "attr_timeout=60,entry_timeout=60,negative_timeout=60"
    subprocess.run(["bindfs", "-o", caches, root, mount], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def commit_as_rank(attempt: Attempt, job: Job, check: Callable[[], None], *, handle: int) -> None:
    """Commits the staged checkpoint. `handle`: a handle of the attempt's directory, or -1. A rename
    with a handle finds the checkpoint by the handle, like an NFS client that has already opened the
    directory."""

    def rename(source: Path, target: Path) -> None:
        os.rename(source.name, target, src_dir_fd=handle)

    if handle >= 0:
        fs.rename_dir = rename
    attempt.spool.checkpoints.commit(
        attempt.staged, job.spec.run, job.spec.base_step + 1, job.spec.id, check=check
    )


def stage_for(spool: Spool, job: Job, content: bytes) -> Attempt:
    attempt = Attempt(spool, job.spec.id, job.attempt)
    stage(spool, job, content).rename(attempt.staged)
    return attempt


@pytest.mark.parametrize("by_handle", [False, True])
def test_a_frozen_rank_that_thaws_late_changes_nothing(
    tmp_path: Path, seen: Path, by_handle: bool
) -> None:
    """The rank is stopped between its last check of the attempt and its rename."""
    runner = Spool(tmp_path / "spool")
    job = start(runner, "j")
    stage_for(runner, job, b"of the zombie")
    told = FORK.Queue()

    def zombie() -> None:
        attempt = Attempt(Spool(seen), "j", 1)
        handle = os.open(attempt.work, os.O_RDONLY)

        def freeze() -> None:
            attempt.check()
            os.kill(os.getpid(), signal.SIGSTOP)

        def again() -> None:
            attempt.staged.mkdir()
            commit_as_rank(attempt, job, attempt.check, handle=-1)

        tries = {
            "commit": lambda: commit_as_rank(
                attempt, job, freeze, handle=handle if by_handle else -1
            ),
            "offer": lambda: attempt.event("offered", transport="nccl"),
            "new directory": again,
        }
        for name, action in tries.items():
            try:
                action()
                told.put((name, "done"))
            except (OSError, Conflict) as error:
                told.put((name, type(error).__name__))

    process = FORK.Process(target=zombie)
    process.start()
    _, status = os.waitpid(process.pid or 0, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert runner.queue.requeue(job, LOST) == "queued"
    second = runner.queue.claim("me")
    assert second is not None
    commit(runner, second, b"of attempt 2")
    os.kill(process.pid or 0, signal.SIGCONT)
    process.join(60)
    answers = dict(told.get(timeout=10) for _ in range(3))
    assert answers["commit"] in ("FileNotFoundError", "Conflict")
    assert {answers["offer"], answers["new directory"]} <= {"Conflict", "FileNotFoundError"}
    assert runner.queue.finish(second, succeeded(second)) == "succeeded"
    assert runner.checkpoints.steps("r") == [0, 1]
    weights = runner.checkpoints.path("r", 1) / "adapter_model.safetensors"
    assert weights.read_bytes() == b"of attempt 2"
    assert [(event.type, event.attempt) for event in runner.events.read("j")] == [
        ("claimed", 1),
        ("requeued", 1),
        ("claimed", 2),
        ("succeeded", 2),
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_of_a_commit_and_the_fence_exactly_one_wins(
    tmp_path: Path, seen: Path, request: pytest.FixtureRequest
) -> None:
    races = RACES[request.config.option.all_cases]
    runner, choice, won = Spool(tmp_path / "spool"), random.Random(1), {True: 0, False: 0}
    # The longest time in seconds that the fence waits. The test adapts the longest time to the
    # results of earlier races, so that the commit and the fence both win some races.
    longest = 0.02
    for number in range(races):
        job = start(runner, f"j{number}")
        attempt = stage_for(runner, job, b"of attempt 1")
        ready = FORK.Event()

        def rank(
            root: Path = seen, job: Job = job, ready=ready, delay: float = choice.random() / 200
        ) -> None:
            attempt = Attempt(Spool(root), job.spec.id, 1)
            handle = os.open(attempt.work, os.O_RDONLY) if delay < 0.0025 else -1
            ready.set()
            time.sleep(delay)
            try:
                commit_as_rank(attempt, job, attempt.check, handle=handle)
            # If the fence wins early, the checkpoint's files vanish while the rank hashes them.
            except (OSError, TandemError):
                os._exit(3)

        process = FORK.Process(target=rank)
        process.start()
        ready.wait(60)
        time.sleep(choice.random() * longest)
        state = runner.queue.requeue(job, LOST)
        process.join(60)
        committed = process.exitcode == 0
        assert process.exitcode in (0, 3)
        won[committed] += 1
        longest *= 0.8 if committed else 1.25
        assert (state, runner.checkpoints.newest("r") == number + 1) == (
            ("succeeded", True) if committed else ("queued", False)
        ), number
        assert not fs.exists(attempt.work)
        if not committed:
            again = runner.queue.claim("me")
            assert again is not None, (number, sorted(tree(tmp_path / "spool" / "jobs")))
            commit(runner, again)
            runner.queue.finish(again, succeeded(again))
        assert runner.jobs.get(job.spec.id)[0] == "succeeded"
    print(f"commits that came before the fence: {won[True]} of {races}")
    assert min(won.values()) > races // 20


@pytest.mark.parametrize("end", ["cancelled", "failed", "out of attempts"])
def test_a_commit_that_came_before_the_end_makes_the_job_succeed(spool: Spool, end: str) -> None:
    job = start(spool, "j", max_attempts=1)
    commit(spool, job)
    if end == "cancelled":
        spool.queue.cancel("j")
    state = spool.queue.finish(job, failed()) if end == "failed" else spool.queue.requeue(job, LOST)
    assert state == "succeeded"
    result = spool.jobs.get("j")[1].result
    assert result is not None
    assert (result.state, result.step, result.error) == ("succeeded", 1, None)


def test_a_full_volume_keeps_no_fence_from_holding(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Attempt(spool, "j", start(spool, "j").attempt)
    attempt.staged.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_disk)
        patch.setattr(Path, "open", full_disk)
        fence.end(attempt.work)
    assert not attempt.work.exists()
    with pytest.raises(Conflict, match="attempt 1 of job 'j' was ended"):
        attempt.check()


def test_what_can_not_be_fenced_is_not_put_back(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(spool, "j")
    monkeypatch.setattr(fence, "_PAUSE_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(fs, "remove_tree", lambda _: None)
        for end in (
            lambda: spool.queue.requeue(job, LOST),
            lambda: spool.queue.finish(job, failed()),
        ):
            with pytest.raises(SpoolUnusable, match="could still make its checkpoint"):
                end()
    assert spool.jobs.get("j")[0] == "running"
    with pytest.raises(Conflict):  # the fence's mark exists already
        Attempt(spool, "j", 1).event("step")
    assert spool.queue.requeue(job, LOST) == "queued"


def test_events_of_ended_attempts_do_not_count() -> None:
    events = [
        ("claimed", 1),
        ("step", 1),
        ("requeued", 1),
        ("step", 1),
        ("claimed", 2),
        ("offered", 1),
        ("offered", 2),
        ("succeeded", 2),
        ("sent", 2),
        ("served", 0),
    ]
    attempts = LivingAttempts()
    admitted = [
        attempts.admits(Event(seq=i, time=0.0, job="j", type=kind, attempt=attempt))
        for i, (kind, attempt) in enumerate(events)
    ]
    assert admitted == [True, True, True, False, True, False, True, True, False, True]
