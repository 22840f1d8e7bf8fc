"""Errors that users see. Each error says what was wrong, where, and what to do."""

import errno
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

_WORDS = {
    "extra_forbidden": "no such key; correct or remove it",
    "missing": "is missing; add it",
    "union_tag_not_found": "kind is missing; add rl, sft or dpo",
}
"""The message for each of these error types of pydantic. The message says what to do."""

PATTERN_WORDS: dict[str, str] = {}
"""The message if a text does not match a regular expression, by the regular expression."""


class TandemError(Exception):
    """The base class of all errors that Tandem raises on purpose.

    `code` is a stable identifier for programs, and is the `type` of HTTP errors and of failed jobs.
    `field` is the dotted path of the wrong input (`groups.3.trajectories.0.reward`) or the name of
    the wrong setting, if there is one. `retriable`: whether trying the same job again can help. In
    a subclass, class arguments set the attributes that differ from the base class.
    """

    code = "error"
    http_status = 500
    retriable = False

    def __init_subclass__(
        cls, *, code: str = "", http_status: int = 0, retriable: bool = False
    ) -> None:
        cls.code = code or cls.code
        cls.http_status = http_status or cls.http_status
        cls.retriable = retriable or cls.retriable

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidInput(TandemError, code="invalid_input", http_status=422):
    """The input is wrong, independent of the state of the system."""


class NothingToLearn(InvalidInput, code="nothing_to_learn"):
    """The job can't change the policy. Either nothing is left to train, or no optimizer step
    changed the policy. Nothing is left to train if all groups were dropped for their equal rewards,
    or all trajectories for their length."""


class RequestTooLarge(InvalidInput, code="request_too_large", http_status=413): ...


class UnknownArchitecture(InvalidInput, code="unknown_architecture"): ...


class NotFound(TandemError, code="not_found", http_status=404): ...


class Conflict(TandemError, code="conflict", http_status=409):
    """The input is valid but does not fit the present state (an id in use, a step that is not the
    newest)."""


class Unauthorized(TandemError, code="unauthorized", http_status=401): ...


class CheckpointDamaged(TandemError, code="checkpoint_damaged"):
    """A checkpoint file is missing, truncated or altered. A job that needs the checkpoint fails.
    The adapter is never silently reset."""


class RunDamaged(CheckpointDamaged, code="run_damaged"):
    """A run's `run.json` is missing or damaged, or the run has no checkpoint. Lists of runs leave
    out a damaged run. Other runs are not affected."""


class SpoolUnusable(TandemError, code="spool_unusable", http_status=503, retriable=True):
    """The volume can't be used: read-only, full, not a directory, or held by another runner."""


class VolumeFull(SpoolUnusable):
    """The volume has no space left. A program that can't start on a full volume waits until there
    is free space."""

    ERRNOS = errno.ENOSPC, errno.EDQUOT
    """The errno values that mean a full volume."""


class HubUnreachable(TandemError, code="hub_unreachable", http_status=503, retriable=True):
    """The model hub did not answer, or did not send the files."""


class JobFailed(TandemError, code="job_failed"):
    """A job ended `failed` or `cancelled`. Clients that wait for a job raise this error.

    Args:
        message: describes the error, and ends with the last lines of the job's log if there are
            any.
        reason: the type of the job's error (`rank_crashed`, `deadline`, `cancelled`, ...).
    """

    def __init__(
        self, message: str, *, field: str | None = None, job_id: str = "", reason: str = ""
    ) -> None:
        super().__init__(message, field=field)
        self.job_id = job_id
        self.reason = reason


class NotServed(TandemError, code="not_served"):
    """vLLM does not serve a checkpoint. Either the publisher refused the checkpoint (StepRefused),
    or the client's timeout has passed. Clients that wait for a step raise this error."""


class StepRefused(NotServed, code="step_refused"):
    """The publisher refused a checkpoint. Clients that wait for the refused checkpoint raise this
    error. The checkpoint may be served later, because the publisher tries all refused checkpoints
    again after a restart of vLLM.

    Args:
        served: the run's step that vLLM serves; None: vLLM serves no step of the run.
    """

    def __init__(
        self, message: str, *, field: str | None = None, served: int | None = None
    ) -> None:
        super().__init__(message, field=field)
        self.served = served


class Unreachable(TandemError, code="unreachable", http_status=503, retriable=True):
    """The controller did not answer, even after several tries. Clients raise this error."""


def from_validation_error(error: "ValidationError") -> InvalidInput:
    """Converts pydantic's first error to InvalidInput, with the place of the error as `field`."""
    errors = error.errors()
    # The place of the error leaves out the tags of unions, which are not keys of a request.
    return invalid_input(
        errors, [part for part in errors[0]["loc"] if not str(part).startswith("as ")]
    )


def invalid_input(errors: Sequence[Mapping[str, Any]], path: Sequence[str | int]) -> InvalidInput:
    """Converts pydantic's first error to InvalidInput, with `path` as `field`. The message also
    gives the number of further errors."""
    first = errors[0]
    known = _WORDS.get(first["type"]) or PATTERN_WORDS.get(first.get("ctx", {}).get("pattern", ""))
    message = known or str(first["msg"]).removeprefix("Value error, ")
    value = first.get("input")
    if isinstance(value, str | int | float | bool) and first["type"] not in (
        "value_error",
        *_WORDS,
    ):
        shown = json.dumps(value) if isinstance(value, float) else repr(value)
        message += f" (got {shown if len(shown) <= 60 else shown[:60] + '…'})"
    if len(errors) > 1:
        message += f"; and {len(errors) - 1} more error{'s' if len(errors) > 2 else ''}"
    return InvalidInput(message, field=".".join(map(str, path)) or None)
