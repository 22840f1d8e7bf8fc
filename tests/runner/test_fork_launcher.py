"""The runner's side of the fork server by itself."""

import os
import signal
import time

import pytest

from runner.runner_stack import HERE
from tandem.trainer.launch import Launch
from tandem.trainer.launch.fork import ForkLauncher


@pytest.fixture
def launcher():
    launcher = ForkLauncher(os.environ | {"PYTHONPATH": str(HERE)}, entry="waiting_rank")
    yield launcher
    launcher.close()


def launch(launcher, root, seconds):
    work = root / f"work-{seconds}"
    work.mkdir()
    return launcher.launch(Launch(root, str(seconds), 1, 1, work, "waiting_rank"))


def until(check, seconds=60):
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("told", ["before the next launch is asked for", "after it"])
def test_late_news_of_a_killed_launch_is_not_taken_for_the_next_ones(launcher, tmp_path, told):
    """The fork server may report the end of killed ranks only when nobody waits for it any more."""
    killed = launch(launcher, tmp_path, 600)
    until(lambda: killed.poll() is None and len(killed.processes()) == 2)  # the leader and its rank
    server = launcher._server.pid
    os.kill(server, signal.SIGSTOP)
    assert killed.kill_all(10) == []
    assert killed.poll() is None  # it can't say so yet
    if told == "after it":
        following = launch(launcher, tmp_path, 0.5)
        os.kill(server, signal.SIGCONT)
    else:
        os.kill(server, signal.SIGCONT)
        time.sleep(0.5)  # long enough to say it
        following = launch(launcher, tmp_path, 0.5)
    until(lambda: following.poll() is not None)
    assert following.poll() == 0
    assert not following.rank_exits()
