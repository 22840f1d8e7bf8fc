"""Reads the files of an agent's attempt on the volume, to find out when the agent's ranks have to
end. A thread reads the volume, because a read of an unreachable volume may wait for ever. The agent
must be able to end its ranks even while a read of the volume waits."""

import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from tandem.errors import TandemError
from tandem.spool import fs
from tandem.spool.schema import JobError
from tandem.trainer.agent.hosts import (
    FAILED,
    FENCED,
    STOPPED,
    UNUSABLE,
    AgentOrder,
    HostBeat,
    Meeting,
)

LOOK_SECONDS = 0.5
FROZEN_SECONDS = 7.0
"""The agent calls `leave` at much shorter intervals than FROZEN_SECONDS. A longer pause between two
calls means that the agent's processes were frozen. The frozen time does not count as silence of the
runner or the volume."""


@dataclass(frozen=True)
class Leave:
    """The reason why an agent has to end its ranks."""

    status: int
    why: str
    error: JobError | None = None
    at_once: bool = False
    """Whether the ranks are ended by SIGKILL, without time to finish their work."""


class AttemptWatch(threading.Thread):
    def __init__(self, meeting: Meeting, host: int, order: AgentOrder) -> None:
        super().__init__(daemon=True)
        self._meeting, self._host, self._order = meeting, host, order
        self._done = threading.Event()
        self._open, self._asked, self._failed = True, "", -1
        self._answered = self._lease_changed = self._asked_at = time.monotonic()
        self._lease: bytes | None = None
        self._beats = 0
        self.running_since: float | None = None

    def run(self) -> None:
        while not self._done.is_set():
            with suppress(OSError, TandemError):
                self._look()
            self._done.wait(LOOK_SECONDS)

    def close(self) -> None:
        self._done.set()

    def _look(self) -> None:
        self._open = self._open and self._meeting.is_open()
        lease = fs.read_bytes(self._meeting.lease)
        self._asked = self._meeting.asked()
        for host in set(range(self._order.hosts)) - {self._host}:
            if (end := self._meeting.end(host)) is not None and end.status and self._failed < 0:
                self._failed = host
        now = self._answered = time.monotonic()
        if lease != self._lease:
            self._lease, self._lease_changed = lease, now
        self._beats += 1
        since = self.running_since
        beat = HostBeat(count=self._beats, seconds=None if since is None else now - since)
        self._meeting.write(self._host, beat)

    def leave(self) -> Leave | None:
        """The reason why the ranks have to end; None if they may go on. Doesn't block."""
        now, orphan = time.monotonic(), self._order.orphan_seconds
        if (frozen := now - self._asked_at) > FROZEN_SECONDS:
            self._answered += frozen
            self._lease_changed += frozen
        self._asked_at = now
        if not self._open:
            return Leave(FENCED, "the attempt was ended", at_once=True)
        if now - self._answered > orphan:
            why = f"the volume has not answered for {orphan:g} s"
            return Leave(UNUSABLE, why, at_once=True)
        # Only a successful read sets `_answered` and `_lease_changed`, so the silence of the volume
        # does not count as silence of the runner.
        if self._answered - self._lease_changed > orphan:
            why = f"the runner has not renewed the job's lease for {orphan:g} s"
            error = JobError(type="runner_lost", message=why, retriable=True)
            return Leave(FENCED, why, error, at_once=True)
        if self._asked:
            return Leave(STOPPED, "the runner asks to stop", at_once=self._asked == "kill")
        if self._failed >= 0:
            return Leave(FAILED, f"the ranks of host {self._failed} failed")
        return None
