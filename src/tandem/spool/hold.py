"""`jobs/hold.json`: the GPUs that trainer and vLLM share are the trainer's now (R4's wake lock).

Written by the runner before it lets vLLM sleep, removed once vLLM is awake again. While it is *live* nobody wakes
vLLM, starts one, or loads anything into it. It is live as long as its runner is: that one holds the spool's runner
lock, which the kernel frees when it dies, and beats in the record, which a runner that hangs doesn't.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from pydantic import ValidationError

from tandem.spool import fs
from tandem.spool.jobs import RunnerInfo
from tandem.spool.locks import file_lock, is_locked
from tandem.spool.schema import Hold

if TYPE_CHECKING:
    from tandem.spool import Spool


class Holds:
    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._path = spool.root / "jobs/hold.json"

    def lock(self, *, blocking: bool = True) -> AbstractContextManager[int]:
        """Kept while the hold changes, and by whoever needs vLLM awake while it works. Not blocking: LockHeldError."""
        return file_lock(self._spool.root / "jobs/locks/gpus", blocking=blocking)

    def get(self) -> Hold | None:
        """The record; None without one, or where it can't be read (no Tandem writes half a record)."""
        content = fs.read_bytes(self._path)
        try:
            return None if content is None else Hold.model_validate_json(content)
        except ValidationError:
            return None

    def put(self, hold: Hold) -> None:
        """Replaces the record, durably."""
        fs.write_json_atomic(self._path, hold)

    def clear(self) -> None:
        fs.remove_file(self._path)

    def live(self) -> Hold | None:
        """The record while its runner lives. Not for the runner itself: asking would drop its own lock."""
        hold = self.get()
        if hold is None or abs(time.time() - hold.beat) > hold.lease:
            return None
        path = self._spool.jobs.runner_lock_path
        try:
            runner = RunnerInfo.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None
        # A runner that was started since is another one, whatever its name is.
        return hold if is_locked(path) and runner.since <= hold.since else None
