"""The text models of checkpoints with a vision tower: names of weights and of adapters, and what is
refused. `test_qwen3_5.py` has Qwen3.5's."""

from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from family_cases import SEQUENCES
from policies import all_logits, make_policy, write_random_adapter
from tandem.errors import InvalidInput, UnknownArchitecture
from tandem.families.adapter import WEIGHTS_FILE, default_targets, lora_modules
from tandem.families.registry import arch_from_config, read_arch, weight_rules
from tandem.inference.merged_model import write_merged_model
from tandem.spool.schema import LORA_TARGETS, LoraShape
from tiny import MINISTRAL3, SHAPE, write_random_model

FAMILIES = ["qwen3_vl", "qwen3_vl_moe", "mistral3"]
LORA = LoraShape(rank=3, alpha=3.0, targets=("q_proj", "k_proj", "o_proj"))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tied = {"tie_word_embeddings": request.param == "qwen3_vl"}
    return write_random_model(
        tmp_path_factory.mktemp("vision"), family=request.param, spread=1.0, **tied
    )


def theirs(directory: Path) -> torch.nn.Module:
    return transformers.AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )


def assert_same_logits(policy, reference) -> None:
    for sequence in SEQUENCES:
        with torch.no_grad():
            expected, found = reference(sequence[None]).logits[0], all_logits(policy, sequence)
        assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_the_adapter_has_the_names_of_transformers_modules(alone, tmp_path, model):
    adapter = write_random_adapter(tmp_path, model, LORA)
    assert_same_logits(make_policy(model, LORA), theirs(model))
    with_adapter = peft.PeftModel.from_pretrained(theirs(model), adapter)
    assert_same_logits(make_policy(model, LORA, adapter), with_adapter)
    keys = load_file(adapter / WEIGHTS_FILE).keys()
    assert all(key.startswith("base_model.model.model.language_model.layers.") for key in keys)


def test_a_merged_model_has_the_tower_as_it_was(alone, tmp_path, model):
    adapter = write_random_adapter(tmp_path / "adapter", model, LORA)
    write_merged_model(tmp_path / "merged", model, adapter, LORA)
    assert_same_logits(make_policy(model, LORA, adapter), theirs(tmp_path / "merged"))
    before, after = (load_file(d / "model.safetensors") for d in (model, tmp_path / "merged"))
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved == {f"{name}.weight" for name in lora_modules(read_arch(str(model)), LORA)}


def test_the_tower_is_not_read(model):
    names = {name for rule in weight_rules(read_arch(str(model))) for name in rule.sources}
    stored = set(load_file(model / "model.safetensors"))
    tower = ("visual", "vision_tower", "multi_modal_projector")
    assert names <= stored
    assert all(any(word in name for word in tower) for name in stored - names)


def test_default_targets(model):
    arch = read_arch(str(model))
    expected = LORA_TARGETS if arch.moe is None else LORA_TARGETS[:4]
    assert default_targets(arch) == expected
    assert len(lora_modules(arch, LoraShape(targets=default_targets(arch)))) == 2 * len(expected)


def test_what_is_refused():
    text = {**SHAPE, **MINISTRAL3, "model_type": "ministral3"}
    config = {"model_type": "mistral3", "text_config": text}
    assert not arch_from_config(config).tie_embeddings
    assert arch_from_config({**config, "text_config": SHAPE}).window.tokens == 4096
    for change, says in (
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True beside False"),
        ({"text_config": {**text, "model_type": "mistral4"}}, "the text model 'mistral4'"),
        ({"text_config": {**text, "rope_parameters": {"rope_theta": 1e4}}}, "don't grow"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
    ):
        with pytest.raises(UnknownArchitecture, match=says):
            arch_from_config({**config, **change})
    with pytest.raises(InvalidInput, match="text_config is missing"):
        arch_from_config({"model_type": "qwen3_vl"})


def test_experts_beside_a_tower_have_no_adapters_of_their_own(tmp_path):
    arch = read_arch(str(write_random_model(tmp_path, family="qwen3_vl_moe")))
    with pytest.raises(InvalidInput, match="as one layer; leave out down_proj"):
        lora_modules(arch, LoraShape(targets=("q_proj", "down_proj")))
