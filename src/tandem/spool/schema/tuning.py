"""Records of OpenAI's fine-tuning API: uploaded files, and fine-tunings. Each fine-tuning is a
chain of jobs."""

from typing import Annotated, Literal

from pydantic import Field

from tandem.spool.schema.base import Record, RunName
from tandem.spool.schema.runs import Origin

ULID = "[0-9A-HJKMNP-TV-Z]{26}"
UploadId = Annotated[str, Field(pattern=f"^file-{ULID}$")]
TuningId = Annotated[str, Field(pattern=f"^ftjob-{ULID}$")]
TuningMethod = Literal["supervised", "dpo"]
Auto = Literal["auto"]


class Upload(Record):
    """`uploads/<id>/file.json`."""

    schema_version: Literal[1] = 1
    id: UploadId
    filename: str
    purpose: Literal["fine-tune", "fine-tune-results"]
    method: TuningMethod | None = None  # what its lines are for; None: results
    lines: int = Field(ge=0)  # that are not blank
    size: int = Field(ge=0)  # bytes
    created: float  # Unix seconds


class Hyperparameters(Record):
    """Hyperparameters as the client gave them; in a `TuningPlan` as they are used. `beta` belongs
    to DPO only."""

    n_epochs: int | Auto = "auto"
    batch_size: int | Auto = "auto"
    learning_rate_multiplier: float | Auto = "auto"
    beta: float | Auto = "auto"


class TuningPlan(Record):
    """The settings and counts that follow from the files, once all lines have been rendered."""

    hyperparameters: Hyperparameters
    sequence_length: int = Field(ge=2)
    checkpoint_every: int = Field(ge=1)  # optimizer steps of a job, at most
    steps: int = Field(ge=1)  # optimizer steps of all epochs
    parts: int = Field(ge=1)  # jobs; each makes the run's next step
    tokens: int = Field(ge=1)  # of all examples, in all epochs
    made: float  # Unix seconds


class TuningEnd(Record):
    """The end of a fine-tuning. `code`, `message` and `param` are OpenAI's error if it failed."""

    status: Literal["succeeded", "failed", "cancelled"]
    finished: float  # Unix seconds
    code: str = ""
    message: str = ""
    param: str | None = None
    result_file: UploadId | None = None


class Notice(Record):
    """A message among the events about something that no job's events tell."""

    time: float  # Unix seconds
    level: Literal["info", "warn", "error"] = "info"
    text: str


class Tuning(Record):
    """`tunings/<id>.json`: the client's order, and its progress."""

    schema_version: Literal[1] = 1
    id: TuningId
    created: float  # Unix seconds
    model: str  # as the client named it
    run: RunName
    origin: Origin | None = None  # the checkpoint that it goes on from; None: the base model
    method: TuningMethod
    hyperparameters: Hyperparameters
    seed: int = Field(ge=0)
    suffix: str | None = None
    training_file: UploadId
    validation_file: UploadId | None = None
    metadata: dict[str, str] | None = None
    submitted_by: str | None = None  # the name of the API key
    plan: TuningPlan | None = None  # None: its files are not validated yet
    paused: bool = False
    pauses: int = Field(default=0, ge=0)  # so far; each gives cancelled parts other ids
    cancelled: float | None = None  # when the client asked for it, Unix seconds
    notices: list[Notice] = Field(default_factory=list)
    end: TuningEnd | None = None
