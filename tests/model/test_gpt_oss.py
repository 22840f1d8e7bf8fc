"""GPT-OSS: what is refused, and that the comparison with transformers sees each special thing that is left out."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from policies import linear_row, make_policy
from tandem.errors import InvalidInput, UnknownArchitecture
from tandem.families.adapter import default_targets, lora_modules
from tandem.families.arch import Arch
from tandem.families.registry import arch_from_config, read_arch
from tandem.model import build
from tandem.model.experts import ExpertLinear
from tandem.model.layer import blocks, kernels, moe_block
from tandem.model.weights import base_weights
from tandem.spool.schema import LoraShape
from tiny import GPT_OSS, SHAPE, write_random_model

LORA = LoraShape(rank=3, targets=("q_proj",))
ATTEND, PIECE, LINEAR, BIASES = blocks.attend, base_weights._expert_piece, moe_block.linear, ExpertLinear.row_biases


def _other_layers(arch):
    return replace(arch, window=replace(arch.window, layers=tuple(not own for own in arch.window.layers)))


def _without_bias(column):
    return lambda self, *rest: None if self.column is column else BIASES(self, *rest)


BREAKS = {
    "no sinks": (blocks, "attend", lambda q, k, v, row, scale, _sinks: ATTEND(q, k, v, row, scale)),
    "no factor of YaRN": (Arch, "rope_factor", 1.0),
    "no YaRN": (build, "_yarn", lambda frequencies, *_: frequencies),
    "no clamp": (kernels, "LIMIT", 1e9),
    "gate and up not interleaved": (
        base_weights, "_expert_piece", lambda rule, *rest: PIECE(replace(rule, turns=1), *rest),
    ),
    "no bias of the router": (moe_block, "linear", lambda x, weight, _bias: LINEAR(x, weight)),
    "no bias of gate and up": (ExpertLinear, "row_biases", _without_bias(True)),
    "no bias of down": (ExpertLinear, "row_biases", _without_bias(False)),
}  # fmt: skip


def test_a_mistake_is_seen(alone, tmp_path):
    """Whole: 1e-5 of transformers' log-probs; with each mistake: at least 50 times that."""
    model = write_random_model(tmp_path, family="gpt_oss", seed=4, spread=1.0)
    tokens = torch.randint(0, 260, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens[None]).logits[0]
        expected = torch.log_softmax(theirs[:-1], -1).gather(-1, tokens[1:, None])[:, 0]

        def difference(arch=None) -> float:
            with mock.patch("policies.read_arch", return_value=arch or read_arch(str(model))):
                return float((make_policy(model, LORA)(linear_row(tokens)).logprobs - expected).abs().max())

        assert difference() <= 1e-5 * expected.abs().max()
        for name, (owner, attribute, mistake) in BREAKS.items():
            with mock.patch.object(owner, attribute, mistake):
                assert difference() > 5e-4 * expected.abs().max(), name
        assert difference(_other_layers(read_arch(str(model)))) > 0.1


def test_a_quantised_checkpoint_is_refused_by_its_tensors_too(alone, tmp_path):
    """Where config.json does not say so."""
    model = write_random_model(tmp_path, family="gpt_oss")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[name + "_blocks"] = tensors.pop(name)
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"only model\.layers.0\.mlp\.experts\.down_proj_blocks: it is quantised"):
        make_policy(model, LORA)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"Mxfp4Config.*dequantize=True.*save_pretrained"),
        ({"swiglu_limit": 5.0}, "swiglu_limit=5.0"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ({"sliding_window": None}, "without a sliding window"),
        ({"num_experts_per_tok": 1}, "2 is the least"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "scaling yarn are incomplete"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
    ],
)
def test_variants_of_gpt_oss_are_refused(change, says):
    config = {**SHAPE, **GPT_OSS, "model_type": "gpt_oss"}
    arch = arch_from_config(config)
    assert (arch.window.layers, arch.rope_factor) == ((True, False), pytest.approx(1.34657, rel=1e-5))
    assert len(lora_modules(arch, LoraShape(targets=default_targets(arch)))) == 8
    with pytest.raises(InvalidInput, match="as one layer; leave out gate_proj"):
        lora_modules(arch, LoraShape(targets=("q_proj", "gate_proj")))
    with pytest.raises((UnknownArchitecture, InvalidInput), match=says):
        arch_from_config({**config, **change})
