"""A tiny random Qwen3 with a byte-level tokenizer, in Hugging Face's format: nothing is downloaded.

The weights are random but scaled like a trained model's, so that a LoRA alone can make the model
confident.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(directory: Path) -> dict[str, int]:
    """Write a tokenizer with one token per byte and ChatML's special tokens; returns its
    vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return dict(tokenizer.get_vocab())


def write_tiny_qwen3(
    directory: Path,
    *,
    hidden_size: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    ffn_size: int = 256,
    experts: int = 0,
    seed: int = 0,
) -> Path:
    """Write config.json, model.safetensors (float32, about 0.7 M parameters) and the tokenizer to
    `directory`.

    With `experts` the model is a Qwen3-MoE: each layer has `experts` MLPs of half the size, and a
    token goes to two of them.
    """
    vocabulary = write_tokenizer(directory)
    rows = -(-len(vocabulary) // 64) * 64
    rng = np.random.default_rng(seed)

    def normal(*shape: int, std: float) -> np.ndarray:
        return rng.normal(0.0, std, shape).astype(np.float32)

    mlps = [f"mlp.experts.{expert}" for expert in range(experts)] or ["mlp"]
    mlp_size = ffn_size // 2 if experts else ffn_size
    tensors = {"model.embed_tokens.weight": normal(rows, hidden_size, std=0.3)}
    tensors["model.norm.weight"] = np.ones(hidden_size, np.float32)
    for i in range(layers):
        at = f"model.layers.{i}"
        for name, out_size, in_size in [
            ("self_attn.q_proj", heads * head_dim, hidden_size),
            ("self_attn.k_proj", kv_heads * head_dim, hidden_size),
            ("self_attn.v_proj", kv_heads * head_dim, hidden_size),
            ("self_attn.o_proj", hidden_size, heads * head_dim),
            *([("mlp.gate", experts, hidden_size)] if experts else []),
            *(
                (f"{mlp}.{name}_proj", mlp_size, hidden_size)
                for mlp in mlps
                for name in ("gate", "up")
            ),
            *((f"{mlp}.down_proj", hidden_size, mlp_size) for mlp in mlps),
        ]:
            tensors[f"{at}.{name}.weight"] = normal(out_size, in_size, std=in_size**-0.5)
        for name, size in [
            ("input_layernorm", hidden_size),
            ("post_attention_layernorm", hidden_size),
            ("self_attn.q_norm", head_dim),
            ("self_attn.k_norm", head_dim),
        ]:
            tensors[f"{at}.{name}.weight"] = np.ones(size, np.float32)
    # save_file is not used, because it makes files that only their owner can read.
    (directory / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": vocabulary["<|im_end|>"],
        "pad_token_id": vocabulary["<|endoftext|>"],
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": ffn_size,
        "max_position_embeddings": 4096,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": rows,
    }
    if experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": mlp_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "output_router_logits": False,
        }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory


if __name__ == "__main__":
    import shutil
    import sys
    import uuid

    target = Path(sys.argv[1])
    if not target.exists():
        # Several processes may write the model at the same time. The directory gets its final name
        # only when it is complete, so no process reads an incomplete model.
        made = write_tiny_qwen3(target.with_name(f".{target.name}-{uuid.uuid4().hex}"))
        try:
            made.rename(target)
        except OSError:
            shutil.rmtree(made)
            if not (target / "config.json").is_file():
                raise
    print(target)
