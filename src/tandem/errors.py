"""Errors that reach people. Each says what was wrong, where, and what to do."""

from __future__ import annotations


class TandemError(Exception):
    """Base of every error Tandem raises on purpose.

    `code` is a stable machine-readable word (it is the `type` in HTTP errors and in failed jobs); `field` names the
    offending input as a dotted path (`groups.3.trajectories.0.reward`) where there is one; `retriable` says whether
    trying the same job again can help.
    """

    code = "error"
    http_status = 500
    retriable = False

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidInput(TandemError):
    """The input is wrong whatever the state of the system."""

    code = "invalid_input"
    http_status = 422


class NothingToLearn(InvalidInput):
    """Every group was dropped (no variance in its rewards, or too long): there is no gradient to compute."""

    code = "nothing_to_learn"


class NotFound(TandemError):
    code = "not_found"
    http_status = 404


class Conflict(TandemError):
    """The input is fine but does not fit the present state (an id in use, a step that is not the newest)."""

    code = "conflict"
    http_status = 409


class Unauthorized(TandemError):
    code = "unauthorized"
    http_status = 401


class RequestTooLarge(InvalidInput):
    code = "request_too_large"
    http_status = 413


class UnknownArchitecture(InvalidInput):
    code = "unknown_architecture"


class CheckpointDamaged(TandemError):
    """A checkpoint file is missing, truncated or altered (R16: the job fails; LoRA is never silently reset)."""

    code = "checkpoint_damaged"


class SpoolUnusable(TandemError):
    """The volume can't be used: read-only, full, not a directory, or held by another runner."""

    code = "spool_unusable"
    http_status = 503
    retriable = True


class JobFailed(TandemError):
    """A job ended `failed` or `cancelled`; raised by clients that wait for one.

    `job_id` is the job's; `reason` its error's type (`rank_crashed`, `deadline`, `cancelled`, ...); the message ends
    with the tail of the job's log where there is one.
    """

    code = "job_failed"

    def __init__(self, message: str, *, field: str | None = None, job_id: str = "", reason: str = "") -> None:
        super().__init__(message, field=field)
        self.job_id = job_id
        self.reason = reason


class NotServed(TandemError):
    """A checkpoint was refused by the publisher, or not served in the time given; raised by clients that wait."""

    code = "not_served"


class Unreachable(TandemError):
    """The controller did not answer, however often it was asked; raised by clients."""

    code = "unreachable"
    http_status = 503
    retriable = True
