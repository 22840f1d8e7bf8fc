"""Cases for comparisons with transformers: models that have the special features of their families,
a packed row, and the sequences that the row packs."""

from typing import Any

import torch

from tandem.model.rows import RowTensors
from tiny import GEMMA4_MOE

GENERATOR = torch.Generator().manual_seed(8)
PREFIX, FIRST, SECOND, OTHER = (
    torch.randint(0, 260, (n,), generator=GENERATOR) for n in (20, 15, 12, 18)
)
SEQUENCES = [torch.cat([PREFIX, FIRST]), torch.cat([PREFIX, SECOND]), OTHER]
WEIGHTS = [torch.randn(len(sequence) - 1, generator=GENERATOR) for sequence in SEQUENCES]
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}

CASES: dict[str, dict[str, Any]] = {
    "llama, linear rope": {
        "family": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    },
    "mistral": {"family": "mistral", "sliding_window": 7},
    "qwen2": {"family": "qwen2", "head_dim": 8, **QWEN_WINDOW},
    "qwen3": {"family": "qwen3", **QWEN_WINDOW},
    "gemma3": {
        "family": "gemma3_text",
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "tie_word_embeddings": True,
    },
    "glm4_moe": {"family": "glm4_moe"},
    "glm4_moe, unnormalised": {
        "family": "glm4_moe",
        "norm_topk_prob": False,
        "use_qk_norm": False,
        "attention_bias": False,
        "first_k_dense_replace": 0,
    },
    "qwen3_moe": {"family": "qwen3_moe", **QWEN_WINDOW},
    "gpt_oss": {"family": "gpt_oss"},
    # Delta nets normalise what they read from a state. If the weights are large, some of the values
    # from the state are small, and their normalisation enlarges rounding errors.
    "qwen3_5": {"family": "qwen3_5_text", "spread": 0.7},
    "qwen3_5, tied": {
        "family": "qwen3_5_text",
        "spread": 0.5,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_conv_kernel_dim": 3,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe": {"family": "qwen3_5_moe_text", "spread": 0.5},
    "gemma4": {"family": "gemma4_text", "tie_word_embeddings": True, "spread": 0.7},
    "gemma4, values of their own": {
        "family": "gemma4_text",
        "attention_k_eq_v": False,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "final_logit_softcapping": None,
    },
    "gemma4, experts": {"family": "gemma4_text", "spread": 0.7, **GEMMA4_MOE},
    "olmo3": {
        "family": "olmo3",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    },
    "smollm3": {"family": "smollm3", "tie_word_embeddings": True},
    "seed_oss": {"family": "seed_oss"},
    "seed_oss, no biases": {"family": "seed_oss", "attention_bias": False},
    "ministral3": {"family": "ministral3"},
    "ministral3, window": {"family": "ministral3", "sliding_window": 7, "num_key_value_heads": 1},
    # For the norms of latents, transformers uses its default epsilon, and vLLM uses the model's
    # epsilon.
    "glm4_moe_lite": {"family": "glm4_moe_lite", "rms_norm_eps": 1e-6},
    "deepseek_v3": {
        "family": "deepseek_v3",
        "rms_norm_eps": 1e-6,
        "q_lora_rank": None,
        "v_head_dim": 18,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 16,
        },
    },
    "gpt_oss, truncated": {
        "family": "gpt_oss",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 256,
        },
    },
}


def packed_row() -> RowTensors:
    """Two branches after a common prefix, another tree, and padding."""
    lengths, ends = (20, 15, 12, 18), (47, 35, 47, 65)
    tokens, padding = torch.cat([PREFIX, FIRST, SECOND, OTHER]), 6
    subtree_end = torch.cat([torch.full((n,), end) for n, end in zip(lengths, ends, strict=True)])
    positions = torch.cat([torch.arange(35), torch.arange(20, 32), torch.arange(18)])
    slots = [
        torch.arange(35),
        torch.cat([torch.arange(20), torch.arange(35, 47)]),
        torch.arange(47, 65),
    ]
    return RowTensors(
        tokens=torch.cat([tokens, torch.zeros(padding).long()]),
        positions=torch.cat([positions, torch.zeros(padding).long()]),
        subtree_end=torch.cat([subtree_end, torch.arange(65, 65 + padding) + 1]),
        item_source=torch.cat([one[:-1] for one in slots]),
        item_token=torch.cat([sequence[1:] for sequence in SEQUENCES]),
    )
