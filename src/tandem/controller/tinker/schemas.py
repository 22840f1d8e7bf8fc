"""Bodies of Tinker's API in JSON. An unknown key is an error in bodies that train or sample.
Otherwise, the setting under this key would be ignored silently."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tandem.spool.schema import Record

MOST_NUMBER = 2**53
Text = Annotated[str, Field(max_length=256)]
Path = Annotated[str, Field(max_length=512)]
Number = Annotated[int, Field(ge=0, lt=10**9, strict=True)]
Seq = Annotated[int, Field(ge=1, lt=10**8, strict=True)]
Metadata = Annotated[dict[Text, Any], Field(max_length=64)]


class Lenient(BaseModel):
    """A body whose unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Client(Lenient):
    sdk_version: Text = ""


class CreateSession(Client):
    tags: list[Text] = Field(default_factory=list, max_length=64)
    display_name: Text | None = None


class SessionHeartbeat(Lenient):
    session_id: Text


class Finish(Lenient):
    class Reason(Lenient):
        type: Literal["success", "errored", "interrupted"]

    reason: Reason
    detail: Annotated[str, Field(max_length=4096)] | None = None


class LoraConfig(Record):
    rank: int = Field(ge=1, le=1024, strict=True)
    seed: int | None = Field(default=None, ge=0, lt=2**63, strict=True)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Lenient):
    type: Text


class CreateModel(Record):
    session_id: Text
    model_seq_id: Number
    base_model: Annotated[str, Field(max_length=4096)]
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig(type="adamw")
    user_metadata: Metadata | None = None
    type: Literal["create_model"] = "create_model"


class OfModel(Lenient):
    model_id: Text


class AdamParams(Record):
    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, ge=0)


class OptimStep(Record):
    model_id: Text
    seq_id: Seq
    adam_params: AdamParams | None = None
    optimizer_params: OptimizerConfig | None = None
    type: Literal["optim_step"] = "optim_step"


class SaveWeights(Record):
    model_id: Text
    path: Path
    seq_id: Seq
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveForSampler(Record):
    model_id: Text
    path: Path | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    seq_id: Seq
    ttl_seconds: int | None = None
    user_metadata: Metadata | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class LoadWeights(Record):
    """The body of `load_weights`. A body with `model_id` and `seq_id` asks to load weights into an
    existing model; the server refuses this request. A body with `session_id` and `model_seq_id`
    asks to create a model with the weights."""

    model_id: Text | None = None
    seq_id: Seq | None = None
    session_id: Text | None = None
    model_seq_id: Number | None = None
    base_model: Annotated[str, Field(max_length=4096)] | None = None
    user_metadata: Metadata | None = None
    path: Path
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"


class WeightsInfo(Lenient):
    tinker_path: Path


class CreateSampler(Record):
    session_id: Text
    sampling_session_seq_id: Number
    base_model: Annotated[str, Field(max_length=4096)] | None = None
    model_path: Path | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class Chunk(Lenient):
    type: Text = "encoded_text"
    tokens: list[int] = Field(default_factory=list)


class ModelInput(Lenient):
    chunks: list[Chunk]


class SamplingParams(Record):
    max_tokens: int | None = Field(default=None, ge=1, strict=True)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, strict=True)
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = -1
    top_p: float = Field(default=1.0, gt=0, le=1)


class SampleRequest(Record):
    sampling_session_id: Text
    seq_id: int = Field(ge=0, lt=2**63, strict=True)
    num_samples: int = Field(default=1, ge=1, le=1024, strict=True)
    prompt: ModelInput
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0)
    topk_sample_logprobs: int = Field(default=0, ge=0)
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    record_stability_info: bool | None = None
    base_model: Text | None = None
    model_path: Path | None = None
    type: Literal["sample"] = "sample"


class Retrieve(Lenient):
    request_id: Text
