"""Waiting for events in other processes."""

import time
from collections.abc import Callable


def until[T](what: str, check: Callable[[], T], timeout: float = 30, poll: float = 0.05) -> T:
    """The first true answer of `check`; AssertionError naming `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (answer := check()):
        assert time.monotonic() < deadline, f"not within {timeout:.0f} s: {what}"
        time.sleep(poll)
    return answer
