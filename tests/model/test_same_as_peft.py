"""Tandem's LoRA is PEFT's LoRA: the files are the same, and so are the logits with and without an
adapter. `test_same_gradients.py` compares gradients."""

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file

from policies import all_logits, make_policy, write_random_adapter
from tandem.errors import CheckpointDamaged
from tandem.families.adapter import WEIGHTS_FILE, adapter_shapes, misread_by_peft
from tandem.families.identity_adapter import write_identity_adapter
from tandem.families.registry import read_arch
from tandem.model.lora import AdapterSwitch, LoraLinear
from tandem.spool.schema import LoraShape
from tiny import MOE, write_random_model

TOKENS = torch.randint(0, 260, (70,), generator=torch.Generator().manual_seed(5))

LORA = LoraShape(rank=4, alpha=10.0)


def base(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def test_an_adapter_that_peft_saved(alone, tmp_path):
    model = write_random_model(tmp_path / "model")
    config = peft.LoraConfig(
        r=4, lora_alpha=10.0, target_modules=list(LORA.targets), task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(base(model), config)
    torch.manual_seed(2)
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    theirs.save_pretrained(tmp_path / "adapter")
    policy = make_policy(model, LORA, tmp_path / "adapter")
    with torch.no_grad():
        logits, plain = theirs(TOKENS[None]).logits[0], base(model)(TOKENS[None]).logits[0]
        assert (logits - plain).abs().max() > 0.5  # The adapter changes the logits.
        assert (all_logits(policy, TOKENS) - logits).abs().max() <= 1e-4
        with policy.adapter_disabled():
            assert (all_logits(policy, TOKENS) - plain).abs().max() <= 1e-4
        assert (all_logits(policy, TOKENS) - logits).abs().max() <= 1e-4  # The adapter is on again.


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_adapter_that_we_saved_is_the_one_that_was_read(alone, tmp_path, family):
    """The saved file has the same bytes as the file that was read. In `test_same_gradients.py` PEFT
    reads adapter files of this form."""
    model = write_random_model(tmp_path / "model", family=family)
    adapter = write_random_adapter(tmp_path / "adapter", model, LORA)
    save_file(make_policy(model, LORA, adapter).adapter_tensors(), tmp_path / "saved")
    assert (tmp_path / "saved").read_bytes() == (adapter / WEIGHTS_FILE).read_bytes()


def test_a_layers_experts_are_few_parameters_and_many_of_pefts_tensors(alone, tmp_path):
    policy = make_policy(write_random_model(tmp_path / "model", family="qwen3_moe"), LORA)
    assert len(policy.lora_parameters()) == 2 * 2 * 7  # 2 layers, matrices A and B, 7 targets.
    stack = policy.lora_parameters()[
        "base_model.model.model.layers.1.mlp.experts.*.down_proj.lora_B.weight"
    ]
    assert stack.shape == (MOE["num_experts"], 32, LORA.rank)
    whole = policy.adapter_tensors()
    assert {key: tuple(tensor.shape) for key, tensor in whole.items()} == adapter_shapes(
        policy.arch, LORA
    )
    assert "base_model.model.model.layers.0.mlp.experts.7.gate_proj.lora_A.weight" in whole


@pytest.mark.parametrize(
    ("family", "targets", "right"),
    [
        ("qwen3", ("gate_proj", "up_proj"), True),
        ("qwen3_moe", LORA.targets, True),
        ("qwen3_moe", ("q_proj", "o_proj"), True),
        ("qwen3_moe", ("gate_proj", "up_proj"), False),
        ("qwen3_moe", ("down_proj",), True),
        ("qwen3_moe", ("gate_proj",), False),
        ("glm4_moe", ("down_proj",), False),
        ("glm4_moe", ("q_proj", "o_proj"), True),
        ("glm4_moe", LORA.targets, False),
        ("glm4_moe", ("gate_proj", "up_proj"), False),
    ],
)
def test_what_peft_misreads_is_known(alone, tmp_path, family, targets, right):
    model = write_random_model(tmp_path / "model", family=family)
    lora = LoraShape(rank=4, alpha=10.0, targets=targets)
    adapter = write_random_adapter(tmp_path / "adapter", model, lora)
    assert misread_by_peft(adapter_shapes(read_arch(str(model)), lora)) == (not right)
    ours = make_policy(model, lora, adapter)
    with torch.no_grad():
        try:
            theirs = peft.PeftModel.from_pretrained(base(model), adapter)(TOKENS[None]).logits[0]
            same = float((all_logits(ours, TOKENS) - theirs).abs().max()) <= 1e-4
        except (ValueError, RuntimeError):
            same = False
    assert same == right


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_identity_adapter_changes_nothing(alone, tmp_path, family):
    model, adapter = write_random_model(tmp_path / "model", family=family), tmp_path / "adapter"
    adapter.mkdir()
    write_identity_adapter(adapter, read_arch(str(model)), LORA, base_model=str(model), seed=7)
    policy = make_policy(model, LORA, adapter)
    with torch.no_grad():
        ours = all_logits(policy, TOKENS)
        with policy.adapter_disabled():
            assert torch.equal(all_logits(policy, TOKENS), ours)
        plain = base(model)(TOKENS[None]).logits[0]
        assert (ours - plain).abs().max() <= 1e-4
        if family == "qwen3":
            assert torch.equal(
                peft.PeftModel.from_pretrained(base(model), adapter)(TOKENS[None]).logits[0], plain
            )


def test_a_damaged_adapter_leaves_the_policy_as_it_was(alone, tmp_path):
    model = write_random_model(tmp_path / "model")
    policy = make_policy(model, LORA, write_random_adapter(tmp_path / "good", model, LORA, seed=1))
    before = policy.adapter_tensors()
    bad = write_random_adapter(tmp_path / "bad", model, LORA, seed=2)
    (bad / WEIGHTS_FILE).write_bytes((bad / WEIGHTS_FILE).read_bytes()[:-10])
    with pytest.raises(CheckpointDamaged):
        policy.load_adapter(bad)
    after = policy.adapter_tensors()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_sum_with_the_residual_rounds_it_once(alone):
    """The residual is far larger than the output that the layer adds to it. Rounding the large
    residual gives a larger error than rounding the layer's output."""
    torch.manual_seed(3)
    layer = LoraLinear(
        64, {"o_proj": 256}, "columns", LORA, AdapterSwitch(), dtype=torch.bfloat16
    ).requires_grad_(requires_grad=False)
    for parameter in layer.parameters():
        parameter.normal_(std=parameter.shape[1] ** -0.5)
    x, residual = torch.randn(33, 64).bfloat16(), (20 * torch.randn(33, 256)).bfloat16()
    output, _inner = layer(x, residual)
    a, b = (tensor.double() for tensor in layer.cast(torch.float32))
    exact = residual.double() + x.double() @ (layer.weight.double() + b @ a).t()
    error, one_rounding = (
        (tensor.double() - exact).abs().mean() for tensor in (output, exact.bfloat16())
    )
    assert error < 1.1 * one_rounding
