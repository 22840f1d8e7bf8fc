"""Our LoRA is PEFT's: files in both directions, logits and every gradient, also on experts, which PEFT can't adapt."""

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.func import functional_call

from policies import all_logits, assert_close, gradients, linear_row, make_policy, merged, write_random_adapter
from tandem.errors import CheckpointDamaged
from tandem.families.adapter import WEIGHTS_FILE, adapter_shapes, write_adapter_config
from tandem.families.identity_adapter import write_identity_adapter
from tandem.families.registry import read_arch
from tandem.model.weights.checkpoint_tensors import read_adapter
from tandem.spool.schema import LoraShape
from tiny import MOE, write_random_model

TOKENS = torch.randint(0, 260, (70,), generator=torch.Generator().manual_seed(5))

SHAPES = [
    LoraShape(rank=4, alpha=10.0),
    LoraShape(rank=1, alpha=3.0),
    LoraShape(rank=13, alpha=32.0, targets=("q_proj", "v_proj", "up_proj")),
    LoraShape(rank=8, alpha=4.0, targets=("k_proj", "gate_proj", "down_proj", "o_proj")),
]
EXPERT_SHAPES = [
    LoraShape(rank=4, alpha=10.0),
    LoraShape(rank=8, alpha=3.0, targets=("gate_proj", "up_proj", "down_proj")),
    LoraShape(rank=3, alpha=6.0, targets=("q_proj", "up_proj")),
    LoraShape(rank=1, alpha=2.0, targets=("down_proj", "o_proj")),
]
ATTENTION = LoraShape(rank=4, alpha=10.0, targets=("q_proj", "k_proj", "v_proj", "o_proj"))


def name_of(lora):
    return f"r{lora.rank}a{lora.alpha}x{len(lora.targets)}"


def base(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def loss(logprobs):
    """A function of all next-token log-probs that weighs each differently."""
    return (logprobs * torch.linspace(-1.0, 2.0, len(logprobs))).mean()


def loss_of_logits(logits):
    return loss(torch.log_softmax(logits[:-1], -1).gather(-1, TOKENS[1:, None]).squeeze(-1))


def assert_same(policy, logits, plain, expected_gradients):
    """The policy has these logits, with its adapter and without, and these gradients of `loss`, by PEFT key."""
    with torch.no_grad():
        assert (logits - plain).abs().max() > 0.5  # the adapter does something
        assert (all_logits(policy, TOKENS) - logits).abs().max() <= 1e-4
        with policy.adapter_disabled():
            assert (all_logits(policy, TOKENS) - plain).abs().max() <= 1e-4
        assert (all_logits(policy, TOKENS) - logits).abs().max() <= 1e-4  # the adapter is on again
    loss(policy(linear_row(TOKENS)).logprobs).backward()
    actual = {}
    for name, gradient in gradients(policy).items():
        actual |= policy.adapter.gather(name, gradient)
    assert_close(actual, expected_gradients, 1e-4)
    assert all(parameter.grad is None for parameter in policy.parameters())  # the base is frozen


@pytest.mark.parametrize("lora", SHAPES, ids=name_of)
def test_an_adapter_that_peft_saved(alone, tmp_path, lora):
    model = write_random_model(tmp_path / "model")
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets), task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(base(model), config)
    torch.manual_seed(2)
    adapter = {name: parameter for name, parameter in theirs.named_parameters() if "lora_" in name}
    for parameter in adapter.values():
        torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    theirs.save_pretrained(tmp_path / "adapter")
    logits, plain = theirs(TOKENS[None]).logits[0], base(model)(TOKENS[None]).logits[0]
    loss_of_logits(logits).backward()
    their_gradients = {name.replace(".default", ""): parameter.grad for name, parameter in adapter.items()}
    assert_same(make_policy(model, lora, tmp_path / "adapter"), logits, plain, their_gradients)


