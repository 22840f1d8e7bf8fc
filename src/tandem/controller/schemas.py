"""Requests and responses of the HTTP API, for controller and client. The module needs only
pydantic, not FastAPI, numpy or torch."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from tandem.data.examples import PreferencePair, SFTExample
from tandem.data.inputs import MOST_ITEMS, AdvantageSettings, Group, PackingSettings
from tandem.spool import schema
from tandem.spool.schema import Origin, Record, RunName, RunSpec

LISTED_PENDING = 100
RENDERED = 1000
LONGEST_SECONDS = 1e8
"""The longest time in seconds that a setting may ask for, about three years; ranks can't wait
longer."""
MOST_LABELS = 64
LABEL_NAME_CHARACTERS = 64
LABEL_CHARACTERS = 256
LOG_OFFSET_HEADER = "Tandem-Log-Offset"


def _example(**content: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [content]})


class ErrorDetail(Record):
    """The reason why a request was refused."""

    type: str = Field(
        description="stable word: invalid_input, not_found, conflict, unauthorized, ..."
    )
    message: str
    field: str | None = Field(default=None, description="dotted path of the offending input")


class ErrorBody(Record):
    model_config = _example(
        error={
            "type": "invalid_input",
            "message": "Input should be a finite number (got NaN)",
            "field": "groups.3.trajectories.0.reward",
        }
    )

    error: ErrorDetail


class Health(Record):
    status: Literal["ok"] = "ok"
    version: str


class CreateRun(Record):
    """A new run that trains LoRA adapters on the deployment's base model, or all weights of the
    base model. Step 0 equals the base model."""

    model_config = _example(name="my-run", lora={"rank": 16, "alpha": 32}, seed=0)

    name: RunName
    base_model: str | None = Field(
        default=None, max_length=4096, description="default: the deployment's"
    )
    trainable: schema.Trainable = Field(
        default="lora", description="full: all weights are trained, and `lora` is not given"
    )
    lora: schema.LoraShape = Field(
        default=schema.LoraShape(),
        description="default targets: all linear layers; of a mixture those of attention",
    )
    weights: schema.Serving | None = Field(
        default=None, description="how vLLM serves it; default: the deployment's"
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        strict=True,
        description="of step 0's weights and of each job's row order",
    )


class RunStatus(Record):
    spec: RunSpec
    newest_step: int = Field(description="the newest checkpoint")
    served: schema.Served | None = Field(
        description="the verified step that vLLM serves; null while vLLM has none"
    )
    served_in_chain: bool = Field(
        description=(
            "whether `served` is one of the run's checkpoints; false after a rollback until vLLM"
            " serves another"
        )
    )
    refused: schema.Refused | None = Field(
        default=None, description="the step that the publisher refused; only where `served` is null"
    )
    pending: list[str] = Field(
        description=(
            "ids of this run's running and queued jobs, by base step; only the first"
            f" {LISTED_PENDING}"
        )
    )
    num_pending: int = Field(description="how many jobs are running or queued")
    size: int = Field(
        description=(
            "bytes of all its checkpoints, discarded ones too, and of its whole merged weights"
        )
    )
    shared_gpus: bool = Field(default=False, description="whether vLLM sleeps while a job trains")

    def refused_step(self) -> schema.Refused | None:
        """The newest step that the publisher refused, whether or not an older step is served."""
        return self.refused if self.served is None else self.served.refused or self.refused


class Fork(Record):
    model_config = _example(step=3, name="my-run-b")

    step: int = Field(
        ge=0,
        lt=schema.STEPS,
        strict=True,
        description="the checkpoint that becomes step 0 of the new run",
    )
    name: RunName = Field(description="of the new run")


class Rollback(Record):
    model_config = _example(step=3)

    step: int = Field(
        ge=0, lt=schema.STEPS, strict=True, description="the checkpoint that becomes the newest"
    )


class RolledBack(Record):
    newest_step: int
    discarded: list[int] = Field(description="steps taken out of the chain, newest first")


class CheckpointInfo(Record):
    step: int
    job: str | None = Field(default=None, description="the job that made it; null for step 0")
    created: float | None = Field(default=None, description="Unix seconds")
    size: int | None = Field(default=None, description="bytes of all its files")
    metrics: dict[str, float] = Field(
        default_factory=dict, description="of the job's last optimizer step"
    )
    origin: Origin | None = None
    pinned: bool = Field(
        default=False, description="whether it stays, whatever TANDEM_KEEP_CHECKPOINTS says"
    )
    damage: str | None = Field(
        default=None, description="what is wrong with its manifest; null: nothing"
    )


_LabelName = Annotated[str, Field(max_length=LABEL_NAME_CHARACTERS)]
_Label = Annotated[str, Field(max_length=LABEL_CHARACTERS)]


class _TrainRequest(Record):
    id: schema.JobId | None = Field(
        default=None,
        description=(
            "the client's own; the same id with the same content is one job, with other content a"
            " conflict"
        ),
    )
    base_step: int | None = Field(
        default=None,
        ge=0,
        strict=True,
        description="refuse unless the job would start from this step; null: from the newest",
    )
    optimizer: schema.OptimizerSettings = schema.OptimizerSettings()
    packing: PackingSettings = PackingSettings()
    deadline_seconds: float = Field(
        default=3600.0, gt=0, le=LONGEST_SECONDS, description="limit of one attempt"
    )
    stall_seconds: float = Field(
        default=600.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="ranks without progress for this long count as hung",
    )
    max_attempts: int = Field(default=3, ge=1, le=100)
    labels: dict[_LabelName, _Label] = Field(
        default_factory=dict,
        max_length=MOST_LABELS,
        description="each list of jobs has them",
    )


def _trajectory(token_ids: list[int], logprobs: list[float], reward: float) -> dict[str, Any]:
    turn = {"prompt_token_ids": [5, 6], "token_ids": token_ids, "logprobs": logprobs}
    return {"turns": [turn], "reward": reward}


class RLRequest(_TrainRequest):
    """Reinforcement learning on groups of trajectories that share a prompt."""

    model_config = _example(
        kind="rl",
        groups=[
            {
                "trajectories": [
                    _trajectory([9, 2], [-0.7, -0.1], 1.0),
                    _trajectory([8, 2], [-0.9, -0.1], 0.0),
                ]
            }
        ],
        optimizer={"learning_rate": 1e-4},
    )

    kind: Literal["rl"] = "rl"
    groups: list[Group] = Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)
    loss: schema.RLLoss = schema.RLLoss()
    advantage: AdvantageSettings = AdvantageSettings()
    max_off_policy_steps: int | None = Field(
        default=None,
        ge=0,
        strict=True,
        description=(
            "refuse turns that a step more than this much older than the base step sampled; each"
            " must name it"
        ),
    )


_HELD_OUT = "their loss is computed after the last optimizer step, and not trained"


class SFTRequest(_TrainRequest):
    """Supervised fine-tuning; the loss is on the assistant's tokens only."""

    model_config = _example(
        kind="sft",
        examples=[
            {
                "messages": [
                    {"role": "user", "content": "Is water wet?"},
                    {"role": "assistant", "content": "maybe"},
                ]
            }
        ],
        optimizer={"learning_rate": 1e-3, "epochs": 2},
    )

    kind: Literal["sft"] = "sft"
    examples: list[SFTExample] = Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)
    held_out: list[SFTExample] = Field(
        default=[], max_length=MOST_ITEMS, fail_fast=True, description=_HELD_OUT
    )
    loss: schema.SFTLoss = schema.SFTLoss()


