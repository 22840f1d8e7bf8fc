"""Following a job's events across connections that break; no network I/O here."""

import time
from typing import Any

import httpx

from tandem.client.errors import unreachable
from tandem.client.http import CONNECT_SECONDS, Backoff, path
from tandem.spool.schema import TERMINAL, Event

# The controller sends a keep-alive every 10 s; after this long without one the connection is dead.
_SILENCE_SECONDS = 35.0
# Pause before a stream that the controller ended (because it restarts, for example) is opened again.
_REOPEN_SECONDS = 0.5


class EventCursor:
    """One reader's position in a job's events.

    The client opens a stream with `request()`, passes received bytes to `feed`, and calls `pause_after` when the
    connection ends.
    """

    def __init__(self, job: str, after: int, wait: bool, timeout: float, patience: float) -> None:
        self.last = after  # seq of the last event seen
        self.done = not wait  # the terminal event was seen, or the caller does not wait for it
        self.job = job
        self._wait = wait
        self._unfinished_line = b""
        self._timeout = timeout
        self._until = time.monotonic() + timeout
        self._backoff = Backoff(patience)

    def request(self) -> dict[str, Any]:
        """Arguments for httpx's `stream`: the events after the last one seen."""
        self._unfinished_line = b""
        return {
            "method": "GET",
            "url": path("jobs", self.job, "events"),
            "params": {"wait": str(self._wait).lower()},
            "headers": {"Last-Event-ID": str(self.last)},
            "timeout": httpx.Timeout(_SILENCE_SECONDS, connect=CONNECT_SECONDS),
        }

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes; raises TimeoutError after `timeout` seconds, keep-alives included."""
        self._backoff.reset()
        # Split as bytes, because str.splitlines also splits at U+2028 and the like, which text may contain.
        *lines, self._unfinished_line = (self._unfinished_line + data).split(b"\n")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                event = Event.model_validate_json(line.removeprefix(b"data:").strip())
                if event.seq > self.last:
                    self.last = event.seq
                    self.done = self.done or event.type in TERMINAL
                    events.append(event)
        if not self.done:
            self._check_time()
        return events

    def drain(self) -> None:
        """Read what is left without waiting, because the job has ended."""
        self._wait, self.done = False, True

    def pause_after(self, error: httpx.TransportError | None) -> float:
        """Seconds to wait before the next connection; raises Unreachable or TimeoutError.

        `error` is None where the controller ended the stream itself.
        """
        self._check_time()
        return _REOPEN_SECONDS if error is None else self._backoff.next(unreachable(error))

    def _check_time(self) -> None:
        if time.monotonic() > self._until:
            raise TimeoutError(f"job {self.job} did not end within {self._timeout:g} s; it goes on")
