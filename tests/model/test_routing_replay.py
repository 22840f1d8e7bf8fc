"""A row may have the numbers of routed experts. Then the model uses these experts, and the router
computes the weights of the experts. Values and gradients equal those of transformers in float64. In
transformers, the router is forced to choose the same experts."""

from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.func import functional_call
from torch.nn.functional import linear

from policies import (
    assert_close,
    gradients,
    linear_row,
    logits,
    make_policy,
    merged,
    write_random_adapter,
)
from tandem.families.adapter import WEIGHTS_FILE
from tandem.model.layer.sublayers import SaveLevel
from tandem.spool.schema import LoraShape
from tiny import MOE, SHAPE, write_random_model

TOKENS = torch.randint(0, 260, (70,), generator=torch.Generator().manual_seed(5))
LORA = LoraShape(rank=4, alpha=10.0)
LAYERS, EXPERTS, CHOSEN = SHAPE["num_hidden_layers"], MOE["num_experts"], MOE["num_experts_per_tok"]


def loss(logprobs):
    """A function of all next-token log-probs. Each log-prob has a weight of its own."""
    return (logprobs * torch.linspace(-1.0, 2.0, len(logprobs))).mean()


def random_experts(seed: int = 3) -> torch.Tensor:
    """int16 [tokens, layers, experts per token]. The experts of a token in a layer are all
    different, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.rand(len(TOKENS), LAYERS, EXPERTS, generator=generator)
        .argsort(-1)[..., :CHOSEN]
        .to(torch.int16)
    )


def forced(gate, given: torch.Tensor):
    """A forward function for transformers' router that chooses the experts `given`. Where `given`
    is -1, the router's own choice stays."""

    def forward(hidden):
        scores = linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
        probs = scores.softmax(-1)
        chosen = torch.where(given >= 0, given, probs.topk(gate.top_k).indices)
        weights = probs.gather(-1, chosen)
        return (
            scores,
            weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights,
            chosen,
        )

    return forward


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_values_and_gradients_with_forced_experts(alone, tmp_path, norm_topk_prob):
    model = write_random_model(
        tmp_path / "model", family="qwen3_moe", norm_topk_prob=norm_topk_prob
    )
    directory = write_random_adapter(tmp_path / "adapter", model, LORA)
    tensors = load_file(directory / WEIGHTS_FILE)
    adapter = {key: value.double().requires_grad_() for key, value in tensors.items()}
    experts = random_experts()
    experts[20:30] = -1  # The router chooses the experts of tokens 20 to 29.
    # The grouped product of transformers does not support float64, so experts are computed eagerly.
    load = transformers.AutoModelForCausalLM.from_pretrained
    reference = load(model, dtype=torch.float64, experts_implementation="eager").requires_grad_(
        False
    )
    free = reference(TOKENS[None]).logits[0]
    for index, layer in enumerate(reference.model.layers):
        layer.mlp.gate.forward = forced(layer.mlp.gate, experts[:, index].long())
    expected = functional_call(reference, merged(reference, adapter, LORA), (TOKENS[None],)).logits[
        0
    ]
    # The forced experts give other logits than the router's own choice.
    assert (free - reference(TOKENS[None]).logits[0]).abs().max() > 0.5
    loss(torch.log_softmax(expected[:-1], -1).gather(-1, TOKENS[1:, None]).squeeze(-1)).backward()

    policy = make_policy(model, LORA, directory)
    row = replace(linear_row(TOKENS), slot_experts=experts)
    with torch.no_grad():
        assert (logits(policy, row) - expected).abs().max() <= 1e-4
    found = []
    for keep in SaveLevel:
        for layer in policy.gpt.decoder.layers:
            layer.save_level = keep
        loss(policy(row).logprobs).backward()
        found.append(gradients(policy))
    for others in found[1:]:  # The recomputation in the backward pass uses the forced experts too.
        assert all(torch.equal(gradient, others[name]) for name, gradient in found[0].items())
    actual = {}
    for name, gradient in found[0].items():
        actual |= policy.adapter.gather(name, gradient.double())
    assert_close(actual, {key: tensor.grad for key, tensor in adapter.items()}, 1e-4)


def test_the_routers_own_choice_gives_the_same_bits(alone, tmp_path):
    model = write_random_model(tmp_path / "model", family="qwen3_moe")
    policy, chosen = make_policy(model), []
    for layer in policy.gpt.decoder.layers:
        mixture = layer.sublayers[1]
        route = mixture._route
        mixture._route = lambda *given, route=route: chosen.append(route(*given)) or chosen[-1]
    with torch.no_grad():
        free = logits(policy, linear_row(TOKENS))
        own = torch.stack([routing.experts for routing in chosen], 1).to(torch.int16)
        assert torch.equal(logits(policy, replace(linear_row(TOKENS), slot_experts=own)), free)
        assert torch.equal(
            logits(policy, replace(linear_row(TOKENS), slot_experts=torch.full_like(own, -1))), free
        )
