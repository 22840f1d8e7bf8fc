"""What a Hugging Face `config.json` says, reduced to what Tandem builds. No torch here: the controller reads it too.

A family is a row of `FAMILIES`: what its `config.json` leaves unsaid and what sets its layers apart from the others'.
Weight names and how each is cut across tensor-parallel ranks are in `tandem.model.weights.base`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import InvalidInput, UnknownArchitecture
from tandem.spool.schema import LORA_TARGETS, LoraShape


@dataclass(frozen=True)
class Family:
    """What all models of one `model_type` share, beyond RMSNorm, RoPE, grouped-query attention and SwiGLU."""

    qk_norm: bool  # RMSNorm over each query and key head before RoPE
    qkv_bias: bool  # biases on q, k, v (and on nothing else)
    default_head_dim: int | None = None  # where config.json has no head_dim; None: hidden_size / heads
    experts: bool = False  # every layer's MLP is a mixture of experts


EXPERT_TARGETS = ("gate_proj", "up_proj", "down_proj")
"""The LoRA targets in the MLP, of which each expert has its own."""

FAMILIES: dict[str, Family] = {
    "qwen3": Family(qk_norm=True, qkv_bias=False, default_head_dim=128),
    "qwen3_moe": Family(qk_norm=True, qkv_bias=False, default_head_dim=128, experts=True),
    "qwen2": Family(qk_norm=False, qkv_bias=True),
    "llama": Family(qk_norm=False, qkv_bias=False),
    "mistral": Family(qk_norm=False, qkv_bias=False),
}


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's change of RoPE's frequencies for long contexts (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class MoE:
    """Every layer's MLP as a mixture of experts: softmax over all, then the best few for each token."""

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int  # of one expert
    norm_topk_prob: bool  # the chosen experts' probabilities are divided by their sum


