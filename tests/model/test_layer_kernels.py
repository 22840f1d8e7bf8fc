"""Each kernel of a layer, on the CPU and on a GPU, computes the same as autograd of the kernel's
formula in float64."""

import pytest
import torch
import torch.distributed as dist

from tandem.model import fp8, logprobs
from tandem.model.layer import kernels
from tandem.model.layer.heads import HeadShape

WHERE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BOUND = {"cpu": 3e-6, "cuda": 1e-5}


@pytest.fixture
def random():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


def close(actual, expected, where):
    """The difference is within `BOUND`, relative to the norm of `expected`."""
    error = (actual.double().cpu() - expected).norm() / expected.norm()
    assert error <= BOUND[where], float(error)


def norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("features", [64, 200, 4096])
def test_rms_norm(random, where, features):
    x, weight, gradient, plus = (
        random(7, features),
        random(features),
        random(7, features),
        random(7, features),
    )
    expected_x = x.double().requires_grad_()
    expected = norm(expected_x, weight.double(), 1e-6)
    expected.backward(gradient.double())
    x, weight, gradient, plus = (tensor.to(where) for tensor in (x, weight, gradient, plus))
    close(kernels.rms_norm(x, weight, 1e-6), expected.detach(), where)
    actual = kernels.rms_norm_backward(gradient, x, weight, 1e-6, plus)
    close(actual - plus, expected_x.grad, where)


def silu(gate, up):
    return torch.nn.functional.silu(gate) * up


def gelu(gate, up):
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def clamped(gate, up):
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("features", [64, 3000])
@pytest.mark.parametrize(("name", "formula"), [("swiglu", silu), ("geglu", gelu)])
def test_activations(random, where, features, name, formula):
    gate_up, gradient = random(5, 2 * features), random(5, features)
    expected_input = gate_up.double().requires_grad_()
    expected = formula(*expected_input.chunk(2, -1))
    expected.backward(gradient.double())
    gate_up, gradient = gate_up.to(where), gradient.to(where)
    close(getattr(kernels, name)(gate_up), expected.detach(), where)
    of_input, again = getattr(kernels, name + "_backward")(gradient, gate_up)
    close(again, expected.detach(), where)
    close(of_input, expected_input.grad, where)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("features", [64, 768])
@pytest.mark.parametrize(
    ("name", "formula"), [("expert_swiglu", silu), ("clamped_swiglu", clamped)]
)
def test_activations_of_experts(random, where, features, name, formula):
    gate_up, gradient, probs = 4 * random(5, 2 * features), random(5, features), random(5).abs()
    expected_input, expected_probs = (
        gate_up.double().requires_grad_(),
        probs.double().requires_grad_(),
    )
    expected = formula(*expected_input.chunk(2, -1)) * expected_probs[:, None]
    expected.backward(gradient.double())
    gate_up, gradient, probs = (tensor.to(where) for tensor in (gate_up, gradient, probs))
    close(getattr(kernels, name)(gate_up, probs), expected.detach(), where)
    of_input, again, of_probs = getattr(kernels, name + "_backward")(gradient, gate_up, probs)
    close(again, expected.detach(), where)
    close(of_input, expected_input.grad, where)
    close(of_probs, expected_probs.grad, where)


@pytest.mark.gpu
def test_fp8_products(random):
    """Rows and weights are quantised to three bits of mantissa, so the products differ from the
    exact products by a few percent of the norm."""
    weight, x, gradient = (
        tensor.cuda().bfloat16() for tensor in (random(256, 512), random(33, 512), random(33, 256))
    )
    exact = weight.double()
    quantised = fp8.Fp8Weight(weight)
    for actual, expected in (
        (quantised.forward(x), x.double() @ exact.t()),
        (quantised.backward(gradient), gradient.double() @ exact),
    ):
        assert actual.dtype is torch.bfloat16
        error = ((actual.double() - expected).norm() / expected.norm()).item()
        assert 0.005 < error < 0.05


@pytest.mark.parametrize("where", WHERE)
def test_sum_assignments(random, where):
    values, plus, assignments = random(20, 48), random(5, 48), torch.randperm(20).view(5, 4)
    actual = kernels.sum_assignments(values.to(where), assignments.to(where), plus.to(where))
    close(actual, plus.double() + values.double()[assignments].sum(1), where)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("groups", "queries", "size"), [(2, 4, 16), (1, 1, 24), (3, 7, 64)])
def test_heads(random, where, normalised, groups, queries, size):
    slots, length, heads = 9, 12, groups * queries
    qkv, gradients = (
        random(slots, groups * (queries + 2) * size),
        (random(length, heads, size), *random(2, length, groups, size)),
    )
    weights = (random(size), random(size)) if normalised else (None, None)
    angles = random(slots, size // 2)
    expected_qkv = qkv.double().requires_grad_()
    parts = list(expected_qkv.view(slots, groups, queries + 2, size).split([queries, 1, 1], 2))
    turn = torch.exp(1j * angles.double())[:, None, None]
    for index, weight in enumerate(weights):
        part = parts[index] if weight is None else norm(parts[index], weight.double(), 1e-6)
        number = torch.complex(*part.chunk(2, -1)) * turn
        parts[index] = torch.cat((number.real, number.imag), -1)
    expected = [part.flatten(1, 2) for part in parts]
    sum(
        (part * gradient[:slots].double()).sum()
        for part, gradient in zip(expected, gradients, strict=True)
    ).backward()

    shape = HeadShape(
        groups, queries, size, 1e-6, *(w if w is None else w.to(where) for w in weights)
    )
    rotation = angles.cos().to(where), angles.sin().to(where)
    actual = kernels.split_heads(qkv.to(where), shape, *rotation, length)
    for part, wanted in zip(actual, expected, strict=True):
        close(part[:slots], wanted.detach(), where)
        assert not part[slots:].any()
    # The tensors are strided, as attention returns them.
    strided = tuple(g.to(where).transpose(0, 1).contiguous().transpose(0, 1) for g in gradients)
    close(
        kernels.split_heads_backward(strided, qkv.to(where), shape, *rotation),
        expected_qkv.grad,
        where,
    )


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("vocabulary", [130, 9000])
def test_log_probs_and_entropies(alone, random, monkeypatch, where, vocabulary):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 3 * vocabulary)
    hidden, weight, targets = random(8, 32), random(vocabulary, 32), torch.arange(8) * 16
    of_logprobs, of_entropy = random(8), random(8)
    expected_hidden = hidden.double().requires_grad_()
    log_p = torch.log_softmax(expected_hidden @ weight.double().t() / 0.7, -1)
    expected = log_p[torch.arange(8), targets], -(log_p.exp() * log_p).sum(-1)
    (expected[0] @ of_logprobs.double() + expected[1] @ of_entropy.double()).backward()

    hidden = hidden.to(where).requires_grad_()
    actual = logprobs.item_logprobs(
        hidden,
        targets.to(where),
        weight.to(where),
        vocab_start=0,
        temperature=0.7,
        group=dist.group.WORLD,
    )
    (actual[0] @ of_logprobs.to(where) + actual[1] @ of_entropy.to(where)).backward()
    for one, other in zip(actual, expected, strict=True):
        close(one.detach(), other.detach(), where)
    close(hidden.grad, expected_hidden.grad, where)
