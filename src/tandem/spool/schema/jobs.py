"""Records of a job: its specification, state, result and events, and the files that its runner and
ranks write while it runs."""

import re
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field

from tandem.spool.schema.base import (
    JOB_ID_PATTERN,
    RUN_NAME_PATTERN,
    JobId,
    JobState,
    Record,
    RunName,
)
from tandem.spool.schema.training import (
    OptimizerSettings,
    PackedData,
    PreferenceLoss,
    RLLoss,
    SFTLoss,
)


class _JobSpec(Record):
    schema_version: Literal[1] = 1
    id: JobId
    run: RunName
    base_step: int = Field(ge=0)  # The job starts from this step's checkpoint.
    created: float  # Unix seconds.
    fingerprint: str  # Hash of the client's request, which identifies a repeated request.
    submitted_by: str | None = None  # The name of the API key; None if the key has no name.
    # The runner stops an attempt that takes longer than this many seconds.
    deadline_seconds: float = Field(default=3600.0, gt=0)
    # A rank without a heartbeat for this many seconds counts as hung.
    stall_seconds: float = Field(default=600.0, gt=0)
    max_attempts: int = Field(default=3, ge=1, le=100)
    labels: dict[str, str] = Field(default_factory=dict)


class _BatchJob(_JobSpec):
    data: PackedData
    optimizer: OptimizerSettings = OptimizerSettings()


class RLJob(_BatchJob):
    kind: Literal["rl"] = "rl"
    loss: RLLoss = RLLoss()


class SFTJob(_BatchJob):
    kind: Literal["sft"] = "sft"
    loss: SFTLoss = SFTLoss()


class DPOJob(_BatchJob):
    kind: Literal["dpo"] = "dpo"
    loss: PreferenceLoss = PreferenceLoss()


class SessionJob(_JobSpec):
    """A job that computes the requests of a session's run as they arrive. The job makes any number
    of checkpoints, and ends when no request has arrived for a while."""

    kind: Literal["session"] = "session"
    deadline_seconds: float = Field(default=86400.0, gt=0)  # the ranks exit before the deadline
    max_attempts: int = Field(default=100, ge=1, le=100)


BatchJob = RLJob | SFTJob | DPOJob
"""A job whose data is complete when it is submitted. A batch job makes one checkpoint."""
JobSpec = Annotated[BatchJob | SessionJob, Field(discriminator="kind")]
JobKind = Literal["rl", "sft", "dpo", "session"]


class JobError(Record):
    """The reason why a job did not succeed."""

    # The kind of error: a TandemError.code, or one of rank_crashed, rank_hung, deadline,
    # runner_lost, base_missing, cancelled, ...
    type: str
    message: str
    retriable: bool = False
    log_tail: str = ""


class JobResult(Record):
    state: Literal["succeeded", "failed", "cancelled"]
    step: int | None = None  # the checkpoint that the job made, if it succeeded
    error: JobError | None = None
    finished: float  # Unix seconds


_KEY_PATTERN = re.compile(
    rf"(\d{{16}}),(\d{{8,}}),({RUN_NAME_PATTERN[1:-1]}),({JOB_ID_PATTERN[1:-1]})"
)


class JobKey(NamedTuple):
    """The parts of the name of a job's directory. Listings of jobs read these names instead of
    files. Keys sort in the order of submission."""

    created: int  # Unix microseconds
    base_step: int
    run: str
    id: str

    @property
    def name(self) -> str:
        return f"{self.created:016d},{self.base_step:08d},{self.run},{self.id}"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """The key that `name` contains; None if `name` is not the name of a job's directory."""
        if (match := _KEY_PATTERN.fullmatch(name)) is None:
            return None
        created, base_step, run, job_id = match.groups()
        return cls(int(created), int(base_step), run, job_id)


class Job(Record):
    """`job.json` in the job's directory (`Paths`): everything about the job."""

    spec: JobSpec
    state: JobState = "queued"  # The state is terminal as soon as the job has its result.
    attempt: int = 0  # Number of attempts started so far.
    # Number of attempts that don't count against max_attempts, because they ended when the runner
    # or a host stopped.
    stopped: int = 0
    last_error: JobError | None = None  # error of the previous attempt
    result: JobResult | None = None

    @property
    def key(self) -> JobKey:
        created = int(min(max(0, self.spec.created * 1e6), 10**16 - 1))
        return JobKey(created, self.spec.base_step, self.spec.run, self.spec.id)