@pytest.mark.parametrize("lora", EXPERT_SHAPES, ids=name_of)
def test_an_adapter_on_experts(alone, tmp_path, lora):
    model = write_random_model(tmp_path / "model", family="qwen3_moe")
    directory = write_random_adapter(tmp_path / "adapter", model, lora)
    adapter = {
        key: value.clone().requires_grad_()
        for key, value in read_adapter(directory, read_arch(str(model)), lora, torch.device("cpu")).items()
    }
    reference = base(model).requires_grad_(False)
    logits = functional_call(reference, merged(reference, adapter, lora), (TOKENS[None],)).logits[0]
    loss_of_logits(logits).backward()
    expected = {key: tensor.grad for key, tensor in adapter.items()}
    assert_same(make_policy(model, lora, directory), logits, reference(TOKENS[None]).logits[0], expected)


@pytest.mark.parametrize(("family", "lora"), [*(("qwen3", lora) for lora in SHAPES), ("qwen3_moe", ATTENTION)])
def test_an_adapter_that_we_saved(alone, tmp_path, family, lora):
    model = write_random_model(tmp_path / "model", family=family, tie_word_embeddings=True)
    ours = make_policy(model, lora, write_random_adapter(tmp_path / "first", model, lora))
    saved = tmp_path / "saved"
    saved.mkdir()
    save_file(ours.adapter_tensors(), saved / WEIGHTS_FILE)
    write_adapter_config(saved, lora, str(model))
    assert (saved / WEIGHTS_FILE).read_bytes() == (tmp_path / "first" / WEIGHTS_FILE).read_bytes()
    theirs = peft.PeftModel.from_pretrained(base(model), saved)
    with torch.no_grad():
        assert (all_logits(ours, TOKENS) - theirs(TOKENS[None]).logits[0]).abs().max() <= 1e-4


def test_a_layers_experts_are_few_parameters_and_many_of_pefts_tensors(alone, tmp_path):
    model, lora = write_random_model(tmp_path / "model", family="qwen3_moe"), SHAPES[0]
    adapter = write_random_adapter(tmp_path / "adapter", model, lora)
    policy = make_policy(model, lora, adapter)
    assert len(policy.lora_parameters()) == 2 * 2 * 7  # layers, A and B, targets
    stack = policy.lora_parameters()["base_model.model.model.layers.1.mlp.experts.*.down_proj.lora_B.weight"]
    assert stack.shape == (MOE["num_experts"], 32, lora.rank)
    whole = policy.adapter_tensors()
    assert {key: tuple(tensor.shape) for key, tensor in whole.items()} == adapter_shapes(policy.arch, lora)
    assert "base_model.model.model.layers.0.mlp.experts.7.gate_proj.lora_A.weight" in whole
    for name, parameter in policy.lora_parameters().items():
        assert torch.equal(policy.adapter.shard(name, whole.__getitem__), parameter.data), name
    save_file(whole, tmp_path / "saved")
    assert (tmp_path / "saved").read_bytes() == (adapter / WEIGHTS_FILE).read_bytes()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_identity_adapter_changes_nothing(alone, tmp_path, family):
    model, lora, adapter = write_random_model(tmp_path / "model", family=family), SHAPES[0], tmp_path / "adapter"
    adapter.mkdir()
    write_identity_adapter(adapter, read_arch(str(model)), lora, base_model=str(model), seed=7)
    policy = make_policy(model, lora, adapter)
    with torch.no_grad():
        ours = all_logits(policy, TOKENS)
        with policy.adapter_disabled():
            assert torch.equal(all_logits(policy, TOKENS), ours)
        plain = base(model)(TOKENS[None]).logits[0]
        assert (ours - plain).abs().max() <= 1e-4
        if family == "qwen3":
            assert torch.equal(peft.PeftModel.from_pretrained(base(model), adapter)(TOKENS[None]).logits[0], plain)


def test_a_damaged_adapter_leaves_the_policy_as_it_was(alone, tmp_path):
    model, lora = write_random_model(tmp_path / "model"), SHAPES[0]
    policy = make_policy(model, lora, write_random_adapter(tmp_path / "good", model, lora, seed=1))
    before = policy.adapter_tensors()
    bad = write_random_adapter(tmp_path / "bad", model, lora, seed=2)
    (bad / WEIGHTS_FILE).write_bytes((bad / WEIGHTS_FILE).read_bytes()[:-10])
    with pytest.raises(CheckpointDamaged):
        policy.load_adapter(bad)
    after = policy.adapter_tensors()
    assert all(torch.equal(after[name], value) for name, value in before.items())
