"""Records of runs, of the manifests of their checkpoints (with probes), and of the steps that vLLM
serves."""

from hashlib import sha256
from itertools import pairwise
from typing import Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from tandem.spool.schema.base import STEPS, Record, RunName, SessionId

Serving = Literal["adapter", "merged"]
"""How vLLM serves a run: as an adapter beside the base model, or with the adapter merged into
vLLM's own weights."""

Trainable = Literal["lora", "full"]
"""The trained weights of a run: a LoRA adapter, or all weights of its base model."""

LoraTarget = Literal[
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "out_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
]
LORA_TARGETS: tuple[LoraTarget, ...] = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
DELTA_NET_TARGETS: tuple[LoraTarget, ...] = (
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "out_proj",
)
"""The additional targets of models with gated delta nets."""
LATENT_TARGETS: tuple[LoraTarget, ...] = (
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
)
"""The additional targets of models with latent attention."""


class LoraShape(Record):
    """`W' = W + alpha / rank * B A` (Hu et al., 2021, arXiv:2106.09685) on each target of each
    layer."""

    rank: int = Field(default=16, ge=1, le=1024)
    # By default, `alpha` is twice the rank, so that the scale does not depend on the rank. Records
    # always contain the value of `alpha`.
    alpha: float = Field(default_factory=lambda before: 2.0 * before["rank"], gt=0)
    targets: tuple[LoraTarget, ...] = Field(
        default=LORA_TARGETS, min_length=1, max_length=len(get_args(LoraTarget))
    )

    @model_validator(mode="after")
    def _no_duplicate_target(self) -> Self:
        if len(set(self.targets)) != len(self.targets):
            raise ValueError("a target is named twice")
        return self


class Origin(Record):
    """The checkpoint from which a forked run was copied."""

    run: RunName
    step: int = Field(ge=0)


class RunSpec(Record):
    """`runs/<run>/run.json`, written once."""

    schema_version: Literal[1] = 1
    name: RunName
    base_model: str = Field(min_length=1)
    trainable: Trainable = "lora"
    lora: LoraShape | None = LoraShape()  # None: all weights are trained
    weights: Serving = "adapter"
    seed: int = Field(default=0, ge=0, lt=2**63)
    created: float  # Unix seconds
    forked_from: Origin | None = None
    # The session whose requests make this run's checkpoints; None if jobs make this run's
    # checkpoints.
    session: SessionId | None = None

    @model_validator(mode="after")
    def _an_adapter_or_all_weights(self) -> Self:
        if (self.lora is None) != (self.trainable == "full"):
            raise ValueError(
                "trainable=full needs lora=null, and trainable=lora needs a LoRA shape"
            )
        return self


class FileEntry(Record):
    size: int = Field(ge=0, lt=2**63)  # bytes
    sha256: str  # lower-case hex


class LongProbe(Record):
    """The trainer's log-probs of a few tokens in one long sequence, in nats at temperature 1.

    `logprobs[i]` is log p(tokens[positions[i]] | tokens[: positions[i]]) under this checkpoint;
    `positions` are ascending. A long sequence shows differences between trainer and vLLM that
    appear only after many tokens (a sliding window, a scaled RoPE).
    """

    tokens: list[int]
    positions: list[int]
    logprobs: list[float]

    @model_validator(mode="after")
    def _positions_are_tokens(self) -> Self:
        bounds = [0, *self.positions, len(self.tokens)]
        if any(a >= b for a, b in pairwise(bounds)):
            raise ValueError(
                f"positions must ascend from 1 or more to less than {len(self.tokens)}"
            )
        return self


