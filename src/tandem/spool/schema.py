"""What is written on the volume: runs, jobs, events, checkpoints. JSON, strict, versioned; no secrets ever.

Every path in these records is relative to the spool's root, because containers may mount it at different places.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION = 1

# Names become directory names, vLLM adapter names and Prometheus labels.
RunName = Annotated[str, Field(pattern=r"^[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?$")]
JobId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]

LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA_TARGETS: tuple[LoraTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Record(BaseModel):
    """Base of all records: an unknown key is an error, and a record doesn't change once made."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# ---------------------------------------------------------------- runs


class LoraShape(Record):
    """`W' = W + alpha / rank * B A` (Hu et al., 2021, arXiv:2106.09685) on each target of each layer."""

    rank: int = Field(default=16, ge=1, le=1024)
    alpha: float = Field(default=32.0, gt=0)
    targets: tuple[LoraTarget, ...] = Field(default=LORA_TARGETS, min_length=1)

    @model_validator(mode="after")
    def _targets_once(self) -> LoraShape:
        if len(set(self.targets)) != len(self.targets):
            raise ValueError("a target is named twice")
        return self


class Origin(Record):
    """Where a forked run came from."""

    run: RunName
    step: int = Field(ge=0)


class RunSpec(Record):
    """`runs/<run>/run.json`, written once."""

    schema_version: Literal[1] = 1
    name: RunName
    base_model: str = Field(min_length=1)
    lora: LoraShape = LoraShape()
    weights: Literal["lora", "merged"] = "lora"
    seed: int = Field(default=0, ge=0, lt=2**63)
    created: float
    forked_from: Origin | None = None


# ---------------------------------------------------------------- what a job computes


