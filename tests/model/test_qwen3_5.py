"""Qwen3.5. The tests check which variants and which topologies are refused, and which layers LoRA
adapts. `test_vision_wrappers.py` checks the names of weights and adapters."""

from pathlib import Path

import pytest

from tandem.errors import InvalidInput, UnknownArchitecture
from tandem.families.adapter import default_targets, lora_modules
from tandem.families.registry import arch_from_config, read_arch, weight_rules
from tandem.planning.checks import check_sizes
from tandem.spool.schema import DELTA_NET_TARGETS, LoraShape
from tandem.topology.sizes import Sizes
from tiny import QWEN3_5, SHAPE, write_random_model

TEXT = {**SHAPE, **QWEN3_5, "num_hidden_layers": 3}
LORA = LoraShape(rank=3, alpha=3.0, targets=("q_proj", "o_proj", "down_proj", *DELTA_NET_TARGETS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(
        tmp_path_factory.mktemp("vision"), family="qwen3_5", spread=0.5, num_hidden_layers=3
    )


def test_default_targets_are_all_linear_layers(model):
    arch = read_arch(str(model))
    adapted = lora_modules(arch, LoraShape(targets=default_targets(arch)))
    matrices = {
        name.removesuffix(".weight")
        for rule in weight_rules(arch)
        for name, shape in rule.sources.items()
        if len(shape) == 2 and ".layers." in name
    }
    assert set(adapted) == matrices


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layer_types": ["linear_attention", "sliding_attention"] * 2}, "layer_types"),
        ({"linear_num_key_heads": 3}, "4 value heads don't divide into 3"),
        ({"attn_output_gate": False}, "without an output gate"),
        ({"output_gate_type": "sigmoid"}, "another gate"),
        ({"attention_bias": True}, "biases on attention"),
    ],
)
def test_other_variants_are_refused(change, says):
    with pytest.raises((InvalidInput, UnknownArchitecture), match=says):
        arch_from_config({"model_type": "qwen3_5_text", **TEXT, **change})


def test_a_tied_table_of_one_config_alone_is_refused():
    config = {"model_type": "qwen3_5", "text_config": TEXT | {"tie_word_embeddings": True}}
    with pytest.raises(UnknownArchitecture, match="tie_word_embeddings=False beside True"):
        arch_from_config(config)
    assert arch_from_config(config | {"tie_word_embeddings": True}).tie_embeddings
    with pytest.raises(InvalidInput, match="text_config is missing"):
        arch_from_config({"model_type": "qwen3_5"})


def test_states_do_not_travel_between_ranks(model):
    arch = read_arch(str(model))
    with pytest.raises(InvalidInput, match="states don't travel"):
        check_sizes(arch, Sizes(context=2))
    with pytest.raises(InvalidInput, match="key heads of the delta nets don't divide"):
        check_sizes(
            arch_from_config({"model_type": "qwen3_5_text", **TEXT} | {"linear_num_key_heads": 1}),
            Sizes(tensor=2),
        )


def test_targets_that_a_model_lacks_are_refused(tmp_path):
    model = write_random_model(tmp_path, family="qwen3")
    with pytest.raises(InvalidInput, match=r"qwen3 has no in_proj_qkv, in_proj_z, .*out_proj"):
        lora_modules(read_arch(str(model)), LORA)
