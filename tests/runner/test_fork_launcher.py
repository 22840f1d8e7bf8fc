"""The runner's side of the fork server by itself."""

import os
import signal
import sys
import time

import pytest

from runner.runner_stack import HERE
from tandem.trainer.launch import Launch
from tandem.trainer.launch.fork import ForkServer


@pytest.fixture
def server():
    server = ForkServer("waiting_rank", os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])})
    yield server
    server.close()


def launch(server, root, seconds):
    work = root / f"work-{seconds}"
    work.mkdir()
    return server.launch(Launch(root, str(seconds), 1, 1, work, "waiting_rank"))


def until(check, seconds=60):
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("told", ["before the next launch is asked for", "after it"])
def test_late_news_of_a_killed_launch_is_not_taken_for_the_next_ones(server, tmp_path, told):
    """The fork server may report the end of killed ranks only when nobody waits for it any more."""
    killed = launch(server, tmp_path, 600)
    until(lambda: killed.poll() is None and len(killed.processes()) == 2)  # the leader and its rank
    os.kill(server.pid, signal.SIGSTOP)
    assert killed.kill_all(10) == []
    assert killed.poll() is None  # it can't say so yet
    if told == "after it":
        following = launch(server, tmp_path, 0.5)
        os.kill(server.pid, signal.SIGCONT)
    else:
        os.kill(server.pid, signal.SIGCONT)
        time.sleep(0.5)  # long enough to say it
        following = launch(server, tmp_path, 0.5)
    until(lambda: following.poll() is not None)
    assert following.poll() == 0
