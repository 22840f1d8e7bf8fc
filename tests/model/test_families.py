"""config.json -> the model's architecture and its adapters' shapes; everything that Tandem doesn't build is refused."""

import json

import pytest

from tandem.errors import InvalidInput, UnknownArchitecture
from tandem.families.adapter import lora_modules
from tandem.families.arch import MoE, RopeScaling
from tandem.families.registry import FAMILIES, arch_from_config, read_arch
from tandem.families.weight_rules import check_cut
from tandem.spool.schema import LoraShape
from tiny import MOE, SHAPE, write_random_model

QWEN3 = {"model_type": "qwen3", **SHAPE}
QWEN3_MOE = {**QWEN3, **MOE, "model_type": "qwen3_moe"}


def test_the_config_that_transformers_writes_is_read(tmp_path):
    arch = read_arch(str(write_random_model(tmp_path, tie_word_embeddings=True, rms_norm_eps=1e-5)))
    assert (arch.num_layers, arch.hidden_size, arch.num_heads, arch.num_kv_heads, arch.head_dim) == (2, 32, 4, 2, 16)
    assert (arch.ffn_hidden_size, arch.vocab_size, arch.tie_embeddings, arch.rms_norm_eps) == (48, 260, True, 1e-5)
    assert (arch.qk_norm, arch.qkv_bias) == (True, False)


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
    assert all(family in caught.value.message for family in ("gpt_neox", *FAMILIES))
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
        ({"decoder_sparse_step": 2}, "layers without experts"),
        ({"mlp_only_layers": [0]}, "layers without experts"),
        ({"shared_expert_intermediate_size": 64}, "shared experts"),
        ({"norm_topk_prob": True, "num_experts_per_tok": 1}, "one normalised expert"),
    ],
)
def test_variants_that_would_give_other_logits_are_refused(change, says):
    for config in (QWEN3, QWEN3_MOE):
        with pytest.raises(UnknownArchitecture, match=says):
            arch_from_config({**config, **change})


@pytest.mark.parametrize("config", [{"sliding_window": 64, "use_sliding_window": False}, {"sliding_window": 64}])
def test_a_sliding_window_that_is_not_in_use_is_accepted(config):
    arch_from_config({**QWEN3, **config})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": None}, "hidden_size is None"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_key_value_heads": 3}, "4 attention heads"),
        ({"num_experts_per_tok": 9}, "9 experts per token, but there are 8"),
        ({"num_experts": None}, "num_local_experts is None"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is None"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(change, says):
    with pytest.raises(InvalidInput, match=says):
        arch_from_config({**QWEN3_MOE, **change})


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_missing_or_broken_config_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidInput, match=r"config\.json"):
        read_arch(str(tmp_path))


def test_a_path_that_does_not_exist_is_refused():
    with pytest.raises(InvalidInput, match="neither a directory nor a model"):
        read_arch("/no/such/directory")


def test_a_mixture_of_experts():
    arch = arch_from_config(QWEN3_MOE)
    assert arch.moe == MoE(num_experts=8, experts_per_token=3, ffn_hidden_size=24, norm_topk_prob=True)
    renamed = {key: value for key, value in QWEN3_MOE.items() if key not in ("num_experts", "norm_topk_prob")}
    other = arch_from_config({**renamed, "num_local_experts": 8})  # as transformers 5 writes it
    assert other.moe == MoE(num_experts=8, experts_per_token=3, ffn_hidden_size=24, norm_topk_prob=False)
    assert arch_from_config(QWEN3).moe is None
    modules = list(lora_modules(arch, LoraShape(targets=("down_proj", "q_proj", "gate_proj"))))
    experts = [f"model.layers.0.mlp.experts.{expert}." for expert in range(8)]
    expected = [each + target for target in ("gate_proj", "down_proj") for each in experts]
    assert modules[:17] == ["model.layers.0.self_attn.q_proj", *expected]
    assert len(modules) == 2 * 17
    assert lora_modules(arch, LoraShape())["model.layers.1.mlp.experts.7.down_proj"] == (24, 32)


@pytest.mark.parametrize(
    ("config", "tp", "says"),
    [
        (QWEN3, 4, "2 key/value heads"),
        ({**QWEN3, "intermediate_size": 49}, 2, "49 MLP features"),
        ({**QWEN3, "vocab_size": 261}, 2, "261 vocabulary entries"),
        (QWEN3_MOE, 2, "TANDEM_TENSOR_PARALLEL=1"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(config, tp, says):
    check_cut(arch_from_config(config), 1)
    with pytest.raises(InvalidInput, match=says):
        check_cut(arch_from_config(config), tp)
