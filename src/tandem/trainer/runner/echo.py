"""A job's log lines on the runner's own stdout, so that the container's log has them too.

Nothing waits for it: where whoever reads our stdout is slower than the ranks print, lines are left out and counted. The
whole log is the job's file. No thread, since the runner forks.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque

from tandem.system.logs import as_json, json_line

_LONGEST = 3000
"""Bytes of a line. A pipe that takes anything takes 4096 bytes, at once and in one piece."""
_WAITING = 5000
_PATIENCE_SECONDS = 0.05


class Echo:
    """Writes lines of one job to `descriptor`."""

    def __init__(self, job: str, descriptor: int = 1) -> None:
        self._job = job
        self._descriptor = descriptor
        self._lines: deque[str] = deque()
        self._left_out = 0
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def add(self, lines: list[str], *, patience: float = _PATIENCE_SECONDS) -> None:
        """Lines as the job's log has them, `[rank 0] ...`; written now or by a later call. Takes `patience` seconds at
        most; raises nothing."""
        room = max(0, _WAITING - len(self._lines))
        self._lines.extend(lines[:room])
        self._left_out += max(0, len(lines) - room)
        end = time.monotonic() + patience
        while self._lines or self._left_out:
            try:
                if not self._poll.poll(max(0.0, end - time.monotonic()) * 1000):
                    return
                os.write(self._descriptor, self._formatted(self._next()))
            except OSError:
                return  # nobody reads any more
            if time.monotonic() > end:
                return

    def _next(self) -> str:
        if self._lines:
            return self._lines.popleft()
        left_out, self._left_out = self._left_out, 0
        return f"[runner] {left_out} more lines stand in the job's log only"

    def _formatted(self, line: str) -> bytes:
        cut = line.encode(errors="replace")[:_LONGEST].decode(errors="ignore")
        text = json_line("info", "job", cut, job=self._job) if as_json() else f"job {self._job} {cut}"
        return text.encode()[:4095] + b"\n"
