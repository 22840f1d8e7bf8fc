"""Reports how long an attempt waits for its ranks to start, and the reason of the wait."""

import time
from collections.abc import Callable
from contextlib import suppress

from tandem.errors import TandemError
from tandem.spool.attempt import Attempt

FIRST_SECONDS = 10.0
"""If an attempt's ranks start within this many seconds, no event `waiting` is written."""
MOST_SECONDS = 600.0
"""The maximum pause between two events, in seconds. The pause doubles with each event up to this
limit, because a reason that contains counts changes all the time."""


class Wait:
    """Writes an event `waiting` for each reason that lasts longer than a few seconds. The phase in
    the lease always shows the current reason."""

    def __init__(self, attempt: Attempt, clock: Callable[[], float]) -> None:
        self._attempt, self._clock = attempt, clock
        self.since: float | None = None  # Unix seconds; None: the attempt does not wait
        self._told = ""
        self._pause = FIRST_SECONDS
        self._next = clock() + FIRST_SECONDS

    def adopt(self) -> None:
        """Continues the wait that an earlier runner has begun."""
        lease = self._attempt.spool.leases.get(self._attempt.job)
        if lease is not None and lease.attempt == self._attempt.number:
            self.since = lease.waits_since
        for event in self._attempt.spool.events.read(self._attempt.job):
            if (event.type, event.attempt) == ("waiting", self._attempt.number):
                self._told = str(event.data.get("reason"))

    def goes_on(self, reason: str) -> None:
        """Records that the attempt still waits, with the reason. Never raises an error, because the
        next call repeats a write that the volume refused."""
        self.since = self.since or time.time()
        if reason == self._told or self._clock() < self._next:
            return
        with suppress(TandemError, OSError):
            seconds = max(time.time() - self.since, 0.0)
            self._attempt.event("waiting", reason=reason, seconds=seconds)
            self._told = reason
            self._pause = min(2 * self._pause, MOST_SECONDS)
            self._next = self._clock() + self._pause

    def ends(self) -> None:
        self.since = None
