"""The record of a run: its base model, what of it is trained, and its origin."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tandem.spool.schema.base import Record, RunName

Serving = Literal["adapter", "merged"]
"""How vLLM serves a run: as an adapter beside the base model, or with the adapter merged into vLLM's own weights."""

Trainable = Literal["lora", "full"]
"""What a run trains: a LoRA adapter, or all weights of its base model."""

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
    trainable: Trainable = "lora"
    lora: LoraShape | None = LoraShape()  # None: all weights are trained
    weights: Serving = "adapter"
    seed: int = Field(default=0, ge=0, lt=2**63)
    created: float  # Unix seconds
    forked_from: Origin | None = None

    @model_validator(mode="after")
    def _an_adapter_or_all_weights(self) -> Self:
        if (self.lora is None) != (self.trainable == "full"):
            raise ValueError("trainable=full needs lora=null, and trainable=lora needs a LoRA shape")
        return self
