"""What an attempt came to: heartbeats and error files read, exit statuses put into words. Touches no process."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tandem.spool.paths import beat_file, error_files
from tandem.spool.schema import JobError
from tandem.system.processes import describe_exit

GENERIC = "rank_error"
"""The type of an error file whose exception was not one of Tandem's own."""


@dataclass(frozen=True)
class Beat:
    rank: int
    silent: float  # seconds since the heartbeat last changed, or since the start where there was none
    phase: str  # "start" before the first heartbeat

    def __str__(self) -> str:
        return f"rank {self.rank} (phase {self.phase!r}, silent for {self.silent:.0f} s)"


class Heartbeats:
    """Follows `beat.<rank>` files. A beat counts when its content changes, by this process's own clock: the ranks' or
    the volume's clock may be off."""

    def __init__(self, work: Path, ranks: int) -> None:
        self._work = work
        now = time.monotonic()
        self._seen: dict[int, tuple[bytes, float]] = dict.fromkeys(range(ranks), (b"", now))

    def read(self) -> list[Beat]:
        """The state of every rank, the longest silent first."""
        now = time.monotonic()
        for rank, (before, _) in self._seen.items():
            try:
                content = beat_file(self._work, rank).read_bytes()
            except OSError:
                continue  # not there yet, or the volume is gone: both are silence
            if content != before:
                self._seen[rank] = (content, now)
        beats = [Beat(rank, now - since, _phase(content)) for rank, (content, since) in self._seen.items()]
        return sorted(beats, key=lambda beat: -beat.silent)


def _phase(content: bytes) -> str:
    try:
        beat: dict[str, Any] = json.loads(content)
        step = beat.get("step")
        return str(beat["phase"]) if step is None else f"{beat['phase']} {step}"
    except (ValueError, KeyError, TypeError):
        return "start"


def rank_errors(work: Path) -> list[tuple[int, JobError]]:
    """The error files of the ranks, the most telling first: Tandem's own errors before others, then by age. (A rank
    whose peer failed reports the broken connection, and later.)"""
    found: list[tuple[bool, float, int, JobError]] = []
    for rank, path in error_files(work).items():
        try:
            error = JobError.model_validate_json(path.read_bytes())
            found.append((error.type == GENERIC, path.stat().st_mtime, rank, error))
        except (OSError, ValidationError):
            continue  # half written by a rank that was killed while it wrote
    found.sort(key=lambda item: item[:3])
    return [(rank, error) for _, _, rank, error in found]


def failure(code: int, exits: dict[int, int], errors: list[tuple[int, JobError]]) -> JobError:
    """Why an attempt without a checkpoint failed.

    `code`: exit status of the job's top process; `exits`: of the ranks that failed by themselves, first failure first;
    `errors`: `rank_errors`. In order of what explains most: an error of Tandem's own; a rank that a signal ended (its
    peers then report broken connections); any other exception; the exit status.
    """
    own = [(rank, error) for rank, error in errors if error.type != GENERIC]
    crashed = [(rank, status) for rank, status in exits.items() if status < 0]
    failed = [(rank, status) for rank, status in exits.items() if status > 0]
    if own:
        return _named(*own[0])
    if crashed:
        rank, status = crashed[0]
        hint = " (out of memory?)" if status == -signal.SIGKILL else ""
        message = f"rank {rank} ended with {describe_exit(status)}{hint}"
    elif errors:
        return _named(*errors[0])
    elif failed:
        rank, status = failed[0]
        message = f"rank {rank} ended with {describe_exit(status)} and left no reason; see the log"
    elif code == 0:
        # R28: a clean exit is no proof of anything.
        message = "all ranks exited with 0, but the checkpoint they were to make does not exist"
        return JobError(type="no_checkpoint", message=message, retriable=True)
    else:
        message = f"the process that starts the ranks ended with {describe_exit(code)}; see the log"
    return JobError(type="rank_crashed", message=message, retriable=True)


def _named(rank: int, error: JobError) -> JobError:
    return error.model_copy(update={"message": f"rank {rank}: {error.message}"})
