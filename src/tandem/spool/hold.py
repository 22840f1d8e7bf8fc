"""The hold, `jobs/hold.json`: it says that the GPUs which trainer and vLLM share are the trainer's now.

The runner writes it before vLLM sleeps, and removes it once vLLM is awake again. While the hold is *live*, nobody wakes
vLLM, starts one, or loads anything into it. The hold is live while its runner is alive and makes progress: it holds the
runner lock, which the kernel frees when it dies, and renews the hold's beat, which a hung runner doesn't.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from pydantic import ValidationError

from tandem.spool import fs
from tandem.spool.locks import file_lock, is_locked
from tandem.spool.schema import Hold, RunnerInfo

if TYPE_CHECKING:
    from tandem.spool import Spool


class HoldRecord:
    def __init__(self, spool: Spool) -> None:
        self._paths = spool.paths

    def lock(self, *, blocking: bool = True) -> AbstractContextManager[int]:
        """Held while the hold changes, and by whoever needs vLLM awake while it works. Not blocking: LockHeldError."""
        return file_lock(self._paths.gpus_lock, blocking=blocking)

    def get(self) -> Hold | None:
        """The hold; None without one, or if the file is damaged."""
        try:
            return fs.read_record(self._paths.hold, Hold)
        except ValidationError:
            return None

    def put(self, hold: Hold) -> None:
        """Replaces the hold, durably."""
        fs.write_json_atomic(self._paths.hold, hold)

    def clear(self) -> None:
        fs.remove_file(self._paths.hold)

    def live(self) -> Hold | None:
        """The hold if it is live. The runner itself must not call this: it would drop its own lock (`is_locked`)."""
        hold = self.get()
        if hold is None or abs(time.time() - hold.beat) > hold.lease:
            return None
        try:
            runner = RunnerInfo.model_validate_json(self._paths.runner_lock.read_bytes())
        except (OSError, ValidationError):
            return None
        # A runner that started after the hold was written is another one, even with the same name.
        return hold if is_locked(self._paths.runner_lock) and runner.since <= hold.since else None
