"""The gated delta rule over packed trees computes the same as transformers' chunk rule. The rule
over packed trees also computes the same as the recurrence, which goes token by token along each
sequence."""

import itertools
import random

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from conftest import SEED
from tandem.model import delta_rule as module
from tandem.model.delta_rule import convolve, delta_rule, recurrence

Tree = tuple[torch.Tensor, list[list[int]]]


def random_tree(choose: random.Random, slots: int) -> Tree:
    """`subtree_end` of a row of random trees with padding, and the slots of each sequence. The root
    segment of each tree has two slots or more, because a sequence of one slot predicts nothing and
    counts as padding."""
    ends: list[int] = []
    paths: list[list[int]] = []

    def grow(path: list[int], depth: int) -> None:
        begin, length = len(ends), choose.choice([1, 2, 3, 5, 17, 64, 65, 90])
        length += depth == 0
        path = path + list(range(begin, begin + length))
        ends.extend([0] * length)
        children = choose.choice([0, 2, 3]) if depth < 4 and len(ends) < slots else 0
        for _ in range(children):
            grow(path, depth + 1)
        ends[begin : begin + length] = [len(ends)] * length
        if not children:
            paths.append(path)

    while len(ends) < slots:
        grow([], 0)
    ends += range(len(ends) + 1, len(ends) + 1 + choose.randrange(4))
    return torch.tensor(ends), paths


def inputs(seed: int, slots: int, heads: tuple[int, int], sizes: tuple[int, int]):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = (
        randn(slots, h, s)
        for h, s in zip((heads[0], heads[0], heads[1]), (sizes[0], *sizes), strict=True)
    )
    g = -torch.nn.functional.softplus(randn(slots, heads[1]) - 1)
    return [x.requires_grad_() for x in (q, k, v, g, randn(slots, heads[1]).sigmoid())]


def token_by_token(q, k, v, g, beta):
    """The outputs for one sequence by the definition of the gated delta rule."""
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    state, outputs = q.new_zeros(v.shape[1], k.shape[2], v.shape[2]), []
    for token in range(len(q)):
        state = state * g[token].exp()[:, None, None]
        error = v[token] - torch.einsum("hk,hkv->hv", k[token], state)
        state = state + torch.einsum("hk,hv->hkv", k[token] * beta[token][:, None], error)
        outputs.append(torch.einsum("hk,hkv->hv", q[token] * q.shape[-1] ** -0.5, state))
    return torch.stack(outputs)


