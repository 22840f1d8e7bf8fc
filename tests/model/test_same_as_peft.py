"""Our LoRA is PEFT's: files in both directions, logits, and every gradient."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file

from policies import all_logits, assert_close, gradients, linear_row, make_policy, write_random_adapter
from tandem.errors import CheckpointDamaged
from tandem.families.adapter import WEIGHTS_FILE, write_adapter_config
from tandem.families.identity import write_identity_adapter
from tandem.families.registry import read_arch
from tandem.spool.schema import LoraShape
from tiny import write_random_model

TOKENS = torch.randint(0, 260, (70,), generator=torch.Generator().manual_seed(5))

SHAPES = [
    LoraShape(rank=4, alpha=10.0),
    LoraShape(rank=1, alpha=3.0),
    LoraShape(rank=13, alpha=32.0, targets=("q_proj", "v_proj", "up_proj")),
    LoraShape(rank=8, alpha=4.0, targets=("k_proj", "gate_proj", "down_proj", "o_proj")),
]


def base(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    """Some function of all next-token log-probs, weighted unevenly."""
    logp = torch.log_softmax(logits[:-1], -1).gather(-1, TOKENS[1:, None]).squeeze(-1)
    return (logp * torch.linspace(-1.0, 2.0, len(logp))).mean()


@pytest.mark.parametrize("lora", SHAPES, ids=lambda lora: f"r{lora.rank}a{lora.alpha}x{len(lora.targets)}")
def test_an_adapter_that_peft_saved(alone, tmp_path, lora):
    model = write_random_model(tmp_path / "model")
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets), task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(base(model), config)
    torch.manual_seed(2)
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    theirs.save_pretrained(tmp_path / "adapter")

    ours = make_policy(model, lora, tmp_path / "adapter")
    expected = theirs(TOKENS[None]).logits[0]
    with torch.no_grad():
        plain = base(model)(TOKENS[None]).logits[0]
        assert (expected - plain).abs().max() > 0.5  # the adapter does something
        assert (all_logits(ours, TOKENS) - expected).abs().max() <= 1e-4
        with ours.adapter_disabled():
            assert (all_logits(ours, TOKENS) - plain).abs().max() <= 1e-4
        assert (all_logits(ours, TOKENS) - expected).abs().max() <= 1e-4  # it is on again

    loss_of(expected).backward()
    outputs = ours(linear_row(TOKENS.numpy()))
    (outputs.logprobs * torch.linspace(-1.0, 2.0, len(outputs.logprobs))).mean().backward()
    their_gradients = {
        name.replace(".default", ""): parameter.grad for name, parameter in theirs.named_parameters() if "lora_" in name
    }
    assert_close(gradients(ours), their_gradients, 1e-4)
    assert all(parameter.grad is None for parameter in ours.parameters())  # the base is frozen


@pytest.mark.parametrize("lora", SHAPES, ids=lambda lora: f"r{lora.rank}a{lora.alpha}x{len(lora.targets)}")
def test_an_adapter_that_we_saved(alone, tmp_path, lora):
    model = write_random_model(tmp_path / "model", tie_word_embeddings=True)
    ours = make_policy(model, lora, write_random_adapter(tmp_path / "first", model, lora))
    saved = tmp_path / "saved"
    saved.mkdir()
    save_file(ours.adapter_tensors(), saved / WEIGHTS_FILE)
    write_adapter_config(saved, lora, str(model))
    assert (saved / WEIGHTS_FILE).read_bytes() == (tmp_path / "first" / WEIGHTS_FILE).read_bytes()

    theirs = peft.PeftModel.from_pretrained(base(model), saved)
    with torch.no_grad():
        expected, actual = theirs(TOKENS[None]).logits[0], all_logits(ours, TOKENS)
    assert (actual - expected).abs().max() <= 1e-4


def test_the_identity_adapter_in_peft_and_in_ours_is_the_base_model(alone, tmp_path):
    model = write_random_model(tmp_path / "model")
    lora = LoraShape(rank=4, alpha=8)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    write_identity_adapter(adapter, read_arch(str(model)), lora, base_model=str(model), seed=7)
    with torch.no_grad():
        plain = base(model)(TOKENS[None]).logits[0]
        theirs = peft.PeftModel.from_pretrained(base(model), adapter)(TOKENS[None]).logits[0]
        ours = all_logits(make_policy(model, lora, adapter), TOKENS)
    assert torch.equal(theirs, plain)
    assert (ours - plain).abs().max() <= 1e-4


def test_a_damaged_adapter_leaves_the_policy_as_it_was(alone, tmp_path):
    model = write_random_model(tmp_path / "model")
    lora = SHAPES[0]
    policy = make_policy(model, lora, write_random_adapter(tmp_path / "good", model, lora, seed=1))
    before = policy.adapter_tensors()
    bad = write_random_adapter(tmp_path / "bad", model, lora, seed=2)
    (bad / WEIGHTS_FILE).write_bytes((bad / WEIGHTS_FILE).read_bytes()[:-10])
    with pytest.raises(CheckpointDamaged):
        policy.load_adapter(bad)
    after = policy.adapter_tensors()
    assert all(torch.equal(after[name], value) for name, value in before.items())