class DPORequest(_TrainRequest):
    """Preference training on pairs of a chosen and a rejected answer: DPO, IPO or SimPO."""

    model_config = _example(
        kind="dpo",
        pairs=[{"prompt": "Is water wet? ", "chosen": "yes", "rejected": "no"}],
        loss={"beta": 0.1},
    )

    kind: Literal["dpo"] = "dpo"
    pairs: list[PreferencePair] = Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)
    held_out: list[PreferencePair] = Field(
        default=[], max_length=MOST_ITEMS, fail_fast=True, description=_HELD_OUT
    )
    loss: schema.PreferenceLoss = schema.PreferenceLoss()


AnyRequest = RLRequest | SFTRequest | DPORequest
TrainRequest = Annotated[AnyRequest, Field(discriminator="kind")]


class RenderRequest(Record):
    """Examples and pairs for a preview of their training."""

    model_config = _example(examples=[{"prompt": "Is water wet?", "completion": " maybe"}])

    examples: list[SFTExample] = Field(default_factory=list, max_length=RENDERED)
    pairs: list[PreferencePair] = Field(default_factory=list, max_length=RENDERED)


class JobStatus(Record):
    """The state of a job on the spool now."""

    id: str
    run: str
    kind: schema.JobKind
    state: schema.JobState
    attempt: int = Field(description="attempts started so far")
    phase: str | None = Field(default=None, description="of the running attempt")
    cancel_requested: bool = False
    step: int | None = Field(default=None, description="the checkpoint that it made")
    error: schema.JobError | None = Field(
        default=None, description="why it failed or was cancelled"
    )
    last_error: schema.JobError | None = Field(default=None, description="of the previous attempt")
    finished: float | None = Field(default=None, description="Unix seconds")
    spec: schema.JobSpec