def compare(tree: Tree, args, weights) -> float:
    """The largest relative difference between the outputs and gradients of `delta_rule` and those
    of `token_by_token`, which computes each sequence alone."""
    ends, paths = tree
    row = recurrence(ends, len(ends), torch.device("cpu"))
    q, k, v, g, beta = args
    ours = delta_rule(q, k, v, g, beta, row)
    grads = torch.autograd.grad((ours * weights).sum(), args)
    outputs, loss, seen = torch.zeros_like(ours), torch.zeros(()).double(), set()
    for path in paths:
        found = token_by_token(*(x[path] for x in args))
        new = [i for i, slot in enumerate(path) if slot not in seen]
        seen.update(path)
        outputs[[path[i] for i in new]] = found[new].detach()
        loss = loss + (found * weights[path])[new].sum()
    expected = torch.autograd.grad(loss, args)
    used = sorted(seen)
    pairs = [(ours[used], outputs[used]), *zip(grads, expected, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def case(number: int):
    choose = random.Random(f"{SEED} delta rule {number}")
    tree = random_tree(choose, choose.choice([3, 70, 200]))
    keys = choose.choice([1, 2, 3])
    heads, sizes = (keys, keys * choose.choice([1, 2, 4])), (choose.choice([4, 8, 13]), 6)
    args = inputs(number, len(tree[0]), heads, sizes)
    weights = torch.randn(
        len(tree[0]), heads[1], sizes[1], generator=torch.Generator().manual_seed(number)
    ).double()
    weights[sorted(set(range(len(weights))) - {slot for path in tree[1] for slot in path})] = 0
    return tree, args, weights


@pytest.mark.sample(6)
@pytest.mark.parametrize("number", range(24))
def test_trees_are_the_recurrence_of_each_sequence(number):
    assert compare(*case(number)) < 1e-11


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_one_sequence_is_transformers_chunk_rule(length):
    args = inputs(length, length, (2, 4), (8, 6))
    row = recurrence(torch.full((length,), length), length, torch.device("cpu"))
    ours = delta_rule(args[0], args[1], args[2], args[3], args[4], row)
    q, k, v, g, beta = (x.detach().float()[None] for x in args)
    q, k = q.repeat_interleave(2, 2), k.repeat_interleave(2, 2)
    theirs, _ = modeling_qwen3_5.torch_chunk_gated_delta_rule(
        q, k, v, g, beta, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(ours.float(), theirs[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("number", range(8))
def test_the_convolution_follows_each_sequence(number):
    ends, paths = random_tree(random.Random(f"{SEED} convolution {number}"), 150)
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(len(ends), 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    ours = convolve(x, weight, recurrence(ends, len(ends), torch.device("cpu")))
    for path in paths:
        theirs = torch.nn.functional.conv1d(x[path].t()[None], weight[:, None], padding=3, groups=5)
        torch.testing.assert_close(ours[path], theirs[0, :, : len(path)].t())


def test_mistakes_are_seen(monkeypatch):
    """The comparison finds a fault: states that do not pass from a segment to its children."""
    tree, args, weights = next(c for c in map(case, range(24)) if len(c[0][1]) > 3)
    assert compare(tree, args, weights) < 1e-11
    segments = module._segments
    with monkeypatch.context() as patch:
        patch.setattr(
            module,
            "_segments",
            lambda ends: [module.Segment(s.begin, s.end, -1) for s in segments(ends)],
        )
        assert compare(tree, args, weights) > 1e-3


def test_padding_is_one_segment():
    ends = torch.tensor([3, 2, 3, 4, 5, 6, 8, 8, 9, 10])
    found = [(s.begin, s.end, s.parent) for s in module._segments(ends.numpy())]
    assert found == [(0, 1, -1), (1, 2, 0), (2, 3, 0), (3, 6, -1), (6, 8, -1), (8, 10, -1)]


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(8))
def test_flash_linear_attention_computes_the_same(number):
    """The results in bf16 differ by at most 3% in norm from torch's results in float64 for the same
    inputs. A value in bf16 is rounded by up to 2^-8 of its size."""
    rule = module._flash_linear_attention()
    if rule is None:
        pytest.skip("needs fla-core")
    (ends, paths), _, _ = case(number)
    args = inputs(number, len(ends), (2, 4), (64, 64))
    weights = torch.randn(len(ends), 4, 64, generator=torch.Generator().manual_seed(number))
    padding = set(range(len(ends))) - {slot for path in paths for slot in path}
    weights[sorted(padding)] = 0
    half = [
        x.detach().to("cuda", torch.float32 if i == 3 else torch.bfloat16).requires_grad_()
        for i, x in enumerate(args)
    ]
    exact = [x.detach().double().cpu().requires_grad_() for x in half]
    on_gpu, on_cpu = (recurrence(ends, len(ends), torch.device(d)) for d in ("cuda", "cpu"))
    q, k, v, g, beta = half
    found = module._by_levels(rule, q, k, v, g, beta, on_gpu)
    q, k, v, g, beta = exact
    expected = module._in_chunks(q, k, v, g, beta, on_cpu)
    pairs = [(found * weights.to(found), expected * weights)]
    grads = [
        torch.autograd.grad((output * weights.to(output)).sum(), of)
        for output, of in ((found, half), (expected, exact))
    ]
    for one, other in [*pairs, *zip(*grads, strict=True)]:
        assert (one.cpu().double() - other).norm() <= 0.03 * other.norm()


def segment_by_segment(
    q, k, v, g, beta, *, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu, **options
):
    """transformers' rule with the arguments of flash-linear-attention's function."""
    assert torch.equal(cu_seqlens, cu_seqlens_cpu)
    assert options == {"use_qk_l2norm_in_kernel": True}
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    outputs, states = [], []
    for number, (begin, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        state = None if initial_state is None else initial_state[number : number + 1]
        output, last = modeling_qwen3_5.torch_chunk_gated_delta_rule(
            *(x[:, begin:end] for x in (q, k, v, g, beta)),
            initial_state=state,
            output_final_state=True,
            **options,
        )
        outputs.append(output)
        states.append(last)
    return torch.cat(outputs, 1), torch.cat(states) if output_final_state else None


@pytest.mark.parametrize("number", range(8))
def test_level_by_level_is_chunk_by_chunk(number):
    """The computation for a GPU goes level by level, and calls the GPU's kernel with whole
    segments. Each segment starts from its parent's state. The results equal those of the
    computation in chunks."""
    (ends, _), args, weights = case(number)
    row = recurrence(ends, len(ends), torch.device("cpu"))
    args = [x.detach().float().requires_grad_() for x in args]
    q, k, v, g, beta = args

    def difference() -> float:
        found = module._by_levels(segment_by_segment, q, k, v, g, beta, row)
        expected = module._in_chunks(q, k, v, g, beta, row)
        grads = [
            torch.autograd.grad((output * weights.float()).sum(), args)
            for output in (found, expected)
        ]
        pairs = [(found, expected), *zip(*grads, strict=True)]
        return max(float((one - other).norm() / other.norm()) for one, other in pairs)

    assert difference() < 1e-5


def test_a_parents_state_gets_the_gradients_of_its_children(monkeypatch):
    """If the gradients of states were missing, the keys of the parent segment would have another
    gradient. So `test_level_by_level_is_chunk_by_chunk` would find this mistake."""
    row = recurrence(torch.tensor([11] * 5 + [8] * 3 + [11] * 3), 11, torch.device("cpu"))
    args = [x.detach().float().requires_grad_() for x in inputs(0, 11, (2, 4), (8, 6))]

    def keys_gradient() -> torch.Tensor:
        q, k, v, g, beta = args
        output = module._by_levels(segment_by_segment, q, k, v, g, beta, row)
        return torch.autograd.grad(output[5:].square().sum(), args)[1][:5]

    whole, of_parents = keys_gradient(), module._of_parents
    monkeypatch.setattr(
        module, "_of_parents", lambda states, parents: of_parents(states.detach(), parents)
    )
    assert (keys_gradient() - whole).norm() > 0.1 * whole.norm() > 0
