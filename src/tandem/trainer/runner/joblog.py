"""A job's log: `jobs/logs/<id>.log`, and the same lines on the runner's stdout for the container's log."""

from __future__ import annotations

import os
import select
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from tandem.system.logs import as_json, json_line
from tandem.system.tail import Tail, last_lines

_LINE_BYTES = 3000
"""Longer lines are cut on stdout: a pipe that is writable takes 4096 bytes at once and in one piece."""
_QUEUED_LINES = 5000


class JobLog:
    """Collects the lines of all logs in an attempt's work directory, with the printing process in front:
    `[rank 0] ...`."""

    def __init__(self, path: Path, work: Path, ranks: int, stdout: JobStdout) -> None:
        self._path = path
        self._stdout = stdout
        self._tails = {"launcher": Tail(work / "launcher.log")}
        self._tails |= {f"rank {rank}": Tail(work / f"rank.{rank}.log") for rank in range(ranks)}

    def collect(self, *, final: bool = False) -> None:
        """Copy what was printed since the last call. `final`: the processes are gone."""
        for name, tail in self._tails.items():
            self._write([f"[{name}] {line}" for line in tail.lines(final=final)])
            if final:
                tail.close()
        self._stdout.write([], timeout=1.0 if final else 0.0)

    def say(self, text: str) -> None:
        """Add a line of the runner's own."""
        self._write([f"[runner] {text}"])

    def last_lines(self) -> str:
        return last_lines(self._path)

    def _write(self, lines: list[str]) -> None:
        if not lines:
            return
        self._stdout.write(lines)
        with suppress(OSError), self._path.open("a") as file:  # the job goes on without its log
            file.write("".join(f"{line}\n" for line in lines))


class JobStdout:
    """Writes a job's lines to `descriptor` without waiting for a slow reader: lines beyond a bound are left out and
    counted. It uses no thread, because the runner forks."""

    def __init__(self, job: str, descriptor: int = 1) -> None:
        self._job = job
        self._descriptor = descriptor
        self._lines: deque[str] = deque()
        self._left_out = 0
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def write(self, lines: list[str], *, timeout: float = 0.05) -> None:
        """Queue `lines` and write queued lines for at most `timeout` seconds. Never raises."""
        free = max(0, _QUEUED_LINES - len(self._lines))
        self._lines.extend(lines[:free])
        self._left_out += len(lines[free:])
        end = time.monotonic() + timeout
        while self._lines or self._left_out:
            try:
                if not self._poll.poll(max(0.0, end - time.monotonic()) * 1000):
                    return
                os.write(self._descriptor, self._formatted(self._next_line()))
            except OSError:
                return  # the reader is gone
            if time.monotonic() > end:
                return

    def _next_line(self) -> str:
        if self._lines:
            return self._lines.popleft()
        left_out, self._left_out = self._left_out, 0
        return f"[runner] {left_out} more lines are only in the job's log"

    def _formatted(self, line: str) -> bytes:
        cut = line.encode(errors="replace")[:_LINE_BYTES].decode(errors="ignore")
        text = json_line("info", "job", cut, job=self._job) if as_json() else f"job {self._job} {cut}"
        return text.encode()[:4095] + b"\n"
