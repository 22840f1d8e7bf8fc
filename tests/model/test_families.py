"""The architecture of a model and the shapes of its adapters, from the model's config.json. Tandem
refuses a config whose features Tandem does not implement."""

import errno
import json
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

from tandem.errors import HubUnreachable, InvalidInput, TandemError, UnknownArchitecture, VolumeFull
from tandem.families.adapter import default_targets, lora_modules
from tandem.families.arch import Arch, LinearScaling, MoE, RopeScaling
from tandem.families.gpt_oss import _YARN
from tandem.families.model_config import ModelConfig, model_directory
from tandem.families.registry import FAMILIES, arch_from_config, read_arch
from tandem.planning.checks import check_sizes
from tandem.spool.schema import LoraShape
from tandem.topology.sizes import Sizes
from tiny import GLM4_MOE, GPT_OSS, LATENT, MOE, SHAPE, VISIONS, write_random_model

QWEN3 = {"model_type": "qwen3", **SHAPE}
QWEN3_MOE = {**QWEN3, **MOE, "model_type": "qwen3_moe"}
GEMMA3 = {**SHAPE, "model_type": "gemma3_text"}
GLM4 = {**SHAPE, **GLM4_MOE, "model_type": "glm4_moe"}
FLASH = {**SHAPE, **LATENT, "model_type": "glm4_moe_lite"}
DEEPSEEK = {**FLASH, "model_type": "deepseek_v3"}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
OSS = {**SHAPE, **GPT_OSS, "model_type": "gpt_oss"}


def test_the_config_that_transformers_writes_is_read(tmp_path):
    arch = read_arch(str(write_random_model(tmp_path, tie_word_embeddings=True, rms_norm_eps=1e-5)))
    assert (
        arch.num_layers,
        arch.hidden_size,
        arch.num_heads,
        arch.num_kv_heads,
        arch.head_dim,
    ) == (2, 32, 4, 2, 16)
    assert (arch.ffn_hidden_size, arch.vocab_size, arch.tie_embeddings, arch.rms_norm_eps) == (
        48,
        260,
        True,
        1e-5,
    )
    assert (arch.qk_norm, arch.qkv_bias) == (True, False)


def test_the_parameters_of_rope_have_transformers_precedence():
    both = {**QWEN3, "rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}
    both["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    for config in (
        both,
        {**both, "rope_scaling": None},
        {**both, "rope_scaling": None, "rope_parameters": None},
    ):
        assert arch_from_config(config).rope_theta == theirs(config).rope_parameters["rope_theta"]
    values = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    llama = {**QWEN3, "model_type": "llama", "rope_scaling": {"rope_type": "llama3", **values}}
    assert arch_from_config(llama).rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)


# Keys that Tandem requires in a config. transformers has defaults for these keys, but no published
# model has the default values.
REQUIRED = {
    "vocab_size": 256,
    "hidden_size": 1024,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


def theirs(config: dict[str, Any]) -> Any:
    values = {key: value for key, value in config.items() if key != "model_type"}
    # vLLM reads Kimi K2's config as DeepSeek V3's config. transformers does not know `kimi_k2`.
    family = {"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"])
    return transformers.CONFIG_MAPPING[family](**values)


NOT_BUILT = {
    "attention_out_bias",
    "mlp_bias",
    "quantization_config",
    "mlp_only_layers",
    "shared_expert_intermediate_size",
    "num_shared_experts",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
}
OF_SOME = {  # Keys that only models with windows or mixtures have.
    "sliding_window",
    "sliding_window_pattern",
    "layer_types",
    "max_window_layers",
    "norm_topk_prob",
    "n_group",
    "num_local_experts",
    "n_shared_experts",
    "first_k_dense_replace",
    "topk_group",
    "routed_scaling_factor",
    "use_qk_norm",
    "full_attention_interval",
    "per_layer_config",  # transformers writes `global_head_dim` in this key.
    "attn_output_gate",  # transformers and vLLM do not read this key.
    "output_gate_type",
    # vLLM reads the next four keys. transformers does not implement the variants that these keys
    # choose.
    "topk_method",
    "scoring_func",
    "moe_layer_freq",
    "index_topk",
}


