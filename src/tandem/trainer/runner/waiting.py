"""An attempt's wait for its ranks' start: how long, and for what."""

import time
from collections.abc import Callable
from contextlib import suppress

from tandem.errors import TandemError
from tandem.spool.attempt import Attempt

FIRST_SECONDS = 10.0
"""Attempts that start sooner tell no reason."""
MOST_SECONDS = 600.0
"""The pause before the next event doubles up to here: reasons with counts in them change all the
time."""


class Wait:
    """Reports each reason that lasts as an event `waiting`. The phase in the lease is the current
    reason."""

    def __init__(self, attempt: Attempt, clock: Callable[[], float]) -> None:
        self._attempt, self._clock = attempt, clock
        self.since: float | None = None  # Unix seconds; None: it does not wait
        self._told = ""
        self._pause = FIRST_SECONDS
        self._next = clock() + FIRST_SECONDS

    def adopt(self) -> None:
        """Goes on with the wait that an earlier runner has begun."""
        lease = self._attempt.spool.leases.get(self._attempt.job)
        if lease is not None and lease.attempt == self._attempt.number:
            self.since = lease.waits_since
        for event in self._attempt.spool.events.read(self._attempt.job):
            if (event.type, event.attempt) == ("waiting", self._attempt.number):
                self._told = str(event.data.get("reason"))

    def goes_on(self, reason: str) -> None:
        """Never raises: what the volume doesn't take is tried again."""
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
