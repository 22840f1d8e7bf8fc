"""Tensors that layers keep for the backward pass. At a lower `SaveLevel` layers keep less, which
needs less memory and gives the same gradients. No tensor that a layer keeps outlives the pass."""

import gc

import pytest
import torch

from live_bytes import counted
from policies import gradients, linear_row, make_policy, write_random_adapter
from tandem.model import recompute
from tandem.model.layer.sublayers import AttentionSublayer, SaveLevel
from tandem.planning.memory import SavedBytes, choose_levels
from tandem.spool.schema import LATENT_TARGETS, LoraShape
from tiny import write_random_model

EXPERTS = LoraShape(rank=4, targets=("q_proj", "o_proj", "gate_proj", "down_proj"))
LATENT = LoraShape(rank=4, targets=(*LATENT_TARGETS, "o_proj", "down_proj"))


def make(directory, family, lora=None):
    model = write_random_model(directory / "model", family=family, num_hidden_layers=3)
    options = {} if lora is None else {"lora": lora}
    return make_policy(
        model,
        adapter=write_random_adapter(directory / "adapter", model, *options.values()),
        **options,
    )


def keep(policy, *levels):
    for layer, level in zip(policy.gpt.decoder.layers, levels, strict=True):
        layer.save_level = level


def backward(policy):
    outputs = policy(linear_row(range(50), padding=14))
    (outputs.logprobs.sum() + outputs.entropy.sum()).backward()
    return gradients(policy)


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("qwen3", None),
        ("gemma3_text", None),
        ("qwen2", None),
        ("glm4_moe", EXPERTS),
        ("qwen3_5_moe_text", EXPERTS),
        ("deepseek_v3", LATENT),
    ],
)
def test_every_level_gives_the_same_gradients_bit_for_bit(alone, tmp_path, family, lora):
    policy = make(tmp_path, family, lora)
    keep(policy, *[SaveLevel.ALL] * 3)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    expected = backward(policy)
    assert all(gradient.any() for gradient in expected.values())
    for levels in ([SaveLevel.INPUT] * 3, [SaveLevel.ATTENTION] * 3, list(SaveLevel)):
        keep(policy, *levels)
        actual = backward(policy)
        assert all(torch.equal(actual[name], gradient) for name, gradient in expected.items()), (
            levels
        )
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_levels_keep_less_and_nothing_stays(alone, tmp_path, family):
    """After a backward pass no tensor stays. Megatron's own recomputation of a mixture of experts
    kept two layer inputs per layer until the next forward pass."""
    policy = make(tmp_path, family)
    held = []
    for level in SaveLevel:
        keep(policy, *[level] * 3)
        backward(policy)  # The first pass also makes tensors that stay, such as buffers.
        gc.collect()
        gc.disable()
        try:
            with counted(torch.device("cpu")) as live:
                outputs = policy(linear_row(range(50), padding=14))
                held.append(live())
                outputs.logprobs.sum().backward()
                del outputs
                gradients(policy)
                assert live() == 0
        finally:
            gc.enable()
    assert held[0] < held[1] < held[2]


@pytest.mark.parametrize("level", list(SaveLevel))
def test_a_step_that_fails_leaves_nothing(alone, tmp_path, monkeypatch, level):
    """A step that runs out of memory leaves no tensors, so it can begin again with layers that keep
    less."""
    policy = make(tmp_path, "qwen3")
    keep(policy, *[level] * 3)
    backward(policy)
    first, compute = policy.gpt.decoder.layers[0].sublayers[0], AttentionSublayer.backward

    def fail(block, *arguments):
        if block is first:
            raise torch.OutOfMemoryError("in the last layer of a backward pass")
        return compute(block, *arguments)

    with counted(torch.device("cpu")) as live:
        policy(linear_row(range(50), padding=14))  # No backward pass follows this forward pass.
        gc.collect()
        assert live() == 0
        monkeypatch.setattr(AttentionSublayer, "backward", fail)
        with pytest.raises(torch.OutOfMemoryError):
            backward(policy)
        policy.zero_grad()
        # torch holds the failed pass's gradients until the next pass.
        torch.ones(1, requires_grad=True).sum().backward()
        gc.collect()
        assert live() == 0


def test_the_levels_that_a_budget_allows():
    """`budgets` maps a budget in bytes to two numbers: how many of the four layers keep everything,
    and how many keep the attention block."""
    budgets = {360: (4, 0), 359: (3, 1), 160: (1, 2), 59: (0, 0), -1: (0, 0)}
    assert {
        budget: choose_levels(SavedBytes(10, 30, 90), 4, budget) for budget in budgets
    } == budgets


def test_a_rank_that_has_no_room_for_one_whole_layer_chooses_too(alone, tmp_path, monkeypatch):
    """A rank without room for one whole layer must choose levels too, because the other ranks wait
    for this rank's choice."""

    def no_room(*_):
        raise torch.OutOfMemoryError

    policy = make(tmp_path, "qwen3")
    keep(policy, *[SaveLevel.INPUT] * 3)
    # On the CPU all layers keep everything.
    assert recompute.fit(policy, linear_row(range(50))) == [SaveLevel.ALL] * 3
    monkeypatch.setattr(recompute.device, "is_cuda", lambda: True)
    monkeypatch.setattr(recompute, "_fitting_levels", no_room)
    assert recompute.fit(policy, linear_row(range(50))) == [SaveLevel.INPUT] * 3
