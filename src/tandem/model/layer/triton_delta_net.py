"""The computations of a gated delta net around its delta rule, on a GPU: the short convolution with
its activation, and the gated norm of the heads' outputs.

`gated_delta_net.py` has the same computations in torch's operations. Each of torch's operations
reads and writes a whole tensor in fp32. So a layer takes several times as long with torch's
operations as with the kernels of this module. The kernels compute in fp32 and round only the
result. One Triton program computes the whole of each sum, so results always have the same bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.functional import silu

from tandem.model.delta_rule import Recurrence
from tandem.model.layer.kernels import norm_weight_gradient

_BLOCK = 1024  # features that one program of the convolution computes


@triton.jit  # type: ignore[untyped-decorator]
def _convolved(
    x, weight, ancestors, slot, c, inside, slots, x_slot, features, TOKENS: tl.constexpr
):
    """The convolution's result at a slot, before the activation: fp32 [BLOCK]."""
    total = tl.load(x + slot * x_slot + c, mask=inside, other=0.0).to(tl.float32)
    total *= tl.load(weight + (TOKENS - 1) * features + c, mask=inside, other=0.0)
    for distance in tl.static_range(1, TOKENS):
        earlier = tl.load(ancestors + (distance - 1) * slots + slot)
        value = tl.load(x + earlier * x_slot + c, mask=inside & (earlier < slots), other=0.0)
        w = tl.load(weight + (TOKENS - 1 - distance) * features + c, mask=inside, other=0.0)
        total += value.to(tl.float32) * w
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _convolve(
    x, weight, ancestors, out, slots, x_slot, features, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):
    slot = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < features
    total = _convolved(x, weight, ancestors, slot, c, inside, slots, x_slot, features, TOKENS)
    result = (total * tl.sigmoid(total)).to(out.dtype.element_ty)
    tl.store(out + slot * features + c, result, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _activation_backward(
    gradient,
    x,
    weight,
    ancestors,
    out,
    slots,
    x_slot,
    features,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = c < features, slot * features + c
    total = _convolved(x, weight, ancestors, slot, c, inside, slots, x_slot, features, TOKENS)
    gate = tl.sigmoid(total)
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, g * gate * (1 + total * (1 - gate)), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _convolution_backward(
    gradient, weight, begins, readers, out, out_slot, features, BLOCK: tl.constexpr
):
    slot = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < features
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(tl.load(begins + slot), tl.load(begins + slot + 1)):
        later, column = tl.load(readers + 2 * i), tl.load(readers + 2 * i + 1)
        g = tl.load(gradient + later * features + c, mask=inside, other=0.0)
        total += g * tl.load(weight + column * features + c, mask=inside, other=0.0)
    tl.store(out + slot * out_slot + c, total.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_and_gate(
    read,
    z,
    weight,
    out,
    z_slot,
    heads,
    size,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, HEADS)[:, None], tl.arange(0, SIZE)[None, :]
    inside, at = (h < heads) & (d < size), h * size + d
    value = tl.load(read + slot * heads * size + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + slot * z_slot + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 1) / size + eps)[:, None]
    result = value * w * gate * tl.sigmoid(gate)
    tl.store(out + slot * heads * size + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_and_gate_backward(
    gradient,
    read,
    z,
    weight,
    grad_read,
    grad_z,
    z_slot,
    heads,
    size,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, HEADS)[:, None], tl.arange(0, SIZE)[None, :]
    inside, at = (h < heads) & (d < size), h * size + d
    to = slot * heads * size + at
    g = tl.load(gradient + to, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(read + to, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + slot * z_slot + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / size + eps)[:, None]
    value *= inverse
    share = tl.sigmoid(gate)
    of_gate = g * value * w * share * (1 + gate * (1 - share))
    tl.store(grad_z + to, of_gate.to(grad_z.dtype.element_ty), mask=inside)
    g *= w * gate * share
    result = inverse * (g - value * (tl.sum(g * value, 1) / size)[:, None])
    tl.store(grad_read + to, result.to(grad_read.dtype.element_ty), mask=inside)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, row: Recurrence, sections: list[int]
    ) -> tuple[torch.Tensor, ...]:
        columns = weight.float().t().contiguous()  # [tokens, features]
        ctx.save_for_backward(x, columns)
        ctx.row, ctx.sections = row, sections
        ancestors = row.neighbours(len(columns)).ancestors
        outputs = []
        for part, w in _parts(x, columns, sections):
            out = x.new_empty(part.shape)
            _convolve[_grid(part)](part, w, ancestors, out, *_sizes(part), len(w), BLOCK=_BLOCK)
            outputs.append(out)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, columns = ctx.saved_tensors
        tokens, near = len(columns), ctx.row.neighbours(len(columns))
        grad_x, of_weight, begin = x.new_empty(x.shape), [], 0
        parts = _parts(x, columns, ctx.sections)
        for gradient, (part, w) in zip(gradients, parts, strict=True):
            inner = torch.empty(part.shape, dtype=torch.float32, device=x.device)
            sizes = _sizes(part)
            _activation_backward[_grid(part)](
                gradient.contiguous(), part, w, near.ancestors, inner, *sizes, tokens, BLOCK=_BLOCK
            )
            out = grad_x[:, begin : (begin := begin + part.shape[1])]
            _convolution_backward[_grid(part)](
                inner, w, near.begins, near.readers, out, out.stride(0), part.shape[1], BLOCK=_BLOCK
            )
            if ctx.needs_input_grad[1]:
                of_weight.append(_weight_gradient(inner, part, near.ancestors))
        return grad_x, torch.cat(of_weight) if of_weight else None, None, None


class _NormAndGate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, read: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        read = read.contiguous()
        ctx.save_for_backward(read, z, weight)
        ctx.eps = eps
        slots, heads, size = read.shape
        out = z.new_empty(slots, heads * size)
        _norm_and_gate[(slots,)](
            read, z, weight, out, z.stride(0), heads, size, eps, **_tile(heads, size)
        )
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        read, z, weight = ctx.saved_tensors
        slots, heads, size = read.shape
        gradient = gradient.contiguous()
        grad_read, grad_z = torch.empty_like(read), z.new_empty(z.shape)
        _norm_and_gate_backward[(slots,)](
            gradient,
            read,
            z,
            weight,
            grad_read,
            grad_z,
            z.stride(0),
            heads,
            size,
            ctx.eps,
            **_tile(heads, size),
        )
        of_weight = None
        if ctx.needs_input_grad[2]:
            of_norm = (gradient.float() * silu(z.float())).view(-1, size)
            of_weight = norm_weight_gradient(of_norm, read.view(-1, size), ctx.eps).to(weight.dtype)
        return grad_read, grad_z, of_weight, None


def convolve_and_activate(
    x: torch.Tensor, weight: torch.Tensor, row: Recurrence, sections: list[int]
) -> tuple[torch.Tensor, ...]:
    """The causal convolution of each feature along its sequences, followed by silu. The result is
    cut into `sections`: contiguous tensors [S, section] in the dtype of x.

    Args:
        x: the input, [S, features]; the stride of slots may have any value.
        weight: the weight, [features, tokens]; the last column applies to the current token.
        row: the row's `Recurrence`.
        sections: the numbers of features of the results; their sum is `features`.
    """
    return tuple(_Convolution.apply(x, weight, row, sections))


def norm_and_gate(
    read: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm of each head's output, times the gate silu(z), [S, heads * size], in the dtype of z.

    Args:
        read: the heads' outputs, [S, heads, size].
        z: the input of the gate, [S, heads * size]; the stride of slots may have any value.
        weight: the norm's weight, [size].
        eps: the norm's epsilon.
    """
    result: torch.Tensor = _NormAndGate.apply(read, z, weight, eps)
    return result


def _weight_gradient(
    gradient: torch.Tensor, x: torch.Tensor, ancestors: torch.Tensor
) -> torch.Tensor:
    """The gradient of the convolution's weight, fp32 [features, tokens]. `gradient`: the gradient
    of the convolution's result before the activation, fp32 [S, features]."""
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
    columns = [(gradient * padded[earlier].float()).sum(0) for earlier in ancestors.flip(0)]
    return torch.stack([*columns, (gradient * x.float()).sum(0)], 1)


def _parts(
    x: torch.Tensor, columns: torch.Tensor, sections: list[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The sections of x and of the weights [tokens, features]."""
    weights = (part.contiguous() for part in columns.split(sections, 1))
    return list(zip(x.split(sections, 1), weights, strict=True))


def _grid(x: torch.Tensor) -> tuple[int, int]:
    return len(x), triton.cdiv(x.shape[1], _BLOCK)


def _sizes(x: torch.Tensor) -> tuple[int, int, int]:
    """The arguments `slots`, `x_slot` and `features` of the convolution's kernels."""
    return len(x), x.stride(0), x.shape[1]


def _tile(heads: int, size: int) -> dict[str, int]:
    """The sizes of the tile that holds all heads of a slot, and the number of its warps."""
    tile = {"HEADS": triton.next_power_of_2(heads), "SIZE": triton.next_power_of_2(size)}
    return tile | {"num_warps": 8}