class Probe(Record):
    """The trainer's log-probs of fixed token sequences. The publisher compares vLLM's log-probs
    with the trainer's log-probs.

    The trainer computes all three kinds of log-probs: `logprobs`, `previous` and `base`. All three
    kinds contain the trainer's rounding errors, which vLLM does not share. The trainer's rounding
    errors cancel in the difference of two kinds of log-probs.
    """

    tokens: list[list[int]]  # Token sequences.
    # `logprobs[i][j]` is log p(tokens[i][j + 1] | tokens[i][: j + 1]) in nats under this
    # checkpoint, at temperature 1.
    logprobs: list[list[float]]
    previous: list[list[float]]  # Like `logprobs`, but under the previous checkpoint.
    # Like `logprobs`, but without the adapter; equal to `previous` if the run trains all weights.
    base: list[list[float]]
    long: LongProbe | None = None  # None if the job's rows are not longer than `tokens`


class Manifest(Record):
    """`manifest.json`: the file is written last, before the rename that commits the checkpoint."""

    schema_version: Literal[1] = 1
    run: RunName
    step: int = Field(ge=0)
    job: str | None  # None for step 0
    created: float  # Unix seconds
    files: dict[str, FileEntry]  # keyed by the path relative to the checkpoint's directory
    topology: dict[str, int] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    # metrics of the job's last optimizer step
    metrics: dict[str, float] = Field(default_factory=dict)
    probe: Probe | None = None  # None for step 0, whose weights must equal the base model's
    origin: Origin | None = None
    seq: int | None = None  # number of the last session request whose effect is in the weights

    @property
    def weights_files(self) -> dict[str, FileEntry]:
        """The files of the weights: the adapter's file, or the files of a whole model. The dict is
        empty if the checkpoint has the base model's weights."""
        return {
            name: entry
            for name, entry in self.files.items()
            if name.endswith(".safetensors") and "/" not in name
        }

    @property
    def weights_sha256(self) -> str:
        """A hash that identifies the weights. For one file, the hash is the file's SHA-256. For
        several files or none, the hash is the SHA-256 of the files' hashes."""
        hashes = [entry.sha256 for _, entry in sorted(self.weights_files.items())]
        return hashes[0] if len(hashes) == 1 else sha256("".join(hashes).encode()).hexdigest()

    @field_validator("files")
    @classmethod
    def _files_are_inside(cls, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
        for name in files:
            if "\0" in name or len(name) > 255 or {"", ".."} & set(name.split("/")):
                raise ValueError(f"{name!r:.100} is not a path below the checkpoint")
        return files


class Served(Record):
    """`runs/<run>/served.json`: the step that vLLM serves, and the result of the publisher's
    verification."""

    step: int = Field(ge=0, lt=STEPS)
    model: str  # "<run>@<step>"
    weights: Serving = "adapter"
    transport: str = "lora"  # How the weights reached vLLM.
    checkpoint: str  # SHA-256 of the weights (`Manifest.weights_sha256`).
    # Inode and mtime (ns) of the manifest's file, so that readers need not open the file again.
    manifest: tuple[int, int] | None = None
    verified: float  # Unix seconds
    # mean |difference| of the log-probs of trainer and vLLM over the probe's tokens, in nats
    mean_abs_logprob_error: float
    # The limit, in nats, on the mean error of the closest tokens (`verify.COMPARED`). A step with a
    # larger mean error is not served.
    allowed_logprob_error: float
    tokens_checked: int
    # The seconds that each part of publishing took: `copy`, `load` and `verify`. For merged
    # weights, `load` includes `stage`, `drain` and `swap`. The entry `since_checkpoint` is the time
    # from the commit of the checkpoint to `verified`. `since_checkpoint` is long if a publisher or
    # vLLM started after the commit.
    seconds: dict[str, float] = Field(default_factory=dict)
    # The newest refused checkpoint, if it is newer than the served step, and the reason.
    refused_step: int | None = None
    refused_reason: str | None = None

    @property
    def refused(self) -> "Refused | None":
        """The newest refused step, if it is newer than the served step; None if there is no such
        step."""
        if self.refused_step is None:
            return None
        return Refused(step=self.refused_step, reason=self.refused_reason or "")


class Refused(Record):
    """`runs/<run>/refused.json`: the newest step that the publisher refused. The file exists only
    while vLLM serves no step of the run."""

    step: int = Field(ge=0, lt=STEPS)
    reason: str
