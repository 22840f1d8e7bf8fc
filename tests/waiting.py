"""Waiting for events in other processes."""

import time
from collections.abc import Callable
from contextlib import suppress

import httpx

from tandem.system import processes


def until[T](what: object, check: Callable[[], T], timeout: float = 120, poll: float = 0.05) -> T:
    """Calls `check` again and again, and returns its first true result. Raises AssertionError after
    `timeout` seconds, with `what` in its message. If `what` is a function, `until` calls `what`
    after the timeout, so that the message can name what is still missing.

    The default timeout is long enough even for a machine that is ten times slower than usual.
    The function returns as soon as `check` is true. Until then, `check` may raise httpx.HTTPError,
    for example because the server does not answer yet.
    """
    deadline = time.monotonic() + timeout
    error: httpx.HTTPError | None = None
    while True:
        try:
            if answer := check():
                return answer
        except httpx.HTTPError as failure:
            error = failure
        if time.monotonic() >= deadline:
            awaited = what() if callable(what) else what
            raise AssertionError(f"not within {timeout:.0f} s: {awaited}; {error!r}")
        time.sleep(poll)


def answers(url: str) -> bool:
    """Whether a server answers at `url` with status 200."""
    with suppress(httpx.TransportError):
        return httpx.get(url, timeout=5).status_code == 200
    return False


def alive(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    process = processes.read_process(pid)
    return process is not None and not process.zombie
