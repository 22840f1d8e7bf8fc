"""Records of a run: its specification, the manifests of its checkpoints, and what vLLM serves of it."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tandem.spool.schema.base import Record, RunName

LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA_TARGETS: tuple[LoraTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraShape(Record):
    """`W' = W + alpha / rank * B A` (Hu et al., 2021, arXiv:2106.09685) on each target of each layer."""

    rank: int = Field(default=16, ge=1, le=1024)
    alpha: float = Field(default=32.0, gt=0)
    targets: tuple[LoraTarget, ...] = Field(default=LORA_TARGETS, min_length=1)

    @model_validator(mode="after")
    def _no_duplicate_target(self) -> Self:
        if len(set(self.targets)) != len(self.targets):
            raise ValueError("a target is named twice")
        return self


class Origin(Record):
    """The checkpoint that a forked run was copied from."""

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
    created: float  # Unix seconds
    forked_from: Origin | None = None


class FileEntry(Record):
    size: int  # bytes
    sha256: str  # lower-case hex


class Probe(Record):
    """The trainer's log-probs of fixed token sequences. The publisher compares vLLM's log-probs with them.

    `logprobs[i][j]` is log p(tokens[i][j + 1] | tokens[i][: j + 1]) in nats under this checkpoint, at temperature 1;
    `previous` is the same under the checkpoint before it, `base` with the adapter switched off. The trainer computes
    all three, so that the rounding that vLLM doesn't share cancels out of their differences.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    previous: list[list[float]]
    base: list[list[float]]


class Manifest(Record):
    """`manifest.json`: written last, before the rename that makes the checkpoint exist."""

    schema_version: Literal[1] = 1
    run: RunName
    step: int = Field(ge=0)
    job: str | None  # None: step 0
    created: float  # Unix seconds
    files: dict[str, FileEntry]  # by path relative to the checkpoint's directory
    topology: dict[str, int] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)  # of the job's last optimizer step
    probe: Probe | None = None  # None: the identity adapter, which must equal the base model
    origin: Origin | None = None


class Served(Record):
    """`runs/<run>/served.json`: the step that vLLM serves, and how the publisher verified it."""

    step: int
    model: str  # "<run>@<step>"
    checkpoint: str  # SHA-256 of the adapter file
    verified: float  # Unix seconds
    mean_abs_logprob_error: float  # trainer against vLLM, over the probe's tokens; nats
    tokens_checked: int
    # The newest checkpoint that the publisher refused, and why; the older step stays served.
    refused_step: int | None = None
    refused_reason: str | None = None
