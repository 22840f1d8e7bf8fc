"""The tests check which operations the runner retries, and for how long."""

import errno
import math

import pytest

from tandem.errors import Conflict, SpoolUnusable
from tandem.trainer import stop
from tandem.trainer.stop import Stop


@pytest.fixture
def clock(monkeypatch):
    """A clock in a list. Pauses of `Stop` take no time, but the clock adds up their lengths in
    seconds."""
    now = [0.0]
    monkeypatch.setattr(stop.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Stop, "pause", lambda self, seconds: now.__setitem__(0, now[0] + seconds))
    return now


def failing(error: Exception, seconds: float, clock: list[float]):
    def action():
        if clock[0] < seconds:
            raise error
        return "done"

    return action


@pytest.mark.parametrize(
    "error", [SpoolUnusable("full"), OSError(errno.ENOSPC, "full"), OSError(errno.ESTALE, "stale")]
)
def test_a_volume_is_waited_for_as_long_as_it_takes(clock, error):
    assert Stop().retry("write", failing(error, 86400, clock)) == "done"


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EINVAL, "no"), FileNotFoundError(errno.ENOENT, "gone"), OSError("numpy")],
)
def test_another_error_of_the_system_is_not_waited_for_for_ever(clock, error):
    assert Stop().retry("write", failing(error, 20, clock)) == "done"
    clock[0] = 0.0
    with pytest.raises(OSError, match=str(error.args[-1])):
        Stop().retry("write", failing(error, math.inf, clock))
    assert 30 < clock[0] < 300


def test_an_error_that_can_not_be_repaired_is_raised_at_once(clock):
    with pytest.raises(Conflict):
        Stop().retry("write", failing(Conflict("no"), 10, clock))
    assert clock[0] == 0.0
