"""Tiny random models as Hugging Face directories, for tests."""

from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}

MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


_GROUPED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}

GLM4_MOE: dict[str, Any] = {**_GROUPED_EXPERTS, "attention_bias": True, "use_qk_norm": True}

LATENT: dict[str, Any] = {
    **_GROUPED_EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "first_k_dense_replace": 1,
    # vLLM reads the following two fields.
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""The tiny models of `glm4_moe_lite` and `deepseek_v3`."""

GPT_OSS: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 7}

QWEN3_5: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}

QWEN3_5_MOE: dict[str, Any] = {
    **QWEN3_5,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}

VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 16,
}

PIXTRAL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "image_size": 16,
}
GEMMA4_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
MINISTRAL3: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 9,  # queries grow from this position on
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "llama_4_scaling_beta": 0.3,
    }
}
VISIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", VISION),
    "qwen3_5_moe": ("qwen3_5_moe_text", VISION),
    "qwen3_vl": ("qwen3_vl_text", VISION | {"deepstack_visual_indexes": [0]}),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", VISION | {"deepstack_visual_indexes": [0]}),
    "mistral3": ("ministral3", PIXTRAL),
    "gemma4": ("gemma4_text", GEMMA4_VISION),
}
"""Family of checkpoints with a vision tower -> the family of its text model, and the tower's
config."""
GEMMA4: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 7,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
}
GEMMA4_MOE: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 20,
}
OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": MOE,
    "glm4_moe": GLM4_MOE,
    "gpt_oss": GPT_OSS,
    "qwen3_5": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    # With another size, transformers could not recognise the order of the dimensions of the
    # experts' tensors.
    "qwen3_vl_moe": MOE | {"moe_intermediate_size": 40},
    "ministral3": MINISTRAL3,
    "mistral3": MINISTRAL3,
    "gemma4": GEMMA4,
    "gemma4_text": GEMMA4,
    "olmo3": {"sliding_window": 7},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0, 1, 1]},
}
"""Family -> the settings of its tiny model in addition to `SHAPE`."""

MERGED_SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"tie_word_embeddings": True, "head_dim": 8},
    "qwen3_moe": {"moe_intermediate_size": 32},
}
"""Family -> the settings that tests of merged weights use instead of those in `SHAPE`."""


def write_random_model(
    directory: Path, *, family: str = "qwen3", seed: int = 0, spread: float = 2.5, **config: Any
) -> Path:
    """A random fp32 model of `family` (a model_type) in `directory`: config.json and safetensors.

    `config` overrides `SHAPE` or adds to it (`tie_word_embeddings=True`, `num_hidden_layers=3`,
    ...). Norm weights and biases are random too. Weights are larger than at initialisation, so that
    a wrong weight or bias shows in the logits. The weights of a projection are proportional to
    `spread`. With a `spread` of 1, the projection's output would be as large as its input.
    """
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    values = {"tie_word_embeddings": False, **OWN.get(family, {}), **SHAPE, **config}
    if family in ("glm4_moe_lite", "deepseek_v3"):
        values = {**SHAPE, **LATENT, "tie_word_embeddings": False, **config}
        del values["head_dim"]
        if family == "glm4_moe_lite":
            dense = values["first_k_dense_replace"]
            kinds = ["dense"] * dense + ["sparse"] * (values["num_hidden_layers"] - dense)
            values["mlp_layer_types"] = kinds
    delta_nets = family.startswith("qwen3_5")
    if delta_nets or family.startswith("gemma4"):
        values["layer_types"] = values["layer_types"][: values["num_hidden_layers"]]
    vision = family in VISIONS
    if vision:
        text, tower = VISIONS[family]
        tied = values["tie_word_embeddings"]
        if "depth" in tower:
            tower = tower | {"out_hidden_size": values["hidden_size"]}
        values = {
            "text_config": values | {"model_type": text},
            "vision_config": tower,
            "tie_word_embeddings": tied,
        }
    if family == "mistral":
        values.setdefault("sliding_window", None)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        hf_config = transformers.CONFIG_MAPPING[family](**values)
        hf_config.bos_token_id = hf_config.eos_token_id = hf_config.pad_token_id = None
        kind = "ImageTextToText" if vision else "CausalLM"
        model = getattr(transformers, f"AutoModelFor{kind}").from_config(hf_config)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0.0, 0.1)
                if name.endswith("layer_scalar"):
                    buffer.normal_(1.0, 0.2)
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    offset = family == "gemma3_text" or (delta_nets and "linear_attn" not in name)
                    parameter.normal_(0.0 if offset else 1.0, 0.2)
                elif name.endswith(("router.scale", "per_expert_scale")):
                    parameter.normal_(1.0, 0.3)
                elif name.endswith("A_log"):
                    parameter.normal_(0.0, 1.0)
                elif name.endswith("gate_up_proj_bias"):
                    parameter.normal_(0.0, 2.5)  # GPT-OSS clamps gate and up at 7
                elif name.endswith("bias"):
                    parameter.normal_(0.0, 0.3)
                else:
                    parameter.normal_(
                        0.0, spread * parameter.shape[-1] ** -0.5 if "proj" in name else 0.5
                    )
    directory.mkdir(parents=True, exist_ok=True)
    model.to(torch.float32).save_pretrained(directory)
    if family == "qwen3_vl_moe":  # published files have the experts' tensors transposed
        file = directory / "model.safetensors"
        stacked = load_file(file)
        for name, value in stacked.items():
            if ".experts." in name:
                stacked[name] = value.transpose(1, 2).contiguous()
        save_file(stacked, file, {"format": "pt"})
    return directory
