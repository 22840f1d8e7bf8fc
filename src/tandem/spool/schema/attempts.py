"""Records of what runs now: the runner's lock, lease and hold, and the ranks' heartbeats."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tandem.spool.schema.base import JobId, Record


class RunnerInfo(BaseModel):
    """The content of `jobs/runner.lock`: the runner that holds, or last held, the lock."""

    runner: str
    host: str
    pid: int
    since: float  # Unix seconds


class RankProcess(Record):
    """A process of an attempt. The start time tells it from a later process with the same pid."""

    pid: int
    start_time: float  # field 22 of /proc/<pid>/stat: clock ticks after boot


class Lease(Record):
    """`jobs/leases/<id>.json`: the runner that runs the job. The runner rewrites it while the attempt runs."""

    schema_version: Literal[1] = 1
    job: JobId
    runner: str
    host: str
    pid: int  # of the runner
    attempt: int
    phase: str
    beat: float  # Unix seconds, by the runner's clock
    ranks: list[RankProcess] = Field(default_factory=list)


class RankMemory(BaseModel):
    """What one rank held at the end of each phase of an attempt. Phases are in the order of their first end, from the
    first that used the device.

    Each phase has a dict of bytes: `allocated` and `reserved` by torch's allocator, `device_used` on the whole device
    by all processes, `host_pinned`, and `peak`, the most allocated within the phase. On the CPU `allocated`,
    `reserved` and `peak` are the resident set, `device_used` is the machine's memory, and `host_pinned` is 0.
    """

    model_config = ConfigDict(frozen=True)

    uuid: str | None = None  # of the rank's device; "cpu" without a device
    phases: dict[str, dict[str, int]] = Field(default_factory=dict)  # when the phase last ended
    highest: dict[str, dict[str, int]] = Field(default_factory=dict)  # over all its ends, if it ended more than once


class Beat(RankMemory):
    """`beat.<rank>` in an attempt's work directory: a rank's heartbeat, with its memory in bytes.

    `memory` holds the counters of torch's allocator by the metrics catalogue's names; on the CPU only `allocated` and
    `reserved`, both the resident set. `*_peak` is since the attempt began.
    """

    time: float  # Unix seconds
    phase: str
    step: int = 0  # optimizer steps done
    steps: int = 0  # optimizer steps of the job; 0: not known yet
    memory: dict[str, int] = Field(default_factory=dict)
    step_floor: int | None = None  # allocated right after zero_grad
    device_used: int | None = None  # in use on the whole device, by all processes
    device_used_peak: int | None = None  # the most that this rank saw


HoldPhase = Literal["sleeping", "training", "releasing", "waking"]


class Hold(Record):
    """`jobs/hold.json`: a runner has the GPUs that it shares with vLLM."""

    schema_version: Literal[1] = 1
    runner: str
    job: JobId
    attempt: int
    phase: HoldPhase
    since: float  # Unix seconds by the runner's clock, as are `beat` and `deadline`
    beat: float
    lease: float  # the runner counts as lost after this many seconds without a beat
    deadline: float  # if the runner is lost, vLLM may be woken after this time whatever is in use
    # Bytes in use per device UUID while vLLM sleeps and no rank runs; empty until measured: no rank started yet.
    floor: dict[str, int] = Field(default_factory=dict)
