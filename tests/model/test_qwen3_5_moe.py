"""Qwen3.5's mixtures of experts. Published checkpoints stack all experts of a layer in one tensor
and have a vision tower. Tandem refuses some variants of these mixtures."""

import math
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from model.vision_checkpoints import assert_merged_beside_the_tower, assert_same_logits, theirs
from policies import load_base, make_policy
from tandem.errors import InvalidInput, UnknownArchitecture
from tandem.families.adapter import default_targets, lora_modules
from tandem.families.registry import arch_from_config, read_arch, weight_rules
from tandem.planning.checks import check_sizes
from tandem.planning.memory import GIB, Workload, rank_memory
from tandem.planning.plan import plan
from tandem.spool.schema import DELTA_NET_TARGETS, LORA_TARGETS, LoraShape
from tandem.topology.sizes import Sizes
from tiny import QWEN3_5_MOE, SHAPE, write_random_model

TEXT = {**SHAPE, **QWEN3_5_MOE, "num_hidden_layers": 3, "model_type": "qwen3_5_moe_text"}
LORA = LoraShape(rank=3, alpha=3.0, targets=("q_proj", "o_proj", *DELTA_NET_TARGETS))
A3B = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as transformers writes it, with tensors of each single expert."""
    return write_random_model(
        tmp_path_factory.mktemp("vision"), family="qwen3_5_moe", spread=0.5, num_hidden_layers=3
    )


@pytest.fixture(scope="module")
def stacked(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in the form of published checkpoints, with stacked experts. The tensors have
    the names that transformers uses in memory."""
    directory = tmp_path_factory.mktemp("stacked")
    (directory / "config.json").write_bytes((model / "config.json").read_bytes())
    tensors = {name: value.contiguous() for name, value in theirs(model).state_dict().items()}
    assert any(name.endswith("layers.0.mlp.experts.gate_up_proj") for name in tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def test_stacked_experts_are_read_as_single_ones(alone, model, stacked):
    single, policy = make_policy(model, LORA), make_policy(stacked, LORA)
    assert_same_logits(policy, theirs(stacked))
    for name, value in single.base().items():
        assert torch.equal(policy.base()[name], value), name


@pytest.mark.parametrize("cut", ["gate_up_proj", "down_proj"])
def test_a_stack_of_another_shape_is_refused(alone, stacked, tmp_path, cut):
    tensors = load_file(stacked / "model.safetensors")
    name = f"model.language_model.layers.1.mlp.experts.{cut}"
    tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    policy = make_policy(stacked, LORA)
    with pytest.raises(InvalidInput, match=r"layers\.1\.mlp\.experts\.0\..* has the shape"):
        load_base(policy, tmp_path)


def test_a_merged_model_has_the_names_of_the_checkpoint(alone, tmp_path, stacked):
    assert_merged_beside_the_tower(tmp_path, stacked, LORA)


def test_the_plan_has_the_parameters_of_transformers_model():
    values = {key: value for key, value in A3B.items() if key != "model_type"}
    with torch.device("meta"):
        config = transformers.CONFIG_MAPPING["qwen3_5_moe_text"](**values)
        reference = transformers.AutoModelForCausalLM.from_config(config)
    total = sum(parameter.numel() for parameter in reference.parameters())
    arch = arch_from_config(A3B)
    rules = [shape for rule in weight_rules(arch) for shape in rule.sources.values()]
    assert sum(map(math.prod, rules)) == total
    lora = LoraShape(rank=16, targets=default_targets(arch))
    assert rank_memory(Workload(arch, lora, 8192), Sizes()).weights == 2 * total
    adapted = {name.rpartition(".")[2] for name in lora_modules(arch, lora)}
    assert adapted == {*LORA_TARGETS[:4], *DELTA_NET_TARGETS}
    best = plan(Workload(arch, lora, 8192), 2, 80 * GIB).candidates[0]
    assert best.sizes.context == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"norm_topk_prob": False}, "probabilities as they are"),
        ({"num_experts_per_tok": 1}, "one normalised expert per token"),
        ({"num_experts_per_tok": 9}, "9 experts per token, but there are 8"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        ({"mlp_only_layers": [1]}, "layers without experts"),
    ],
)
def test_other_variants_are_refused(change, says):
    with pytest.raises((InvalidInput, UnknownArchitecture), match=says):
        arch_from_config({**TEXT, **change})


def test_sizes_that_do_not_divide_are_refused(model):
    with pytest.raises(InvalidInput, match="states don't travel"):
        check_sizes(read_arch(str(model)), Sizes(context=2))
    with pytest.raises(InvalidInput, match="41 features of the shared expert"):
        check_sizes(
            arch_from_config({**TEXT, "shared_expert_intermediate_size": 41}),
            Sizes(tensor=2, sequence=True),
        )


def test_experts_are_adapted_only_where_vllm_adapts_each(model):
    """vLLM's class for checkpoints with a vision tower can't adapt each expert: it adapts the
    projections gate and up of all experts as one layer."""
    with pytest.raises(InvalidInput, match="as one layer; leave out down_proj"):
        lora_modules(read_arch(str(model)), LoraShape(targets=("q_proj", "down_proj")))
    modules = lora_modules(arch_from_config(TEXT), LoraShape(targets=("down_proj",)))
    assert modules["model.layers.0.mlp.shared_expert.down_proj"] == (40, 32)
    assert modules["model.layers.2.mlp.experts.7.down_proj"] == (24, 32)
    assert len(modules) == 3 * 9
