"""Reads the ranks' progress, and the reason of a failure, from the files in an attempt's work
directory."""

import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from tandem.spool import fs
from tandem.spool.attempt import Attempt
from tandem.spool.schema import Beat, JobError
from tandem.system.plain_files import read_plain
from tandem.system.processes import describe_exit
from tandem.trainer.launch import read_exits

GENERIC = "rank_error"
"""The type in an error file for exceptions that are not Tandem's own."""


@dataclass(frozen=True)
class RankProgress:
    rank: int
    silent: float  # seconds since the heartbeat last changed, or since the start
    phase: str  # the phase and the optimizer step; "start" before the first heartbeat

    @property
    def starts(self) -> bool:
        return self.phase == "start"

    def __str__(self) -> str:
        return f"rank {self.rank} (phase {self.phase!r}, silent for {self.silent:.0f} s)"


class Heartbeats:
    """Follows `beat.<rank>` files. A rank makes progress when its file `beat.<rank>` changes; the
    time of the change is measured by this process's clock."""

    def __init__(self, attempt: Attempt, ranks: int) -> None:
        self._attempt = attempt
        self._last = dict.fromkeys(range(ranks), (b"", time.monotonic()))

    def read(self) -> list[RankProgress]:
        """The progress of every rank; the rank that has been silent for the longest time comes
        first."""
        now = time.monotonic()
        ranks = []
        for rank, (content, changed) in self._last.items():
            # the rank has not written the file yet, or the volume is gone: both count as silence
            with suppress(OSError):
                found = read_plain(self._attempt.beat(rank), most=fs.RECORD_BYTES)
                if found != content:
                    content, changed = self._last[rank] = found, now
            phase = "start"
            with suppress(ValidationError):
                beat = Beat.model_validate_json(content)
                phase = f"{beat.phase} {beat.step}"
            ranks.append(RankProgress(rank, now - changed, phase))
        return sorted(ranks, key=lambda progress: -progress.silent)


def failure(status: int, attempt: Attempt) -> JobError:
    """The reason why an attempt without a checkpoint failed. `status`: exit status of the ranks'
    parent.

    The cause is the first of these that exists: an error of Tandem's own, a signal that ended a
    rank, any other exception, an exit status. After a signal has ended a rank, other ranks report
    exceptions about broken connections.
    """
    errors, exits = _rank_errors(attempt), read_exits(attempt.work)
    crashes = [(rank, code) for rank, code in exits.items() if code < 0]
    if errors and (errors[0][1].type != GENERIC or not crashes):
        rank, error = errors[0]
        return error.model_copy(update={"message": f"rank {rank}: {error.message}"})
    if crashes:
        rank, code = crashes[0]
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        message = f"rank {rank} ended with {describe_exit(code)}{hint}"
    elif exits:
        rank, code = next(iter(exits.items()))
        message = (
            f"rank {rank} ended with {describe_exit(code)} and wrote no error file; see the log"
        )
    elif status == 0:
        # Exit status 0 of the ranks' parent does not prove that there is a checkpoint.
        message = "all ranks exited with 0, but the checkpoint that they had to make does not exist"
        return JobError(type="no_checkpoint", message=message, retriable=True)
    else:
        message = f"the parent of the ranks ended with {describe_exit(status)}; see the log"
    return JobError(type="rank_crashed", message=message, retriable=True)


def _rank_errors(attempt: Attempt) -> list[tuple[int, JobError]]:
    """(rank, error) for each error file, with the most likely cause first. Tandem's own errors come
    before other exceptions, and older errors before newer errors of the same kind.

    If a rank fails, other ranks report a broken connection after the failed rank has reported its
    own error.
    """
    errors: list[tuple[bool, float, int, JobError]] = []
    files: dict[int, Path] = {}
    with suppress(OSError):  # the volume is gone
        files = attempt.errors()
    for rank, path in files.items():
        with suppress(OSError, ValidationError):  # the rank was killed while it wrote
            error = JobError.model_validate_json(read_plain(path, most=fs.RECORD_BYTES))
            errors.append((error.type == GENERIC, path.stat().st_mtime, rank, error))
    return [(rank, error) for _, _, rank, error in sorted(errors, key=lambda item: item[:3])]