def meaning(arch: Arch, hf: Any) -> dict[str, tuple[Any, Any]]:
    """Maps each key that Tandem reads to two values: the value in the architecture, and the value
    in transformers' config `hf`. The keys in `REQUIRED` and `OF_SOME` are left out."""
    ours = vars(arch.rope_scaling) if arch.rope_scaling else {}
    scaled = {key: value for key, value in ours.items() if key != "attention_factor"}
    growth, mscale = arch.query_growth, ("mscale", "mscale_all_dim", "type")
    if growth:
        scaled["llama_4_scaling_beta"] = growth.rate
        scaled["max_position_embeddings"] = arch.max_positions
        del scaled["truncate"]
    if "original_max_positions" in scaled:
        scaled["original_max_position_embeddings"] = scaled.pop("original_max_positions")
    unscaled, local = (
        # `test_same_gradients.py` checks the factor that results from `mscale` and
        # `mscale_all_dim`.
        ("partial_rotary_factor", "rope_theta", "rope_type", *(mscale if growth else ())),
        hf.rope_parameters.get("sliding_attention"),
    )
    silu = arch.activation == "silu"
    # The heads of the layers with a window; the other layers may have other heads.
    heads = hf.per_layer_config["sliding_attention"] if arch.global_heads else hf
    found = {
        "num_key_value_heads": (arch.num_kv_heads, heads.num_key_value_heads),
        "head_dim": (arch.head_dim, getattr(heads, "head_dim", None) or 1024 // 32),
        "max_position_embeddings": (arch.max_positions, hf.max_position_embeddings),
        "tie_word_embeddings": (
            arch.tie_embeddings,
            getattr(hf, "tie_word_embeddings", False),
        ),
        "rms_norm_eps": (arch.rms_norm_eps, hf.rms_norm_eps),
        "rope_theta": (arch.rope_theta, rope(hf)["rope_theta"]),
        "rope_scaling": ("yarn" if ours else "default", rope(hf)["rope_type"]),
        "rope_parameters": (
            scaled,
            {key: value for key, value in rope(hf).items() if key not in unscaled},
        ),
        "rope_local_base_freq": (
            arch.window and arch.window.rope_theta,
            local and local["rope_theta"],
        ),
        "partial_rotary_factor": (
            arch.rotary_size or arch.head_dim,
            arch.head_dim * rope(hf).get("partial_rotary_factor", 1),
        ),
        "attention_bias": (arch.output_bias, bool(getattr(hf, "attention_bias", False))),
        "is_causal": (True, getattr(hf, "is_causal", True)),
        "query_pre_attn_scalar": (
            arch.attention_scale,
            hf.query_pre_attn_scalar**-0.5
            if hasattr(hf, "query_pre_attn_scalar")
            else (1.0 if arch.global_heads else None),
        ),
        "hidden_act": ("silu" if silu else None, hf.hidden_act if silu else None),
        "hidden_activation": (
            "gelu_pytorch_tanh" if not silu else None,
            getattr(hf, "hidden_activation", None),
        ),
        "use_sliding_window": (arch.window is None, windowed(hf, arch) == []),
        "swiglu_alpha": (1.702, getattr(hf, "swiglu_alpha", 1.702)),
        "swiglu_limit": (7.0, getattr(hf, "swiglu_limit", 7.0)),
        "decoder_sparse_step": (1, getattr(hf, "decoder_sparse_step", 1)),
        **{key: (False, bool(getattr(hf, key, None))) for key in NOT_BUILT},
    }
    # In families other than Seed-OSS, `attention_bias` also means a bias of the output projection.
    if arch.model_type == "seed_oss":
        found["attention_bias"] = (arch.qkv_bias, hf.attention_bias)
    if gdn := arch.gdn:
        found["layer_types"] = (
            list(gdn.layers),
            [kind == "linear_attention" for kind in hf.layer_types],
        )
        found["linear_num_key_heads"] = (gdn.key_heads, hf.linear_num_key_heads)
        found["linear_num_value_heads"] = (gdn.value_heads, hf.linear_num_value_heads)
        found["linear_key_head_dim"] = (gdn.key_head_dim, hf.linear_key_head_dim)
        found["linear_value_head_dim"] = (gdn.value_head_dim, hf.linear_value_head_dim)
        found["linear_conv_kernel_dim"] = (gdn.conv_tokens, hf.linear_conv_kernel_dim)
    if gemma := arch.global_heads:
        own = hf.per_layer_config["full_attention"]
        found |= {
            "global_head_dim": (gemma.head_dim, own.head_dim),
            "num_global_key_value_heads": (gemma.num_kv_heads, own.num_key_value_heads),
            "attention_k_eq_v": (gemma.keys_are_values, hf.attention_k_eq_v),
            "final_logit_softcapping": (arch.softcap, hf.final_logit_softcapping),
            "enable_moe_block": (arch.moe is not None, hf.enable_moe_block),
            "num_experts": (arch.moe and arch.moe.num_experts, hf.num_experts),
            "num_kv_shared_layers": (0, hf.num_kv_shared_layers),
            "rope_parameters": (scaled["share"], rope(hf)["partial_rotary_factor"]),
            "hidden_size_per_layer_input": (0, hf.hidden_size_per_layer_input),
        }
        del found["rope_scaling"], found["partial_rotary_factor"]
    if arch.rope_layers:
        turned = (list(map(int, arch.rope_layers)), hf.no_rope_layers)
        found |= dict.fromkeys(("no_rope_layers", "no_rope_layer_interval"), turned)
    if window := arch.window:
        layers = ("sliding_window_pattern", "layer_types", "max_window_layers")
        found |= dict.fromkeys(layers, (list(window.layers), windowed(hf, arch)))
        found["sliding_window"] = (window.tokens, hf.sliding_window)
    if moe := arch.moe:
        found["norm_topk_prob"] = (moe.norm_topk_prob, getattr(hf, "norm_topk_prob", True))
        found["num_local_experts"] = (
            moe.num_experts,
            getattr(hf, "num_local_experts", hf.num_experts),
        )
        found["n_shared_experts"] = (
            moe.shared_size,
            (getattr(hf, "n_shared_experts", None) or 0) * 24,
        )
        if moe.shared_gate:
            found["shared_expert_intermediate_size"] = (
                moe.shared_size,
                hf.shared_expert_intermediate_size,
            )
            del found["n_shared_experts"]
        if moe.router == "sigmoid":
            kinds = getattr(hf, "mlp_layer_types", None)
            dense = hf.first_k_dense_replace if kinds is None else kinds.count("dense")
            found["first_k_dense_replace"] = (moe.dense_layers, dense)
            found["n_group"], found["topk_group"] = (
                (moe.groups, hf.n_group),
                (moe.groups_per_token, hf.topk_group),
            )
            found["routed_scaling_factor"] = (moe.scale, hf.routed_scaling_factor)
            found["use_qk_norm"] = (arch.qk_norm, getattr(hf, "use_qk_norm", False))
    if mla := arch.mla:
        found["q_lora_rank"] = (mla.q_rank, hf.q_lora_rank)
        found["kv_lora_rank"] = (mla.kv_rank, hf.kv_lora_rank)
        found["qk_nope_head_dim"] = (mla.nope_size, hf.qk_nope_head_dim)
        found["qk_rope_head_dim"] = (mla.rope_size, hf.qk_rope_head_dim)
        found["v_head_dim"] = (mla.value_size, hf.v_head_dim)
        found["rope_interleave"] = (True, hf.rope_interleave)
        found["mlp_layer_types"] = found["first_k_dense_replace"]
        found["head_dim"] = (arch.head_dim, hf.qk_head_dim)
        found["partial_rotary_factor"] = (mla.rope_size, hf.head_dim)
        # transformers' default of `num_key_value_heads` fits only one published model, so the test
        # expects the value of `num_attention_heads`.
        found["num_key_value_heads"] = (arch.num_kv_heads, arch.num_heads)
    return found


def windowed(hf: Any, arch: Arch) -> list[bool]:
    """For each layer, whether the layer has a window in transformers' config `hf`. The list is
    empty if no layer has a window."""
    if getattr(hf, "sliding_window", None) is None:
        return []
    kinds = getattr(hf, "layer_types", None) or ["sliding_attention"] * arch.num_layers
    chosen = [kind == "sliding_attention" for kind in kinds]
    return chosen if any(chosen) else []


def rope(hf: Any) -> dict[str, Any]:
    """The parameters of RoPE for the layers without a window, in transformers' config `hf`."""
    return hf.rope_parameters.get("full_attention", hf.rope_parameters)


class Recorded(dict[str, Any]):
    """A config that records the keys that were read from it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def differing(config: dict[str, Any], hf: Any) -> list[str]:
    """The keys whose values differ between Tandem's architecture of `config` and transformers'
    config `hf`."""
    values, text = Recorded(config), Recorded(config.get("text_config", {}))
    if text:
        values["text_config"], hf = text, hf.get_text_config()
    arch: Arch = FAMILIES[config["model_type"]].arch(ModelConfig(values, "config.json"))
    found = meaning(arch, hf)
    read = text.read if text else values.read
    unknown = read - found.keys() - OF_SOME - REQUIRED.keys() - {"model_type"}
    assert not unknown, f"{unknown} are read without a line in `meaning`"
    return [key for key, (ours, theirs) in found.items() if ours != theirs]


DEEPSEEKS = ("deepseek_v3", "kimi_k2")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_means_what_transformers_and_vllm_say(
    tmp_path, family, monkeypatch
):
    from vllm.transformers_utils.config import get_config

    # vLLM writes `kimi_k2` into transformers' class of DeepSeek V3. At the end of the test pytest
    # restores the class, because the changed class would save models under a wrong name.
    monkeypatch.setattr(transformers.DeepseekV3Config, "model_type", "deepseek_v3")

    def of(values: dict[str, Any]) -> dict[str, Any]:
        # The other defaults of DeepSeek V3 need these numbers of layers and experts. `values` is
        # copied, because Mistral 3's class in transformers changes its argument.
        more = {"num_hidden_layers": 4, "n_routed_experts": 32} if family in DEEPSEEKS else {}
        values = {key: more.get(key, value) for key, value in values.items()}
        if family.startswith("gemma4"):
            # The default of `hidden_size_per_layer_input` is 256, and Tandem refuses 256.
            values["hidden_size_per_layer_input"] = 0
            del values["num_experts"]
        # A config of `qwen3_vl_moe` without `tie_word_embeddings` is ambiguous.
        if family == "qwen3_vl_moe":
            values = {"tie_word_embeddings": False, **values}
        return {
            "model_type": family,
            **({"text_config": values} if family in VISIONS else values),
        }

    config = of(REQUIRED)
    assert differing(config, theirs(config)) == []
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert differing(config, get_config(tmp_path, trust_remote_code=False)) == []
    moe = {"qwen3_moe": "num_experts", "glm4_moe": "n_routed_experts", "gpt_oss": "num_experts"}
    moe |= dict.fromkeys(("glm4_moe_lite", *DEEPSEEKS), "n_routed_experts")
    size = "intermediate_size" if family == "gpt_oss" else "moe_intermediate_size"
    moe |= dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_vl_moe"), "num_experts")
    own = [moe[family], "num_experts_per_tok", size] if family in moe else []
    unused = ["intermediate_size"] if family.startswith(("qwen3_5_moe", "qwen3_vl_moe")) else []
    for key in [*(key for key in list(REQUIRED)[:5] if key not in unused), *own]:
        with pytest.raises(InvalidInput):
            arch_from_config(of({k: value for k, value in REQUIRED.items() if k != key}))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize(
    "change", [{}, {"max_window_layers": 1}, {"sliding_window": 64, "max_window_layers": 0}]
)
def test_a_window_is_in_the_layers_that_transformers_says(family, change):
    config = {"model_type": family, **REQUIRED, "use_sliding_window": True, **change}
    assert differing(config, theirs(config)) == []
    named = {**config, "layer_types": ["sliding_attention", "full_attention"]}
    if family == "qwen3_moe":  # All layers of this family have the window.
        with pytest.raises(UnknownArchitecture, match="layer_types"):
            arch_from_config(named)
    else:
        assert arch_from_config(named).window.layers == (True, False)
        with pytest.raises(InvalidInput, match="3 entries for 2 layers"):
            arch_from_config({**named, "layer_types": ["full_attention"] * 3})
    for not_in_use in ({"use_sliding_window": False}, {}):
        assert (
            arch_from_config(
                {"model_type": family, **REQUIRED, "sliding_window": 64, **not_in_use}
            ).window
            is None
        )


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, "model_type": "gpt_neox"}))
    with pytest.raises(UnknownArchitecture) as caught:
        read_arch(str(tmp_path))
    assert all(family in caught.value.message for family in ("gpt_neox", *FAMILIES))
    assert caught.value.field == "base_model"


@pytest.mark.parametrize(
    ("config", "change", "says"),
    [
        # Variants whose logits would differ from those of Tandem's model.
        (QWEN3, {"attention_bias": True}, "biases on attention"),
        (
            QWEN3,
            {"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types",
        ),
        # If a Llama's config has `sliding_window`, vLLM computes the model with a window.
        (QWEN3, {"model_type": "llama", "sliding_window": 4096}, "sliding-window"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "other kinds"),
        (QWEN3, {"layer_types": ["full_attention", "linear_attention"]}, "other kinds"),
        (QWEN3, {"partial_rotary_factor": 0.5}, "a part of each head"),
        (
            QWEN3,
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "a part of each head",
        ),
        (QWEN3, {"hidden_act": "gelu"}, "gelu"),
        (QWEN3, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        (QWEN3, {"quantization_config": {"bits": 4}}, "quantised"),
        (QWEN3, {"is_causal": False}, "attention in both directions"),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "layers without experts"),
        (QWEN3_MOE, {"mlp_only_layers": [0]}, "layers without experts"),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 64}, "shared experts"),
        (QWEN3_MOE, {"norm_topk_prob": True, "num_experts_per_tok": 1}, "one normalised expert"),
        (GEMMA3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3, {"hidden_activation": "silu"}, "'silu'"),
        (GEMMA3, {"sliding_window": None}, "window of no size"),
        (
            GEMMA3,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "a scaled RoPE",
        ),
        (GLM4, {"mlp_bias": True}, "biases in the MLP"),
        (
            OSS,
            {"quantization_config": {"quant_method": "mxfp4"}},
            r"Mxfp4Config.*dequantize=True.*save_pretrained",
        ),
        (OSS, {"swiglu_limit": 5.0}, "swiglu_limit=5.0"),
        # vLLM computes the next variants in another way.
        (OSS, {"attention_bias": False}, "attention without biases"),
        (OSS, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types that"),
        (
            OSS,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "'default' instead of yarn",
        ),
        (OSS, {"rope_parameters": {**_YARN, "attention_factor": 1.5}}, "attention_factor"),
        (OSS, {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        (OSS, {"sliding_window": None}, "without a sliding window"),
        (OSS, {"num_experts_per_tok": 1}, "2 is the least"),
        (
            OSS,
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "scaling yarn are incomplete",
        ),
        (OSS, {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        (GLM4, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        (FLASH, {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        (FLASH, {"attention_bias": True}, "biases on attention"),
        (FLASH, {"rope_interleave": False}, "pairs are not neighbours"),
        (FLASH, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "a part of each head"),
        (FLASH, {"rope_parameters": YARN}, "'yarn'"),
        (FLASH, {"first_k_dense_replace": 0}, "mlp_layer_types"),
        (FLASH, {"mlp_layer_types": ["sparse", "sparse"]}, "mlp_layer_types"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "without a sigmoid"),
        (DEEPSEEK, {"topk_method": "group_limited_greedy"}, "noaux_tc"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (DEEPSEEK, {"index_topk": 2048}, "indexer"),
        (DEEPSEEK, {"rope_parameters": {**YARN, "mscale": 1.0}}, "one of mscale"),
        (DEEPSEEK, {"rope_parameters": {**YARN, "attention_factor": 1.0}}, "attention_factor"),
        (DEEPSEEK, {"rope_parameters": {**YARN, "truncate": False}}, "truncation"),
        (DEEPSEEK, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        # Wrong values.
        (DEEPSEEK, {"num_key_value_heads": 2}, "2 key/value heads"),
        (DEEPSEEK, {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        (QWEN3_MOE, {"hidden_size": None}, "hidden_size is None"),
        (QWEN3_MOE, {"vocab_size": -1}, "vocab_size is -1"),
        (QWEN3_MOE, {"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        (QWEN3_MOE, {"num_key_value_heads": 3}, "4 attention heads"),
        (QWEN3_MOE, {"num_experts_per_tok": 9}, "9 experts per token, but there are 8"),
        (QWEN3_MOE, {"num_experts": None}, "num_local_experts is None"),
        (QWEN3_MOE, {"moe_intermediate_size": None}, "moe_intermediate_size is None"),
        (GEMMA3, {"rope_parameters": {"rope_theta": 1e6}}, "not entries by kind"),
        (GEMMA3, {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        (GLM4, {"first_k_dense_replace": 2}, "one must be a mixture"),
        (GLM4, {"n_group": 3}, "n_group"),
        (GLM4, {"topk_group": 5}, "topk_group"),
        (GLM4, {"topk_group": 1}, "3 experts per token, of 2"),
        # Values of wrong types.
        (QWEN3, {"num_hidden_layers": float("inf")}, r"config\.json: .*type"),
        (QWEN3, {"layer_types": 3}, r"config\.json: .*type"),
        (QWEN3, {"rope_scaling": "linear"}, r"config\.json: .*type"),
        (QWEN3, {"rope_parameters": {"rope_theta": None}}, r"config\.json: .*type"),
        (QWEN3, {"use_sliding_window": True, "max_window_layers": None}, r"config\.json: .*type"),
    ],
)
def test_what_tandem_does_not_build_is_refused(config, change, says):
    arch_from_config(config)
    with pytest.raises((UnknownArchitecture, InvalidInput), match=says) as refused:
        arch_from_config({**config, **change})
    assert refused.value.field == "base_model"


def test_a_missing_or_broken_config_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"config\.json is missing"):
        read_arch(str(tmp_path))
    with pytest.raises(InvalidInput, match="neither a directory nor a model"):
        read_arch("/no/such/directory")
    for content in ("{", "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(InvalidInput, match=r"config\.json"):
            read_arch(str(tmp_path))


def _answer(status):
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError(f"the hub answers {status}", response=response)


def _not_in_the_cache(cause):
    error = LocalEntryNotFoundError("not in the cache either")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (HFValidationError("a bad name"), InvalidInput),
        (_answer(404), InvalidInput),
        (_not_in_the_cache(_answer(403)), InvalidInput),
        (_not_in_the_cache(OfflineModeIsEnabled("HF_HUB_OFFLINE=1")), InvalidInput),
        (_answer(503), HubUnreachable),
        (_not_in_the_cache(_answer(429)), HubUnreachable),
        (_not_in_the_cache(ConnectionError("no network")), HubUnreachable),
        (OSError(errno.ENOSPC, "No space left on device"), VolumeFull),
    ],
)
def test_a_failure_of_the_hub_that_may_pass_does_not_make_the_model_wrong(monkeypatch, error, kind):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(TandemError) as caught:
        model_directory("org/model")
    assert (type(caught.value), caught.value.retriable) == (kind, kind is not InvalidInput)
    # With `cached`, the hub is not contacted, so no error is retriable.
    with pytest.raises(InvalidInput):
        model_directory("org/model", cached=True)


def test_a_mixture_of_experts():
    arch = arch_from_config(QWEN3_MOE)
    assert arch.moe == MoE(
        num_experts=8, experts_per_token=3, ffn_hidden_size=24, norm_topk_prob=True
    )
    renamed = {
        key: value
        for key, value in QWEN3_MOE.items()
        if key not in ("num_experts", "norm_topk_prob")
    }
    # transformers 5 writes the number of experts under this key.
    other = arch_from_config({**renamed, "num_local_experts": 8})
    assert other.moe == MoE(
        num_experts=8, experts_per_token=3, ffn_hidden_size=24, norm_topk_prob=False
    )
    assert arch_from_config(QWEN3).moe is None
    modules = list(lora_modules(arch, LoraShape(targets=("down_proj", "q_proj", "gate_proj"))))
    experts = [f"model.layers.0.mlp.experts.{expert}." for expert in range(8)]
    expected = [each + target for target in ("gate_proj", "down_proj") for each in experts]
    assert modules[:17] == ["model.layers.0.self_attn.q_proj", *expected]
    assert len(modules) == 2 * 17
    assert lora_modules(arch, LoraShape())["model.layers.1.mlp.experts.7.down_proj"] == (24, 32)


@pytest.mark.parametrize(
    ("config", "sizes", "says", "nearest"),
    [
        (QWEN3, Sizes(data=2, expert=2), "has no experts", "TANDEM_EXPERT_PARALLEL=1 "),
        (QWEN3, Sizes(data=2, sequence=True), "divides tokens", "TANDEM_SEQUENCE_PARALLEL=0"),
        (QWEN3, Sizes(pipeline=4), "2 layers", "TANDEM_PIPELINE_PARALLEL=2"),
        (QWEN3, Sizes(tensor=4), "2 key/value heads", "TANDEM_TENSOR_PARALLEL=2"),
        (
            {**QWEN3, "intermediate_size": 49},
            Sizes(tensor=2),
            "49 MLP features",
            "TANDEM_TENSOR_PARALLEL=1",
        ),
        (
            {**QWEN3, "vocab_size": 261},
            Sizes(tensor=2),
            "261 vocabulary entries",
            "TANDEM_TENSOR_PARALLEL=1",
        ),
        (
            QWEN3_MOE,
            Sizes(tensor=2),
            "SEQUENCE_PARALLEL=1",
            "TENSOR_PARALLEL=2 TANDEM_SEQUENCE_PARALLEL=1",
        ),
        (QWEN3_MOE, Sizes(data=3, expert=3), "8 experts", "TANDEM_EXPERT_PARALLEL=1"),
        (
            QWEN3_MOE,
            Sizes(data=16, expert_tensor=16),
            "24 features",
            "TANDEM_EXPERT_TENSOR_PARALLEL=8",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_nearest_that_works(
    config, sizes, says, nearest
):
    check_sizes(arch_from_config(config), Sizes())
    with pytest.raises(InvalidInput) as refused:
        check_sizes(arch_from_config(config), sizes)
    reason, _, remedy = str(refused.value).partition("The nearest that works")
    assert says in reason
    assert nearest in remedy


def test_gemma3s_older_configs_mean_what_transformers_says():
    own = {
        "num_hidden_layers": 4,
        "sliding_window_pattern": 2,
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
    }
    old = {**GEMMA3, **own}
    assert arch_from_config(old).window.layers == (True, False, True, False)
    assert differing(old, theirs(old)) == []
    scaled = {**old, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert arch_from_config(scaled).rope_scaling == LinearScaling(8.0)
    assert theirs(scaled).rope_parameters["full_attention"]["factor"] == 8.0
    assert theirs(scaled).rope_parameters["sliding_attention"]["rope_type"] == "default"


def test_glms_first_layers_are_dense_and_the_others_have_a_shared_expert():
    arch = arch_from_config(GLM4)
    assert (arch.moe.dense_layers, arch.moe.shared_size, arch.rotary_size) == (1, 48, 8)
    modules = lora_modules(arch, LoraShape(targets=("gate_proj",)))
    assert modules["model.layers.0.mlp.gate_proj"] == (32, 48)
    assert modules["model.layers.1.mlp.shared_experts.gate_proj"] == (32, 48)
    assert len(modules) == 2 + 8


def test_gpt_oss_is_adapted_on_attention_only():
    arch = arch_from_config(OSS)
    assert (arch.window.layers, arch.rope_factor) == (
        (True, False),
        pytest.approx(1.34657, rel=1e-5),
    )
    assert len(lora_modules(arch, LoraShape(targets=default_targets(arch)))) == 8
    with pytest.raises(InvalidInput, match="as one layer; leave out gate_proj"):
        lora_modules(arch, LoraShape(targets=("q_proj", "gate_proj")))
