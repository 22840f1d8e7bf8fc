"""The families that Tandem supports. `FAMILIES` maps a config's `model_type` to its family."""

import functools
from pathlib import Path
from typing import Any

from tandem.errors import UnknownArchitecture
from tandem.families import (
    gemma3,
    gemma4,
    glm4_moe,
    gpt_oss,
    ministral3,
    mla,
    olmo3,
    qwen3_5,
    qwen3_vl,
    seed_oss,
    smollm3,
)
from tandem.families.arch import Arch
from tandem.families.decoder import Decoder
from tandem.families.model_config import ModelConfig
from tandem.families.weight_rules import WeightRule

_QWEN = {
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
_QWEN_MOE = {"num_key_value_heads": 4, "sliding_window": 4096, "use_sliding_window": False}
FAMILIES: dict[str, Decoder] = {
    family.model_type: family
    for family in (
        Decoder("llama", {"max_position_embeddings": 2048}),
        ministral3.MISTRAL,
        Decoder("qwen2", _QWEN, qkv_bias=True),
        Decoder("qwen3", {**_QWEN, "head_dim": 128}, qk_norm=True),
        Decoder("qwen3_moe", _QWEN_MOE, qk_norm=True, mixture=True),
        gemma3.FAMILY,
        gemma4.FAMILY,
        gemma4.TEXT,
        glm4_moe.FAMILY,
        gpt_oss.FAMILY,
        mla.GLM,
        mla.DEEPSEEK,
        mla.KIMI,
        qwen3_5.FAMILY,
        qwen3_5.TEXT,
        qwen3_5.MIXTURE,
        qwen3_5.MIXTURE_TEXT,
        qwen3_vl.FAMILY,
        qwen3_vl.MIXTURE,
        ministral3.TEXT,
        ministral3.FAMILY,
        olmo3.FAMILY,
        seed_oss.FAMILY,
        smollm3.FAMILY,
    )
}


def read_arch(model: str) -> Arch:
    """The architecture of `model`, a directory or a hub name. Only the model's `config.json` is
    read. Raises InvalidInput for a config that is unreadable or wrong. Raises UnknownArchitecture
    for a family or variant that Tandem doesn't build.
    """
    config = ModelConfig.of(model)
    # ModelOpt writes `hf_quant_config.json`, and vLLM reads this file.
    if Path(config.source).with_name("hf_quant_config.json").is_file():
        raise config.unsupported("quantised weights (hf_quant_config.json)")
    return arch_from_config(config.values, config.source)


def arch_from_config(values: dict[str, Any], source: str = "config.json") -> Arch:
    """Like `read_arch`, but for a parsed config. `source` is the config's name in errors. Raises
    InvalidInput and UnknownArchitecture as `read_arch` does."""
    config = ModelConfig(values, source)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        problem = (
            f"{config.source} is of model_type {model_type!r}; Tandem knows"
            f" {', '.join(sorted(FAMILIES))}"
        )
        raise UnknownArchitecture(problem, field="base_model")
    try:
        return FAMILIES[model_type].arch(config)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise config.invalid(
            f"a value has the wrong type ({type(error).__name__}: {error})"
        ) from error


@functools.lru_cache(2)
def weight_rules(arch: Arch) -> tuple[WeightRule, ...]:
    """A rule for every parameter of the model, embedding first."""
    return tuple(FAMILIES[arch.model_type].weight_rules(arch))


def merged_problem(arch: Arch) -> str:
    """The reason why Tandem does not build merged weights for the model; empty if Tandem builds
    them. Runs that train all weights need merged weights."""
    rules, heads = weight_rules(arch), arch.global_heads
    unbuilt = {
        "fp32 weights beside others": any(rule.fp32 for rule in rules),
        "all experts in one tensor": any(rule.interleaved for rule in rules),
        "experts beside MLPs": arch.moe is not None and arch.moe.beside_mlp,
        "values made of keys": heads is not None and heads.keys_are_values,
        "a vision tower beside its text model": arch.weight_prefix != "model.",
    }
    what = next((what for what, present in unbuilt.items() if present), "")
    return what and f"merged weights are not built for {arch.model_type}, which has {what}"
