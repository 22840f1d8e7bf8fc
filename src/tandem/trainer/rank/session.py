"""The objects that a rank has from its start: its attempt, device, heartbeat and clock."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from tandem.model import device
from tandem.spool.attempt import Attempt
from tandem.spool.schema import EventType
from tandem.trainer.launch import RankSettings
from tandem.trainer.rank.heartbeat import Heartbeat
from tandem.training.phases import MemoryWatch, Phases


class Session:
    """One rank in one attempt."""

    def __init__(self, attempt: Attempt, settings: RankSettings) -> None:
        self.attempt, self.settings = attempt, settings
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = device.activate(
            device.choose(settings.device), int(os.environ.get("LOCAL_RANK", "0"))
        )
        watch = MemoryWatch()
        self.heartbeat = Heartbeat(attempt.beat(self.rank), watch)
        self.phases = Phases(self.heartbeat, watch)

    def beat(self, phase: str) -> Callable[[], None]:
        """Returns a function that writes a heartbeat for this phase."""
        return partial(self.heartbeat, phase)

    def event(self, kind: EventType, **data: Any) -> None:
        """Append an event to the job's events. Does nothing on ranks other than rank 0."""
        if self.rank == 0:
            self.attempt.event(kind, **data)
