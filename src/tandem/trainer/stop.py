"""Pauses and retries, which end when the runner is asked to stop."""

import time
from collections.abc import Callable

from tandem.errors import TandemError
from tandem.spool import fs
from tandem.system import liveness
from tandem.system.logs import Log

log = Log("runner")

LONGEST_PAUSE_SECONDS = 30.0
OTHER_ERROR_SECONDS = 60.0
"""Seconds for which an action is retried after an OSError that the volume did not cause. After
that, a new runner must settle the job."""


class Stop:
    """Whether the runner was asked to stop. The request also ends pauses and retries."""

    def __init__(self) -> None:
        self.requested = False

    def request(self, *_: object) -> None:
        self.requested = True

    def pause(self, seconds: float) -> None:
        liveness.beat("runner")
        end = time.monotonic() + seconds
        while not self.requested and time.monotonic() < end:
            time.sleep(0.1)

    def retry[T](
        self,
        what: str,
        action: Callable[[], T],
        *,
        errors: tuple[type[Exception], ...] = (TandemError, OSError),
        until: str = "the volume is back",
    ) -> T | None:
        """The result of `action`. If `action` raises one of `errors`, `action` is called again
        after a pause. Typical errors come from a volume that is full, unreachable or read-only.

        Returns None if `action` fails after the runner was asked to stop. An error that is not
        retriable is raised immediately. An OSError that the volume did not cause is raised after
        OTHER_ERROR_SECONDS.

        Args:
            what: the action's name in the log. The log gets a line when the action first fails, and
                a line when the action works again.
            action: the function to call.
            errors: the retriable errors.
            until: the awaited state, for the log.
        """
        pause, failed, give_up = 0.5, False, time.monotonic() + OTHER_ERROR_SECONDS
        while True:
            try:
                result = action()
            except errors as error:
                if isinstance(error, TandemError) and not error.retriable:
                    raise
                if (
                    isinstance(error, OSError)
                    and not fs.volume_error(error, "")
                    and time.monotonic() > give_up
                ):
                    raise
                if not failed:
                    log.error(f"can't {what}; trying again until {until}", error=error)
                    failed = True
                if self.requested:
                    return None
                self.pause(pause)
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
            else:
                if failed:
                    log.info(f"could {what} again")
                return result