EventType = Literal[
    "claimed",
    "waiting",
    "slept",
    "started",
    "loaded",
    "step",
    "evaluated",
    "offered",
    "checkpoint",
    "sent",
    "served",
    "released",
    "woken",
    "requeued",
    "succeeded",
    "failed",
    "cancelled",
]


class Event(BaseModel):
    """One line of a job's `events.jsonl`. `data` contains the fields of this event type
    (docs/jobs.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True, cache_strings="keys")

    seq: int  # 0, 1, 2, ... within the job
    time: float  # Unix seconds
    job: str
    type: EventType
    attempt: int = 0
    data: dict[str, Any] = Field(default_factory=dict)


class RunnerInfo(BaseModel):
    """The content of `jobs/runner.lock`: the runner that holds the lock, or held it last."""

    runner: str
    host: str
    pid: int
    since: float  # Unix seconds


class Lease(BaseModel):
    """`lease.json` in the job's directory: the runner that runs the job. The runner rewrites the
    file while the attempt runs. Unknown keys of a newer version's lease are ignored."""

    schema_version: Literal[1] = 1
    job: JobId
    runner: str
    host: str
    pid: int  # of the runner
    attempt: int
    phase: str
    beat: float  # Unix seconds, by the runner's clock.
    # The time at which the attempt began to wait for its ranks to start, in Unix seconds by the
    # runner's clock; None if the ranks run.
    waits_since: float | None = None

    @property
    def waited(self) -> float | None:
        """Seconds for which the attempt had already waited for its ranks to start when the runner
        wrote the last heartbeat. None if the ranks run."""
        return None if self.waits_since is None else max(self.beat - self.waits_since, 0.0)


class RankMemory(BaseModel):
    """One rank's memory at the end of each phase of an attempt. The phases are sorted by the time
    at which each phase first ended.

    For each phase, a dict contains sizes in bytes. `allocated` and `reserved` are the sizes that
    torch's allocator reports, and `peak` is the maximum of `allocated` within the phase.
    `device_used` is the memory in use on the whole device by all processes. `host_pinned` is the
    pinned host memory. On the CPU, `allocated`, `reserved` and `peak` are the resident set size,
    `device_used` is the machine's memory in use, and `host_pinned` is 0.
    """

    model_config = ConfigDict(frozen=True)

    uuid: str | None = None  # UUID of the rank's device; "cpu" without a device.
    # For each phase, the memory at the last end of the phase.
    phases: dict[str, dict[str, int]] = Field(default_factory=dict)
    # For each phase that ended more than once, the maximum of each size over all ends of the phase.
    highest: dict[str, dict[str, int]] = Field(default_factory=dict)


class Beat(RankMemory):
    """`beat.<rank>` in an attempt's work directory: a rank's heartbeat, with the rank's memory in
    bytes. `memory` has the counters of torch's allocator under the names of the metrics catalogue.
    On the CPU, `memory` has only `allocated` and `reserved`, which are both the resident set size.
    Peaks (`*_peak`) and counts start at the beginning of the attempt."""

    time: float  # Unix seconds
    phase: str
    step: int = 0  # optimizer steps done
    steps: int = 0  # optimizer steps of the job; 0 while unknown
    memory: dict[str, int] = Field(default_factory=dict)
    step_floor: int | None = None  # bytes allocated right after zero_grad
    device_used: int | None = None  # bytes in use on the whole device, by all processes
    device_used_peak: int | None = None  # the maximum of `device_used` that this rank saw


HoldPhase = Literal["sleeping", "training", "releasing"]


class Hold(Record):
    """`jobs/hold.json`: a runner reserves the GPUs that trainer and vLLM share. In the phase
    `sleeping`, the runner waits until the publisher has put vLLM to sleep. The runner gives the
    GPUs back by removing the record."""

    schema_version: Literal[1] = 1
    runner: str
    job: JobId
    attempt: int
    phase: HoldPhase
    since: float  # `since`, `beat` and `deadline` are Unix seconds by the runner's clock
    beat: float
    lease: float  # the runner counts as lost after this many seconds without a new `beat`
    # if the runner is lost, vLLM may be woken after this time regardless of the memory in use
    deadline: float
    # Device UUID -> the bytes of the device's memory that are in use while vLLM sleeps and no rank
    # runs. The dict is empty until the memory is measured, which happens before any rank starts.
    floor: dict[str, int] = Field(default_factory=dict)
