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
    method: TuningMethod | None = None  # the training method of the lines; None for results
    lines: int = Field(ge=0)  # lines that are not blank
    size: int = Field(ge=0)  # bytes
    created: float  # Unix seconds


class Hyperparameters(Record):
    """The hyperparameters that the client gave. In a `TuningPlan`, the hyperparameters that the
    training uses. `beta` belongs to DPO only."""

    n_epochs: int | Auto = "auto"
    batch_size: int | Auto = "auto"
    learning_rate_multiplier: float | Auto = "auto"
    beta: float | Auto = "auto"


class TuningPlan(Record):
    """The settings and counts that are derived from a fine-tuning's files after all lines have been
    rendered."""

    hyperparameters: Hyperparameters
    sequence_length: int = Field(ge=2)
    checkpoint_every: int = Field(ge=1)  # the maximum number of optimizer steps of a job
    steps: int = Field(ge=1)  # optimizer steps of all epochs
    parts: int = Field(ge=1)  # number of jobs; each makes the run's next step
    tokens: int = Field(ge=1)  # tokens of all examples, in all epochs
    made: float  # Unix seconds


class TuningEnd(Record):
    """The end of a fine-tuning. If the fine-tuning failed, `code`, `message` and `param` are
    OpenAI's error."""

    status: Literal["succeeded", "failed", "cancelled"]
    finished: float  # Unix seconds
    code: str = ""
    message: str = ""
    param: str | None = None
    result_file: UploadId | None = None


class Notice(Record):
    """A message in the fine-tuning's list of events, about a fact that no job's events report."""

    time: float  # Unix seconds
    level: Literal["info", "warn", "error"] = "info"
    text: str


class Tuning(Record):
    """`tunings/<id>.json`: the client's request, and its progress."""

    schema_version: Literal[1] = 1
    id: TuningId
    created: float  # Unix seconds
    model: str  # the client's name of the model
    run: RunName
    origin: Origin | None = None  # the checkpoint to continue from; None: the base model
    method: TuningMethod
    hyperparameters: Hyperparameters
    seed: int = Field(ge=0)
    suffix: str | None = None
    training_file: UploadId
    validation_file: UploadId | None = None
    metadata: dict[str, str] | None = None
    submitted_by: str | None = None  # the name of the API key
    plan: TuningPlan | None = None  # None until the files are validated
    paused: bool = False
    # Number of pauses so far. A job that a pause cancelled is replaced, after the pause, by a job
    # with a new id.
    pauses: int = Field(default=0, ge=0)
    cancelled: float | None = None  # time of the client's request to cancel, Unix seconds
    notices: list[Notice] = Field(default_factory=list)
    end: TuningEnd | None = None
