from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tandem.errors import InvalidInput, UnknownArchitecture
from tandem.families.adapter import adapter_shapes, lora_modules
from tandem.families.arch import MoE as MoeShape
from tandem.families.arch import RopeScaling
from tandem.families.registry import FAMILIES, arch_from_config, read_arch
from tandem.spool.schema import LoraShape
from tiny import MOE, SHAPE, write_random_model

QWEN3 = {"model_type": "qwen3", **SHAPE}


def test_what_transformers_writes_is_read_back(tmp_path):
    arch = read_arch(str(write_random_model(tmp_path, tie_word_embeddings=True, rms_norm_eps=1e-5)))
    assert (arch.num_layers, arch.hidden_size, arch.num_heads, arch.num_kv_heads, arch.head_dim) == (2, 32, 4, 2, 16)
    assert (arch.ffn_hidden_size, arch.vocab_size, arch.tie_embeddings, arch.rms_norm_eps) == (48, 260, True, 1e-5)
    assert arch.qk_norm
    assert not arch.qkv_bias


def test_both_spellings_of_rope():
    old = arch_from_config({**QWEN3, "rope_theta": 5e5, "rope_scaling": None})
    new = arch_from_config({**QWEN3, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    assert old == new
    assert old.rope_theta == 5e5
    values = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    llama = {**QWEN3, "model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **values}}
    assert arch_from_config(llama).rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, "model_type": "gpt_neox"}))
    with pytest.raises(UnknownArchitecture) as caught:
        read_arch(str(tmp_path))
    assert "gpt_neox" in caught.value.message
    assert all(family in caught.value.message for family in FAMILIES)
    assert caught.value.field == "base_model"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attention_bias": True}, "biases on attention"),
        ({"sliding_window": 64, "use_sliding_window": True}, "sliding-window"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding-window"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_variants_that_would_give_other_logits_are_refused(change, says):
    with pytest.raises(UnknownArchitecture, match=says):
        arch_from_config({**QWEN3, **change})


MOE_CONFIG = {**QWEN3, **MOE, "model_type": "qwen3_moe"}


def test_a_mixture_of_experts():
    arch = arch_from_config(MOE_CONFIG)
    assert arch.moe == MoeShape(num_experts=8, experts_per_token=3, ffn_hidden_size=24, norm_topk_prob=True)
    renamed = {key: value for key, value in MOE_CONFIG.items() if key not in ("num_experts", "norm_topk_prob")}
    other = arch_from_config({**renamed, "num_local_experts": 8})  # as transformers 5 writes it
    assert other.moe == MoeShape(num_experts=8, experts_per_token=3, ffn_hidden_size=24, norm_topk_prob=False)
    assert arch_from_config(QWEN3).moe is None
    modules = list(lora_modules(arch, LoraShape(targets=("down_proj", "q_proj", "gate_proj"))))
    assert modules[:3] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.experts.0.gate_proj",
        "model.layers.0.mlp.experts.1.gate_proj",
    ]
    assert modules[9] == "model.layers.0.mlp.experts.0.down_proj"
    assert lora_modules(arch, LoraShape())["model.layers.1.mlp.experts.7.down_proj"] == (24, 32)
    assert len(modules) == 2 * (1 + 2 * 8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"decoder_sparse_step": 2}, "layers without experts"),
        ({"mlp_only_layers": [0]}, "layers without experts"),
        ({"shared_expert_intermediate_size": 64}, "shared experts"),
        ({"num_experts_per_tok": 1}, "one normalised expert"),
        ({"num_experts_per_tok": 9}, "9 experts per token, but there are 8"),
        ({"num_experts": None}, "num_local_experts is None"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is None"),
    ],
)
def test_mixtures_that_are_not_built_are_refused(change, says):
    with pytest.raises(InvalidInput, match=says):
        arch_from_config({**MOE_CONFIG, **change})


@pytest.mark.parametrize(
    "change", [{"hidden_size": None}, {"vocab_size": -1}, {"num_hidden_layers": "2"}, {"num_key_value_heads": 3}]
)
def test_a_config_that_makes_no_sense_is_refused_by_key(change):
    with pytest.raises(InvalidInput) as caught:
        arch_from_config({**QWEN3, **change})
    assert "attention heads" in caught.value.message or next(iter(change)) in caught.value.message


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_no_config_or_a_broken_one(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidInput, match="config"):
        read_arch(str(tmp_path))


def test_a_path_that_does_not_exist_says_so():
    with pytest.raises(InvalidInput, match="neither a directory nor a model"):
        read_arch("/no/such/directory")


def test_lora_modules_and_shapes():
    arch = arch_from_config(QWEN3)
    modules = lora_modules(arch, LoraShape(rank=3, targets=("down_proj", "q_proj")))
    assert modules == {
        "model.layers.0.self_attn.q_proj": (32, 64),
        "model.layers.0.mlp.down_proj": (48, 32),
        "model.layers.1.self_attn.q_proj": (32, 64),
        "model.layers.1.mlp.down_proj": (48, 32),
    }
    shapes = adapter_shapes(arch, LoraShape(rank=3, targets=("k_proj",)))
    assert shapes["base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"] == (3, 32)
    assert shapes["base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"] == (32, 3)


def test_the_controllers_part_of_the_model_needs_no_torch():
    code = "import sys; import tandem.families.identity as _; print({'torch', 'megatron'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
