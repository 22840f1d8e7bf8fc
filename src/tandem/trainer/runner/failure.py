"""Why an attempt failed, from its ranks' exit statuses and error files."""

from __future__ import annotations

import signal
from pathlib import Path

from pydantic import ValidationError

from tandem.spool.paths import rank_files
from tandem.spool.schema import JobError
from tandem.system.processes import describe_exit

GENERIC = "rank_error"
"""The type in an error file for exceptions that are not Tandem's own."""


def rank_errors(work: Path) -> list[tuple[int, JobError]]:
    """(rank, error) of each error file, the likeliest cause first: Tandem's own errors before others, then by age.

    A rank whose peer failed reports a broken connection, and does so later.
    """
    errors: list[tuple[bool, float, int, JobError]] = []
    for rank, path in rank_files(work, "error").items():
        try:
            error = JobError.model_validate_json(path.read_bytes())
            errors.append((error.type == GENERIC, path.stat().st_mtime, rank, error))
        except (OSError, ValidationError):
            continue  # the rank was killed while it wrote
    errors.sort(key=lambda item: item[:3])
    return [(rank, error) for _, _, rank, error in errors]


def failure(status: int, exits: dict[int, int], errors: list[tuple[int, JobError]]) -> JobError:
    """Why an attempt without a checkpoint failed.

    `status`: exit status of the ranks' parent; `exits`: see `launch.read_exits`; `errors`: see `rank_errors`. The first
    of these that applies is the cause: an error of Tandem's own; a rank that a signal ended, because its peers then
    report broken connections; any other exception; an exit status.
    """
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
        message = f"rank {rank} ended with {describe_exit(code)} and wrote no error file; see the log"
    elif status == 0:
        # R28: a clean exit proves nothing.
        message = "all ranks exited with 0, but the checkpoint that they had to make does not exist"
        return JobError(type="no_checkpoint", message=message, retriable=True)
    else:
        message = f"the parent of the ranks ended with {describe_exit(status)}; see the log"
    return JobError(type="rank_crashed", message=message, retriable=True)