@dataclass(frozen=True)
class Arch:
    """The shape of a decoder-only model."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int  # unused where there are experts
    vocab_size: int
    max_positions: int
    tie_embeddings: bool
    rope_theta: float
    rms_norm_eps: float
    qk_norm: bool
    qkv_bias: bool
    rope_scaling: RopeScaling | None = None
    moe: MoE | None = None


def read_arch(model: str) -> Arch:
    """The architecture of `model`, a directory or a hub name; only its `config.json` is read.

    Raises:
        InvalidInput: no such directory or repository, no readable `config.json`, or a value missing from it.
        UnknownArchitecture: a family, or a variant of one, that Tandem doesn't build.
    """
    path = _config_file(model)
    try:
        config = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidInput(f"{path} can't be read as JSON: {error}", field="base_model") from error
    if not isinstance(config, dict):
        raise InvalidInput(f"{path} holds no JSON object", field="base_model")
    return arch_from_config(config, where=str(path))


def arch_from_config(config: dict[str, Any], *, where: str = "config.json") -> Arch:
    """`read_arch` for a config already parsed; `where` is for messages."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or not isinstance(model_type, str):
        raise UnknownArchitecture(
            f"{where} is of model_type {model_type!r}; Tandem knows {', '.join(sorted(FAMILIES))}", field="base_model"
        )
    _refuse_variants(config, model_type, where)

    def number(key: str, kind: type[int] | type[float], default: float | None = None) -> Any:
        value = config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or kind(value) != value or value <= 0:
            raise InvalidInput(f"{where}: {key} is {value!r}, not a positive {kind.__name__}", field="base_model")
        return kind(value)

    hidden, heads = number("hidden_size", int), number("num_attention_heads", int)
    kv_heads = number("num_key_value_heads", int, heads)
    if heads % kv_heads:
        raise InvalidInput(f"{where}: {heads} attention heads don't divide into {kv_heads} groups", field="base_model")
    rope = _rope_parameters(config)
    moe = None
    if family.experts:
        # transformers 5 writes num_local_experts.
        total = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
        moe = MoE(
            num_experts=number(total, int),
            experts_per_token=number("num_experts_per_tok", int),
            ffn_hidden_size=number("moe_intermediate_size", int),
            norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        )
        if moe.experts_per_token > moe.num_experts:
            raise InvalidInput(
                f"{where}: {moe.experts_per_token} experts per token, but there are {moe.num_experts}",
                field="base_model",
            )
    return Arch(
        model_type=model_type,
        num_layers=number("num_hidden_layers", int),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=number("head_dim", int, family.default_head_dim or hidden // heads),
        ffn_hidden_size=number("intermediate_size", int),
        vocab_size=number("vocab_size", int),
        max_positions=number("max_position_embeddings", int, 32768),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rms_norm_eps=number("rms_norm_eps", float, 1e-6),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        rope_scaling=_rope_scaling(rope, where),
        moe=moe,
    )


def lora_modules(arch: Arch, lora: LoraShape) -> dict[str, tuple[int, int]]:
    """Each adapted linear layer's Hugging Face path -> (in_features, out_features), in layer order; of experts, each
    has its own."""
    attention, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    ffn = arch.moe.ffn_hidden_size if arch.moe else arch.ffn_hidden_size
    shapes = {
        "q_proj": (arch.hidden_size, attention),
        "k_proj": (arch.hidden_size, kv),
        "v_proj": (arch.hidden_size, kv),
        "o_proj": (attention, arch.hidden_size),
        "gate_proj": (arch.hidden_size, ffn),
        "up_proj": (arch.hidden_size, ffn),
        "down_proj": (ffn, arch.hidden_size),
    }
    mlps = [f"mlp.experts.{expert}" for expert in range(arch.moe.num_experts)] if arch.moe else ["mlp"]
    return {
        f"model.layers.{layer}.{block}.{target}": shapes[target]
        for layer in range(arch.num_layers)
        for block in ("self_attn", *mlps)
        for target in LORA_TARGETS
        if target in lora.targets and (target in EXPERT_TARGETS) == (block != "self_attn")
    }


def _config_file(model: str) -> Path:
    directory = Path(model)
    if directory.is_dir():
        path = directory / "config.json"
        if not path.is_file():
            raise InvalidInput(f"{directory} has no config.json: not a Hugging Face model", field="base_model")
        return path
    from huggingface_hub import hf_hub_download  # late: a local directory needs no hub client

    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # the client raises a dozen types: bad names, no access, no network, no such file
        raise InvalidInput(
            f"{model!r} is neither a directory nor a model the hub gives us: {error}", field="base_model"
        ) from error


def _refuse_variants(config: dict[str, Any], model_type: str, where: str) -> None:
    """Options of known families that would silently give other logits if they were ignored."""
    sliding = config.get("sliding_window") is not None and config.get("use_sliding_window", model_type == "mistral")
    activation = config.get("hidden_act", "silu")
    unsupported = {
        "biases on attention's projections": model_type != "qwen2" and config.get("attention_bias"),
        "biases in the MLP": config.get("mlp_bias"),
        "sliding-window attention": sliding,
        f"the activation {activation!r}": activation != "silu",
        "quantised weights": config.get("quantization_config"),
        "layers without experts among those with them": config.get("mlp_only_layers")
        or config.get("decoder_sparse_step", 1) != 1,
        "shared experts": any(config.get(key) for key in _SHARED_EXPERTS),
        # Megatron refuses it: such a router's probabilities are all 1.
        "one normalised expert per token": config.get("norm_topk_prob") and config.get("num_experts_per_tok") == 1,
    }
    for what, present in unsupported.items():
        if present:
            raise UnknownArchitecture(f"{where} asks for {what}, which Tandem doesn't build", field="base_model")


_SHARED_EXPERTS = ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts")


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`; before, `rope_theta` stood alone and `rope_scaling` beside it."""
    parameters = dict(config.get("rope_scaling") or {})
    if config.get("rope_theta") is not None:
        parameters["rope_theta"] = config["rope_theta"]
    parameters.update(config.get("rope_parameters") or {})
    return parameters


def _rope_scaling(rope: dict[str, Any], where: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnknownArchitecture(
            f"{where} asks for RoPE scaling {kind!r}; Tandem builds 'default' and 'llama3'", field="base_model"
        )
    try:
        return RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"{where}: rope_parameters of llama3 lack or spoil {error}", field="base_model") from error
