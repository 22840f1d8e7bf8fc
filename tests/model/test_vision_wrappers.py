"""The text models of checkpoints with a vision tower. The tests check the names of weights and
adapters, and the models that Tandem refuses."""

import json
from pathlib import Path

import peft
import pytest
import transformers
from safetensors.torch import load_file

from model.vision_checkpoints import assert_merged_beside_the_tower, assert_same_logits, theirs
from policies import make_policy, write_random_adapter
from tandem.errors import InvalidInput, UnknownArchitecture
from tandem.families.adapter import WEIGHTS_FILE, default_targets, lora_modules
from tandem.families.registry import arch_from_config, read_arch, weight_rules
from tandem.planning.checks import check_sizes
from tandem.spool.schema import DELTA_NET_TARGETS, LORA_TARGETS, LoraShape
from tandem.topology.sizes import Sizes
from tiny import GEMMA4, GEMMA4_MOE, MINISTRAL3, SHAPE, write_random_model

FAMILIES = {
    "qwen3_vl": 2 * 7,
    "qwen3_vl_moe": 2 * 4,
    "mistral3": 2 * 7,
    "gemma4": 2 * 6 - 1,  # Both layers lack k_proj, and the second layer lacks v_proj.
    "qwen3_5": 4 + 2 * 5 + 3 * 3,
    "qwen3_5_moe": 4 + 2 * 5,
}
"""The number of linear layers that a tiny model adapts by default, by family."""
LORA = LoraShape(rank=3, alpha=3.0, targets=("q_proj", "v_proj", "o_proj"))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tied = {"tie_word_embeddings": request.param in ("qwen3_vl", "gemma4")}
    delta_nets = request.param.startswith("qwen3_5")
    more = {"num_hidden_layers": 3, "spread": 0.5} if delta_nets else {"spread": 1.0}
    return write_random_model(
        tmp_path_factory.mktemp("vision"), family=request.param, **tied, **more
    )


def lora_of(model: Path) -> LoraShape:
    arch = read_arch(str(model))
    if arch.gdn is None:
        return LORA
    own = DELTA_NET_TARGETS if arch.moe else ("down_proj", *DELTA_NET_TARGETS)
    return LORA.model_copy(update={"targets": LORA.targets + own})


def test_the_adapter_has_the_names_of_transformers_modules(alone, tmp_path, model):
    lora = lora_of(model)
    adapter = write_random_adapter(tmp_path, model, lora)
    assert_same_logits(make_policy(model, lora), theirs(model))
    # Gemma 4's vision tower has layers with the names of the adapted layers, so PEFT can't load the
    # adapter.
    if read_arch(str(model)).global_heads:
        with pytest.raises(ValueError, match="Gemma4ClippableLinear"):
            peft.PeftModel.from_pretrained(theirs(model), adapter)
    else:
        with_adapter = peft.PeftModel.from_pretrained(theirs(model), adapter)
        assert_same_logits(make_policy(model, lora, adapter), with_adapter)
    keys = load_file(adapter / WEIGHTS_FILE).keys()
    assert all(key.startswith("base_model.model.model.language_model.layers.") for key in keys)


def test_a_merged_model_has_the_tower_as_it_was(alone, tmp_path, model):
    assert_merged_beside_the_tower(tmp_path, model, lora_of(model))


def test_the_tower_is_not_read(model):
    names = {name for rule in weight_rules(read_arch(str(model))) for name in rule.sources}
    stored = set(load_file(model / "model.safetensors"))
    tower = ("visual", "vision_tower", "multi_modal_projector", "embed_vision")
    assert names <= stored
    assert all(any(word in name for word in tower) for name in stored - names)


def test_default_targets(model):
    arch = read_arch(str(model))
    expected = set(LORA_TARGETS if arch.moe is None else LORA_TARGETS[:4])
    expected |= set(DELTA_NET_TARGETS) if arch.gdn else set()
    expected -= {"k_proj"} if arch.global_heads else set()
    assert set(default_targets(arch)) == expected
    modules = lora_modules(arch, LoraShape(targets=default_targets(arch)))
    assert len(modules) == FAMILIES[arch.model_type]


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


GEMMA = {**SHAPE, **GEMMA4, "model_type": "gemma4_text", "layer_types": None}
GEMMA |= {"num_hidden_layers": 6}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size_per_layer_input": 256}, "embeddings of each layer"),
        ({"hidden_size_per_layer_input": None}, "embeddings of each layer"),
        ({"num_kv_shared_layers": 2}, "layers that share keys and values"),
        ({"use_bidirectional_attention": "all"}, "attention in both directions"),
        ({"num_experts": 8}, "num_experts without enable_moe_block"),
        ({**GEMMA4_MOE, "top_k_experts": 1}, "2 is the least"),
        ({"num_global_key_value_heads": 3}, "4 attention heads don't divide into 3 groups"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types is"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters has full_attention"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config="),
    ],
)
def test_other_variants_of_gemma4_are_refused(change, says):
    config = {key: value for key, value in {**GEMMA, **change}.items() if value is not None}
    with pytest.raises((InvalidInput, UnknownArchitecture), match=says):
        arch_from_config(config)


def test_gemma4s_published_configs_mean_what_transformers_writes(tmp_path):
    """The published configs have separate keys for layers without a window. The configs that
    transformers writes have `per_layer_config`."""
    published = {key: value for key, value in GEMMA.items() if value is not None}
    written = transformers.CONFIG_MAPPING["gemma4_text"](**published).to_dict()
    assert "per_layer_config" in written
    assert "global_head_dim" not in written
    arch = arch_from_config(published)
    assert arch == arch_from_config(json.loads(json.dumps(written)))
    assert arch.window.layers == (True,) * 5 + (False,)
    assert (arch.of_layer(0).head_dim, arch.of_layer(5).head_dim) == (16, 24)


def test_what_makes_keys_and_values_has_no_adapter():
    arch = arch_from_config({key: value for key, value in GEMMA.items() if value is not None})
    for targets, says in ((("q_proj", "k_proj"), "leave out k_proj"), (("v_proj",), "another")):
        with pytest.raises(InvalidInput, match=says):
            lora_modules(arch, LoraShape(targets=targets))
    with pytest.raises(InvalidInput, match="1 key/value heads of layers without a window"):
        check_sizes(arch, Sizes(tensor=2))


def test_experts_beside_a_tower_have_no_adapters_of_their_own(tmp_path):
    arch = read_arch(str(write_random_model(tmp_path, family="qwen3_vl_moe")))
    with pytest.raises(InvalidInput, match="as one layer; leave out down_proj"):
        lora_modules(arch, LoraShape(targets=("q_proj", "down_proj")))