class RLLoss(Record):
    """The policy loss. Formulas and sources: `tandem.training.losses`."""

    policy: Literal["cispo", "ppo", "gspo"] = "cispo"
    # Ratio bounds are [1 - clip_low, 1 + clip_high]; None means the policy's own default (see `clip_bounds`).
    clip_low: float | None = Field(default=None, ge=0)
    clip_high: float | None = Field(default=None, ge=0)
    # Weighted mean over trainable tokens: weight 1 (token), 1/tokens of the trajectory, or 1/tokens of the group;
    # `constant` divides the plain sum by `normalisation_constant` times the number of trajectories (Dr. GRPO).
    normalisation: Literal["token", "trajectory", "group", "constant"] = "token"
    normalisation_constant: float | None = Field(default=None, gt=0)
    # Whose log-probs are the ratio's denominator: the sampler's, or the trainer's own from a pass before the first
    # optimizer step. Truncated importance sampling needs the trainer's.
    old_logprobs: Literal["sampler", "trainer"] = "sampler"
    tis_cap: float | None = Field(default=None, gt=0)
    kl_coef: float = Field(default=0.0, ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    # The reference: the base model with the adapter off, or a checkpoint (step) of the same run.
    kl_reference: Literal["base"] | int = "base"
    # Measure the KL to the reference even where kl_coef is 0 (one more forward pass without gradients).
    kl_metric: bool = False
    entropy_coef: float = Field(default=0.0, ge=0)
    # Sampling temperature the trajectories were drawn at; logits are divided by it.
    temperature: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> RLLoss:
        if self.tis_cap is not None and self.old_logprobs != "trainer":
            raise ValueError(
                'tis_cap needs old_logprobs="trainer": against the sampler\'s own log-probs the ratio '
                "already corrects the mismatch, and a second factor would apply it twice"
            )
        if (self.normalisation == "constant") != (self.normalisation_constant is not None):
            raise ValueError('normalisation_constant goes with normalisation="constant", and only with it')
        if isinstance(self.kl_reference, int) and self.kl_reference < 0:
            raise ValueError("kl_reference is 'base' or a checkpoint's step >= 0")
        return self

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """(low, high) bounds of the ratio after defaults: PPO [0.8, 1.28] (DAPO's clip-higher), CISPO [0, 5],
        GSPO [1 - 3e-4, 1 + 4e-4]."""
        low, high = {"ppo": (0.2, 0.28), "cispo": (1.0, 4.0), "gspo": (3e-4, 4e-4)}[self.policy]
        low = low if self.clip_low is None else self.clip_low
        high = high if self.clip_high is None else self.clip_high
        return max(0.0, 1.0 - low), 1.0 + high


class SFTLoss(Record):
    """Cross-entropy on the trainable tokens."""

    normalisation: Literal["token", "trajectory"] = "token"


class OptimizerSettings(Record):
    """Adam with decoupled weight decay, on fp32 master weights; constant learning rate within a job."""

    learning_rate: float = Field(default=1e-4, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    # Packed rows per optimizer step over all data-parallel ranks. None: the data-parallel size (R19).
    grad_accumulation_sequences: int | None = Field(default=None, ge=1)
    # Passes over the job's rows. Rows are visited in an order drawn from the run's seed and the base step.
    epochs: int = Field(default=1, ge=1)


class PackedData(Record):
    """`jobs/data/<id>/`: memory-mapped arrays whose format is `tandem.data.packed`."""

    path: str
    num_rows: int = Field(ge=1)
    sequence_length: int = Field(ge=2)
    num_items: int = Field(ge=1)  # trainable tokens, counted once per trajectory that trains them
    num_tokens: int = Field(ge=1)  # tokens stored, padding excluded
    num_unshared_tokens: int = Field(ge=1)  # what they would be without prefix sharing
    num_trajectories: int = Field(ge=1)
    num_groups: int = Field(ge=1)
    dropped_groups: int = Field(default=0, ge=0)  # no variance in their rewards
    dropped_trajectories: int = Field(default=0, ge=0)  # longer than a row, by the stated rule
    truncated_trajectories: int = Field(default=0, ge=0)
    reward_mean: float | None = None
    reward_std: float | None = None
    reward_min: float | None = None
    reward_max: float | None = None


# ---------------------------------------------------------------- jobs

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
TERMINAL: tuple[JobState, ...] = ("succeeded", "failed", "cancelled")


class _JobSpec(Record):
    schema_version: Literal[1] = 1
    id: JobId
    run: RunName
    # Start from checkpoint N; success makes N + 1.
    base_step: int = Field(ge=0)
    created: float
    # Of the client's request, so that the same id with another content is refused.
    fingerprint: str
    # Wall-clock bound of one attempt, in seconds; then the job is stopped and counted as an attempt.
    deadline_seconds: float = Field(default=3600.0, gt=0)
    # No progress (heartbeat) from the ranks for this long, in seconds, means they hang.
    stall_seconds: float = Field(default=600.0, gt=0)
    max_attempts: int = Field(default=3, ge=1, le=100)
    labels: dict[str, str] = Field(default_factory=dict)


class RLJob(_JobSpec):
    kind: Literal["rl"] = "rl"
    data: PackedData
    loss: RLLoss = RLLoss()
    optimizer: OptimizerSettings = OptimizerSettings()


class SFTJob(_JobSpec):
    kind: Literal["sft"] = "sft"
    data: PackedData
    loss: SFTLoss = SFTLoss()
    optimizer: OptimizerSettings = OptimizerSettings()


JobSpec = Annotated[RLJob | SFTJob, Field(discriminator="kind")]


class JobError(Record):
    """Why a job did not succeed."""

    type: str  # TandemError.code, or rank_crashed, rank_hung, deadline, runner_lost, base_missing, cancelled, ...
    message: str
    retriable: bool = False
    log_tail: str = ""


class JobResult(Record):
    state: Literal["succeeded", "failed", "cancelled"]
    step: int | None = None  # the checkpoint made, when succeeded
    error: JobError | None = None
    finished: float


class Job(Record):
    """The file of a job. Its directory (`jobs/<state>/`) is its state; this is everything else."""

    spec: JobSpec
    attempt: int = 0  # attempts started so far
    stopped: int = 0  # of those, ended because the runner was asked to stop; they don't count against max_attempts
    last_error: JobError | None = None  # of the attempt before
    result: JobResult | None = None


class RankProcess(Record):
    """A process of an attempt, so that a later runner can tell whether it still lives: the pid alone may be reused."""

    pid: int
    start_time: float  # field 22 of /proc/<pid>/stat: clock ticks after boot


class Lease(Record):
    """`jobs/leases/<id>.json`: who runs the job, beaten while it runs."""

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
    """What one rank held at the end of each phase of an attempt; the phases are in the order in which they came, from
    the first that has used the device.

    Each is a dict of bytes: `allocated` and `reserved` by torch's allocator, `device_used` on the whole device by
    anybody, `host_pinned`, and `peak`, the most allocated within the phase. On the CPU `allocated`, `reserved` and
    `peak` are the resident set, `device_used` is the machine's memory, and nothing is pinned.
    """

    model_config = ConfigDict(frozen=True)

    uuid: str | None = None  # of the rank's device; "cpu" where it has none
    phases: dict[str, dict[str, int]] = Field(default_factory=dict)  # when the phase last ended
    highest: dict[str, dict[str, int]] = Field(default_factory=dict)  # of all its ends, where it came more than once


class Beat(RankMemory):
    """`beat.<rank>` in an attempt's work directory: a rank's sign of life, with what it knows about its memory.

    All bytes. `memory` holds the counters and bytes of torch's allocator by the catalogue's names; on the CPU only
    `allocated` and `reserved`, the resident set. `*_peak` is since the attempt began.
    """

    time: float  # Unix seconds
    phase: str
    step: int = 0  # optimizer steps done
    steps: int = 0  # that there are; 0: not known yet
    memory: dict[str, int] = Field(default_factory=dict)
    step_floor: int | None = None  # allocated right after zero_grad
    device_used: int | None = None  # in use on the whole device, by anybody
    device_used_peak: int | None = None  # the most this rank has seen


HoldPhase = Literal["sleeping", "training", "releasing", "waking"]


class Hold(Record):
    """`jobs/hold.json`: a runner has the GPUs that it shares with vLLM."""

    schema_version: Literal[1] = 1
    runner: str
    job: JobId
    attempt: int
    phase: HoldPhase
    since: float  # Unix seconds, by the runner's clock, as the others
    beat: float
    lease: float  # seconds without a beat after which the runner counts as lost
    deadline: float  # after which vLLM may be woken whatever is in use, where the runner is lost
    # Bytes in use per device UUID while vLLM sleeps and no rank runs; empty until measured: nothing was started yet.
    floor: dict[str, int] = Field(default_factory=dict)


EventType = Literal[
    "claimed", "slept", "started", "loaded", "step", "checkpoint", "published", "served", "released", "woken",
    "requeued", "succeeded", "failed", "cancelled",
]  # fmt: skip


class Event(BaseModel):
    """One line of `jobs/events/<id>.jsonl`. `data` holds the type's own fields (docs/jobs.md lists them)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seq: int  # 0, 1, 2, ... within the job
    time: float  # Unix seconds
    job: str
    type: EventType
    attempt: int = 0
    data: dict[str, Any] = Field(default_factory=dict)


# ---------------------------------------------------------------- checkpoints


class FileEntry(Record):
    size: int
    sha256: str


class Probe(Record):
    """What the trainer computed for fixed token sequences, so that the publisher can check what vLLM really serves.

    `logprobs[i][j]` is log p(tokens[i][j + 1] | tokens[i][: j + 1]) in nats under this checkpoint, at temperature 1;
    `previous` is the same under the checkpoint it started from, `base` with the adapter switched off (empty in
    manifests of before it was kept). All three are the trainer's: rounding that trainer and vLLM do not share would
    otherwise pass for a way that the adapter moved.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    previous: list[list[float]]
    base: list[list[float]] = Field(default_factory=list)


class Manifest(Record):
    """`manifest.json` of a checkpoint: written last, before the rename that makes the checkpoint exist."""

    schema_version: Literal[1] = 1
    run: RunName
    step: int = Field(ge=0)
    job: str | None  # None: the identity checkpoint, or a fork
    created: float
    files: dict[str, FileEntry]  # relative to the checkpoint's directory
    topology: dict[str, int] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)  # of the job's last optimizer step
    probe: Probe | None = None  # None: step 0, which must equal the base model
    origin: Origin | None = None


class Served(Record):
    """`runs/<run>/served.json`: what vLLM serves now, and how that was verified."""

    step: int
    model: str  # "<run>@<step>"
    checkpoint: str  # sha256 of the adapter file
    verified: float  # Unix seconds
    mean_abs_logprob_error: float  # trainer against vLLM, over the probe's tokens; nats
    tokens_checked: int
    # A checkpoint that was refused, and why; the older step stays served.
    refused_step: int | None = None
    refused_reason: str | None = None
