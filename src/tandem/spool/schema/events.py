"""Records of a job's events."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

EventType = Literal[
    "claimed", "slept", "started", "loaded", "step", "checkpoint", "served", "released", "woken", "requeued",
    "succeeded", "failed", "cancelled",
]  # fmt: skip


class Event(BaseModel):
    """One line of `jobs/events/<id>.jsonl`. `data` holds the fields of this type of event (docs/jobs.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seq: int  # 0, 1, 2, ... within the job
    time: float  # Unix seconds
    job: str
    type: EventType
    attempt: int = 0
    data: dict[str, Any] = Field(default_factory=dict)
