"""What goes over the wire, both ways; the client uses the same records. Pydantic only: no FastAPI, numpy or torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from tandem.data.trajectories import AdvantageSettings, Group, PackingSettings, SFTExample
from tandem.spool.schema import (
    JobError,
    JobId,
    JobSpec,
    JobState,
    LoraShape,
    OptimizerSettings,
    Origin,
    Record,
    RLLoss,
    RunName,
    RunSpec,
    Served,
    SFTLoss,
)

LOG_OFFSET_HEADER = "Tandem-Log-Offset"


class ErrorDetail(Record):
    """Why a request was refused."""

    type: str = Field(description="stable word: invalid_input, not_found, conflict, unauthorized, ...")
    message: str
    field: str | None = Field(default=None, description="dotted path of the offending input")


class ErrorBody(Record):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "error": {
                        "type": "invalid_input",
                        "message": "Input should be a finite number (got NaN)",
                        "field": "groups.3.trajectories.0.reward",
                    }
                }
            ]
        }
    )

    error: ErrorDetail


class Health(Record):
    status: Literal["ok"] = "ok"
    version: str


# ---------------------------------------------------------------- runs


class CreateRun(Record):
    """A new run: LoRA weights trained on the deployment's base model, starting at step 0, which changes nothing."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"name": "my-run", "lora": {"rank": 16, "alpha": 32}, "seed": 0}]}
    )

    name: RunName
    base_model: str | None = Field(default=None, description="the deployment's own where it is left out")
    lora: LoraShape = Field(
        default=LoraShape(),
        description="without targets: all seven, or of a mixture of experts those of attention",
    )
    weights: Literal["lora", "merged"] = "lora"
    seed: int = Field(default=0, ge=0, lt=2**63, description="of step 0's weights and of each job's row order")


class RunStatus(Record):
    spec: RunSpec
    newest_step: int = Field(description="the newest checkpoint")
    served: Served | None = Field(description="what vLLM serves and has been verified; null before the first")
    pending: list[str] = Field(description="ids of this run's queued and running jobs, oldest first")


class Fork(Record):
    model_config = ConfigDict(json_schema_extra={"examples": [{"step": 3, "name": "my-run-b"}]})

    step: int = Field(ge=0, description="the checkpoint that becomes step 0 of the new run")
    name: RunName = Field(description="of the new run")


class Rollback(Record):
    model_config = ConfigDict(json_schema_extra={"examples": [{"step": 3}]})

    step: int = Field(ge=0, description="the checkpoint that becomes the newest")


class RolledBack(Record):
    newest_step: int
    discarded: list[int] = Field(description="steps taken out of the chain, newest first")


class CheckpointInfo(Record):
    step: int
    job: str | None = Field(default=None, description="the job that made it; null for step 0")
    created: float | None = Field(default=None, description="Unix seconds")
    size: int | None = Field(default=None, description="bytes of all its files")
    metrics: dict[str, float] = Field(default_factory=dict, description="of the job's last optimizer step")
    origin: Origin | None = None
    damage: str | None = Field(default=None, description="what is wrong with its manifest, where something is")


# ---------------------------------------------------------------- training


class _TrainRequest(Record):
    id: JobId | None = Field(
        default=None,
        description="the client's own; the same id with the same content is one job, with other content a conflict",
    )
    base_step: int | None = Field(
        default=None, ge=0, description="refuse unless the job would start from this step; null: from the newest"
    )
    optimizer: OptimizerSettings = OptimizerSettings()
    packing: PackingSettings = PackingSettings()
    deadline_seconds: float = Field(default=3600.0, gt=0, description="bound of one attempt")
    stall_seconds: float = Field(default=600.0, gt=0, description="ranks without progress for this long hang")
    max_attempts: int = Field(default=3, ge=1, le=100)
    labels: dict[str, str] = Field(default_factory=dict)


class RLRequest(_TrainRequest):
    """Reinforcement learning on groups of trajectories that share a prompt."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "kind": "rl",
                    "groups": [
                        {
                            "trajectories": [
                                {
                                    "turns": [
                                        {"prompt_token_ids": [5, 6], "token_ids": [9, 2], "logprobs": [-0.7, -0.1]}
                                    ],
                                    "reward": 1.0,
                                },
                                {
                                    "turns": [
                                        {"prompt_token_ids": [5, 6], "token_ids": [8, 2], "logprobs": [-0.9, -0.1]}
                                    ],
                                    "reward": 0.0,
                                },
                            ]
                        }
                    ],
                    "optimizer": {"learning_rate": 1e-4},
                }
            ]
        }
    )

    kind: Literal["rl"] = "rl"
    groups: list[Group] = Field(min_length=1)
    loss: RLLoss = RLLoss()
    advantage: AdvantageSettings = AdvantageSettings()


class SFTRequest(_TrainRequest):
    """Supervised fine-tuning; the loss is on the assistant's tokens only."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "kind": "sft",
                    "examples": [
                        {
                            "messages": [
                                {"role": "user", "content": "Is water wet?"},
                                {"role": "assistant", "content": "maybe"},
                            ]
                        }
                    ],
                    "optimizer": {"learning_rate": 1e-3, "epochs": 2},
                }
            ]
        }
    )

    kind: Literal["sft"] = "sft"
    examples: list[SFTExample] = Field(min_length=1)
    loss: SFTLoss = SFTLoss()


TrainRequest = Annotated[RLRequest | SFTRequest, Field(discriminator="kind")]


class JobStatus(Record):
    """A job as the spool shows it now."""

    id: str
    run: str
    kind: Literal["rl", "sft"]
    state: JobState
    attempt: int = Field(description="attempts started so far")
    phase: str | None = Field(default=None, description="what the running attempt does now")
    cancel_requested: bool = False
    step: int | None = Field(default=None, description="the checkpoint made, once succeeded")
    error: JobError | None = Field(default=None, description="why it ended without success")
    last_error: JobError | None = Field(default=None, description="of the attempt before this one")
    finished: float | None = Field(default=None, description="Unix seconds")
    spec: JobSpec
