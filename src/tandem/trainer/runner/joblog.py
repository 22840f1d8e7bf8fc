"""A job's log: the file `log` in its directory, and the same lines on the runner's stdout, for the
container's log."""

import os
import select
import time
from collections import Counter
from contextlib import suppress

from tandem.spool.attempt import Attempt
from tandem.system.logs import as_json, json_line
from tandem.system.plain_files import descriptor, open_plain
from tandem.system.tail import Tail, last_lines
from tandem.trainer.launch import LAUNCHER_LOG, of_parent

_LINE_CHARACTERS = 3000
"""Longer lines are cut on stdout."""
_PIECE_BYTES = 4096
"""A pipe that is writable accepts this many bytes at once and in one piece."""


class JobStdout:
    """Writes a job's lines to `descriptor` without waiting for a slow reader. Lines that the
    descriptor does not accept are dropped and counted. The class uses no thread, because the runner
    forks."""

    def __init__(self, job: str, descriptor: int = 1) -> None:
        self._job = job
        self._descriptor = descriptor
        self._left_out = 0
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def write(self, lines: list[str], *, timeout: float = 0.05) -> None:
        """Write `lines`, up to the first line that the reader does not accept in time. Never
        raises."""
        end = time.monotonic() + timeout
        left_out = f"[runner] {self._left_out} more lines are only in the job's log"
        if self._left_out and self._write_line(left_out, end):
            self._left_out = 0
        for line in lines:
            if self._left_out or not self._write_line(line, end):
                self._left_out += 1

    def _write_line(self, line: str, end: float) -> bool:
        with suppress(OSError):  # the reader has closed the pipe
            if self._poll.poll(max(0.0, end - time.monotonic()) * 1000):
                return os.write(self._descriptor, self._piece(line)) > 0
        return False

    def _piece(self, line: str) -> bytes:
        cut, piece = line[:_LINE_CHARACTERS], b""
        while not piece or len(piece) > _PIECE_BYTES:
            text = (
                json_line("info", "job", cut, job=self._job)
                if as_json()
                else f"job {self._job} {cut}"
            )
            piece = f"{text}\n".encode(errors="replace")
            cut = cut[: len(cut) // 2]
        return piece


class JobLog:
    """Collects the lines of all logs in an attempt's work directory. Each line gets the name of its
    process as a prefix, such as `[rank 0]`."""

    def __init__(self, attempt: Attempt, ranks: int, hosts: int | None = None) -> None:
        """
        Args:
            ranks: the number of ranks on all hosts.
            hosts: the number of hosts whose agents start the ranks; None: the runner starts the
                ranks.
        """
        self._path = attempt.spool.paths.log_file(attempt.job)
        self._stdout = JobStdout(attempt.job)
        work = attempt.work
        self._tails = {"launcher": Tail(work / LAUNCHER_LOG)}
        if hosts is not None:
            self._tails = {
                f"host {host}": Tail(of_parent(work, LAUNCHER_LOG, host)) for host in range(hosts)
            }
        self._tails |= {f"rank {rank}": Tail(attempt.log(rank)) for rank in range(ranks)}

        self._copied = Counter[str]()  # source -> number of lines that an earlier runner has copied

    def go_on(self, attempt: int) -> None:
        """Skip the attempt's lines that an earlier runner has already copied."""
        with suppress(OSError), open_plain(self._path) as file:
            for line in file:
                source, bracket, _ = line.decode(errors="replace").partition("] ")
                if line.startswith(f"[runner] attempt {attempt} (".encode()):
                    self._copied.clear()
                elif bracket and source.startswith("["):
                    self._copied[source[1:]] += 1

    def collect(self, *, final: bool = False) -> None:
        """Copy the lines that were printed since the last call. `final`: whether all processes have
        ended."""
        for name, tail in self._tails.items():
            with suppress(OSError):  # the volume is gone: the job continues without its log
                while lines := tail.lines(final=final):
                    seen = min(self._copied[name], len(lines))
                    self._copied[name] -= seen
                    self._write([f"[{name}] {line}" for line in lines[seen:]])
                    # Later calls of `collect` copy the remaining lines, so that the runner can
                    # watch its jobs between the calls.
                    if not final:
                        break
            if final:
                tail.close()
        if final:
            self._stdout.write([], timeout=1.0)

    def say(self, text: str) -> None:
        """Add a line of the runner itself."""
        self._write([f"[runner] {text}"])

    def last_lines(self) -> str:
        return last_lines(self._path)

    def _write(self, lines: list[str]) -> None:
        self._stdout.write(lines)
        with suppress(OSError):  # the job continues without its log
            fd = descriptor(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            with os.fdopen(fd, "a", errors="replace") as file:
                file.write("".join(f"{line}\n" for line in lines))
