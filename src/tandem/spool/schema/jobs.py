"""Records of a job: its specification, its state, its result and its events."""

import re
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field

from tandem.spool.schema.base import JOB_ID_PATTERN, RUN_NAME_PATTERN, JobId, Record, RunName
from tandem.spool.schema.training import OptimizerSettings, PackedData, PreferenceLoss, RLLoss, SFTLoss


class _JobSpec(Record):
    schema_version: Literal[1] = 1
    id: JobId
    run: RunName
    base_step: int = Field(ge=0)  # the job starts from this checkpoint, and makes the next
    created: float  # Unix seconds
    fingerprint: str  # of the client's request: the same id with another fingerprint is refused
    data: PackedData
    optimizer: OptimizerSettings = OptimizerSettings()
    # Most seconds that one attempt may take. The runner stops a longer one.
    deadline_seconds: float = Field(default=3600.0, gt=0)
    # The runner takes ranks for hung after this many seconds without a heartbeat.
    stall_seconds: float = Field(default=600.0, gt=0)
    max_attempts: int = Field(default=3, ge=1, le=100)
    labels: dict[str, str] = Field(default_factory=dict)


class RLJob(_JobSpec):
    kind: Literal["rl"] = "rl"
    loss: RLLoss = RLLoss()


class SFTJob(_JobSpec):
    kind: Literal["sft"] = "sft"
    loss: SFTLoss = SFTLoss()


class DPOJob(_JobSpec):
    kind: Literal["dpo"] = "dpo"
    loss: PreferenceLoss = PreferenceLoss()


JobSpec = Annotated[RLJob | SFTJob | DPOJob, Field(discriminator="kind")]
JobKind = Literal["rl", "sft", "dpo"]


class JobError(Record):
    """Why a job did not succeed."""

    type: str  # TandemError.code, or rank_crashed, rank_hung, deadline, runner_lost, base_missing, cancelled, ...
    message: str
    retriable: bool = False
    log_tail: str = ""


class JobResult(Record):
    state: Literal["succeeded", "failed", "cancelled"]
    step: int | None = None  # the checkpoint that the job made, if it succeeded
    error: JobError | None = None
    finished: float  # Unix seconds


_KEY_PATTERN = re.compile(rf"(\d{{16}}),(\d{{8,}}),({RUN_NAME_PATTERN[1:-1]}),({JOB_ID_PATTERN[1:-1]})")


class JobKey(NamedTuple):
    """What the name of a job's file says, so that listings need not read the file. Keys sort by submission."""

    created: int  # Unix microseconds
    base_step: int
    run: str
    id: str

    @property
    def name(self) -> str:
        return f"{self.created:016d},{self.base_step:08d},{self.run},{self.id}"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """The key with this name, or None for another name."""
        if (match := _KEY_PATTERN.fullmatch(name)) is None:
            return None
        created, base_step, run, job_id = match.groups()
        return cls(int(created), int(base_step), run, job_id)


class Job(Record):
    """A job's file (`Paths.job_file`). Its directory is the job's state; the file holds everything else."""

    spec: JobSpec
    attempt: int = 0  # attempts started so far
    stopped: int = 0  # attempts that ended because the runner stopped; they don't count against max_attempts
    last_error: JobError | None = None  # of the attempt before
    result: JobResult | None = None

    @property
    def key(self) -> JobKey:
        created = int(min(max(0, self.spec.created * 1e6), 10**16 - 1))
        return JobKey(created, self.spec.base_step, self.spec.run, self.spec.id)


EventType = Literal[
    "claimed", "slept", "started", "loaded", "step", "evaluated", "offered", "checkpoint", "sent", "served", "released",
    "woken", "requeued", "succeeded", "failed", "cancelled",
]  # fmt: skip


class Event(BaseModel):
    """One line of `jobs/events/<id>.jsonl`. `data` holds the fields of this type of event (docs/jobs.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True, cache_strings="keys")

    seq: int  # 0, 1, 2, ... within the job
    time: float  # Unix seconds
    job: str
    type: EventType
    attempt: int = 0
    data: dict[str, Any] = Field(default_factory=dict)
