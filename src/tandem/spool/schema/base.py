"""The base of all records: the base class, the types of the names, and the states of a job."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tandem.errors import PATTERN_WORDS

SCHEMA_VERSION = 2
"""The version of the format on the volume. In version 1 a job's files lay in directories by kind
and state."""
STEPS = 10**8
"""A run has fewer steps than this, because a checkpoint's name has eight digits."""

# A run's name becomes a directory name, a vLLM adapter name and a Prometheus label.
RUN_NAME_PATTERN = r"^[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?$"
JOB_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
PATTERN_WORDS |= {
    RUN_NAME_PATTERN: (
        "use lower-case letters, digits, '.', '_' and '-', at most 64; a letter or digit at both"
        " ends"
    ),
    JOB_ID_PATTERN: "use letters, digits, '.', '_' and '-', at most 64; a letter or digit first",
}
SESSION_ID_PATTERN = "^[0-9a-z]{26}$"
SessionId = Annotated[str, Field(pattern=SESSION_ID_PATTERN)]
RunName = Annotated[str, Field(pattern=RUN_NAME_PATTERN)]
JobId = Annotated[str, Field(pattern=JOB_ID_PATTERN)]

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
PENDING: tuple[JobState, ...] = ("queued", "running")
TERMINAL: tuple[JobState, ...] = ("succeeded", "failed", "cancelled")


class Record(BaseModel):
    """Base class of the records: unknown keys, NaN and infinity are errors, and a record is
    immutable."""

    # By default, pydantic would cache the last 16,384 strings that it read. The cache would only
    # cost memory, because no two jobs have the same strings.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, cache_strings="keys"
    )
