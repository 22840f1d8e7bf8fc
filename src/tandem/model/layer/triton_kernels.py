"""The functions of `kernels.py` on a GPU, as one kernel each.

One Triton program computes the whole of each sum, over a row or over a head. So no sum depends on
how the work is divided, and results always have the same bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tandem.model.layer.heads import Heads, HeadShape


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(x, weight, out, columns, eps, COLUMNS: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    inside = c < columns
    value = tl.load(x + row * columns + c, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value) / columns + eps)
    scaled = value * inverse * tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + c, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_backward(gradient, x, weight, plus, out, columns, eps, COLUMNS: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    inside, at = c < columns, row * columns + c
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    g *= tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value) / columns + eps)
    value *= inverse
    result = inverse * (g - value * (tl.sum(g * value) / columns))
    result += tl.load(plus + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _split_heads(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    q,
    k,
    v,
    slots,
    groups,
    queries,
    size,
    eps,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    slot, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = size // 2
    h, d = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside, used = (h < queries + 2) & (d < half), slot < slots
    at = qkv + ((slot * groups + group) * (queries + 2) + h) * size + d
    first = tl.load(at, mask=inside & used, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside & used, other=0.0).to(tl.float32)
    is_value = h == queries + 1
    if NORM:
        inverse = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / size + eps)[
            :, None
        ]
        w = tl.where(h < queries, q_norm + d, k_norm + d)
        a, b = (
            tl.load(w, mask=inside, other=0.0).to(tl.float32),
            tl.load(w + half, mask=inside, other=0.0).to(tl.float32),
        )
        first = tl.where(is_value, first, first * inverse * a)
        second = tl.where(is_value, second, second * inverse * b)
    c = tl.load(cos + slot * half + d, mask=(d < half) & used, other=0.0).to(tl.float32)
    s = tl.load(sin + slot * half + d, mask=(d < half) & used, other=0.0).to(tl.float32)
    turned = tl.where(is_value, first, first * c - second * s).to(q.dtype.element_ty)
    turned_second = tl.where(is_value, second, second * c + first * s).to(q.dtype.element_ty)
    to = q + ((slot * groups + group) * queries + h) * size + d
    tl.store(to, turned, mask=inside & (h < queries))
    tl.store(to + half, turned_second, mask=inside & (h < queries))
    to = tl.where(
        is_value, v + (slot * groups + group) * size + d, k + (slot * groups + group) * size + d
    )
    tl.store(to, turned, mask=inside & (h >= queries))
    tl.store(to + half, turned_second, mask=inside & (h >= queries))


@triton.jit  # type: ignore[untyped-decorator]
def _split_heads_backward(
    q,
    k,
    v,
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    out,
    groups,
    queries,
    size,
    eps,
    q_slot,
    q_head,
    k_slot,
    k_head,
    v_slot,
    v_head,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    slot, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = size // 2
    h, d = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside, is_value = (h < queries + 2) & (d < half), h == queries + 1
    key_or_value = tl.where(
        is_value, v + slot * v_slot + group * v_head + d, k + slot * k_slot + group * k_head + d
    )
    source = tl.where(
        h < queries, q + slot * q_slot + (group * queries + h) * q_head + d, key_or_value
    )
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + slot * half + d, mask=d < half, other=0.0).to(tl.float32)
    s = tl.load(sin + slot * half + d, mask=d < half, other=0.0).to(tl.float32)
    turned = tl.where(is_value, first, first * c + second * s)
    second = tl.where(is_value, second, second * c - first * s)
    first = turned
    at = ((slot * groups + group) * (queries + 2) + h) * size + d
    if NORM:
        x = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(qkv + at + half, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / size + eps)[:, None]
        x *= inverse
        y *= inverse
        w = tl.where(h < queries, q_norm + d, k_norm + d)
        a = first * tl.load(w, mask=inside, other=0.0).to(tl.float32)
        b = second * tl.load(w + half, mask=inside, other=0.0).to(tl.float32)
        mean = ((tl.sum(a * x, 1) + tl.sum(b * y, 1)) / size)[:, None]
        first = tl.where(is_value, first, inverse * (a - x * mean))
        second = tl.where(is_value, second, inverse * (b - y * mean))
    tl.store(out + at, first.to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + half, second.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu(gate_up, out, columns, COLUMNS: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, at = c < columns, gate_up + row * 2 * columns + c
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + row * columns + c,
        (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty),
        mask=inside,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_backward(gradient, gate_up, out, columns, COLUMNS: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, at = c < columns, gate_up + row * 2 * columns + c
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + columns, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + row * columns + c, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    activated = gate * sigmoid
    tl.store(out + row * columns + c, (activated * up).to(out.dtype.element_ty), mask=inside)
    grad_gate = g * up * (sigmoid + activated * (1 - sigmoid))
    tl.store(at, grad_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(at + columns, (g * activated).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _expert_swiglu(gate_up, probs, out, columns, COLUMNS: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    inside, at = c < columns, gate_up + row * 2 * columns + c
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + columns, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up * tl.load(probs + row)
    tl.store(out + row * columns + c, result.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _expert_swiglu_backward(
    gradient, gate_up, probs, out, grad_probs, columns, COLUMNS: tl.constexpr
):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    inside, at = c < columns, gate_up + row * 2 * columns + c
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + columns, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + row * columns + c, mask=inside, other=0.0).to(tl.float32)
    p, sigmoid = tl.load(probs + row), tl.sigmoid(gate)
    activated = gate * sigmoid
    tl.store(grad_probs + row, tl.sum(g * activated * up))
    tl.store(out + row * columns + c, (activated * up * p).to(out.dtype.element_ty), mask=inside)
    grad_gate = g * p * up * (sigmoid + activated * (1 - sigmoid))
    tl.store(at, grad_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(at + columns, (g * p * activated).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_assignments(
    values, assignments, plus, out, columns, K: tl.constexpr, COLUMNS: tl.constexpr
):
    token, c = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    inside = c < columns
    total = tl.load(plus + token * columns + c, mask=inside, other=0.0).to(tl.float32)
    for index in tl.static_range(K):
        assignment = tl.load(assignments + token * K + index)
        total += tl.load(values + assignment * columns + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * columns + c, total.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _quantise_rows(rows, out, scales, columns, largest, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((COLUMNS,), tl.float32)
    for begin in range(0, columns, COLUMNS):
        c = begin + tl.arange(0, COLUMNS)
        value = tl.load(rows + row * columns + c, mask=c < columns, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(value))
    scale = tl.maximum(tl.max(most, 0), 1e-12) / largest
    tl.store(scales + row, scale)
    for begin in range(0, columns, COLUMNS):
        c = begin + tl.arange(0, COLUMNS)
        value = (
            tl.load(rows + row * columns + c, mask=c < columns, other=0.0).to(tl.float32) / scale
        )
        value = tl.minimum(tl.maximum(value, -largest), largest)
        tl.store(out + row * columns + c, value.to(out.dtype.element_ty), mask=c < columns)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    _rms_norm[(len(x),)](x, weight, out, x.shape[1], eps, **_row(x.shape[1]))
    return out


def rms_norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, plus: torch.Tensor
) -> torch.Tensor:
    out = torch.empty_like(x)
    _rms_norm_backward[(len(x),)](
        gradient, x, weight, plus, out, x.shape[1], eps, **_row(x.shape[1])
    )
    return out


def split_heads(
    qkv: torch.Tensor, shape: HeadShape, cos: torch.Tensor, sin: torch.Tensor, length: int
) -> Heads:
    q = qkv.new_empty(length, shape.groups * shape.queries, shape.size)
    k, v = (qkv.new_empty(length, shape.groups, shape.size) for _ in range(2))
    _split_heads[(length, shape.groups)](
        qkv,
        *_norms(qkv, shape),
        cos,
        sin,
        q,
        k,
        v,
        len(qkv),
        shape.groups,
        shape.queries,
        shape.size,
        shape.eps,
        **_blocks(shape),
    )
    return q, k, v


def split_heads_backward(
    gradients: Heads, qkv: torch.Tensor, shape: HeadShape, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    out = torch.empty_like(qkv)
    strides = [stride for gradient in gradients for stride in gradient.stride()[:2]]
    _split_heads_backward[(len(qkv), shape.groups)](
        *gradients,
        qkv,
        *_norms(qkv, shape),
        cos,
        sin,
        out,
        shape.groups,
        shape.queries,
        shape.size,
        shape.eps,
        *strides,
        **_blocks(shape),
    )
    return out


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    columns = gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), columns)
    _swiglu[(len(gate_up), triton.cdiv(columns, 2048))](gate_up, out, columns, COLUMNS=2048)
    return out


def swiglu_backward(
    gradient: torch.Tensor, gate_up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(gradient)
    grid = (len(gradient), triton.cdiv(gradient.shape[1], 2048))
    _swiglu_backward[grid](gradient, gate_up, out, gradient.shape[1], COLUMNS=2048)
    return gate_up, out


def expert_swiglu(gate_up: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    columns = gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), columns)
    _expert_swiglu[(len(gate_up),)](gate_up, probs, out, columns, **_row(columns))
    return out


def expert_swiglu_backward(
    gradient: torch.Tensor, gate_up: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, grad_probs, columns = (
        torch.empty_like(gradient),
        torch.empty_like(probs),
        gradient.shape[1],
    )
    _expert_swiglu_backward[(len(gradient),)](
        gradient, gate_up, probs, out, grad_probs, columns, **_row(columns)
    )
    return gate_up, out, grad_probs


def sum_assignments(
    values: torch.Tensor, assignments: torch.Tensor, plus: torch.Tensor
) -> torch.Tensor:
    out = torch.empty_like(plus)
    _sum_assignments[(len(plus),)](
        values, assignments, plus, out, plus.shape[1], K=assignments.shape[1], **_row(plus.shape[1])
    )
    return out


def quantise_rows(
    rows: torch.Tensor, dtype: torch.dtype, largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each row divided by the row's scale, and the scales, fp32 [n, 1]. A row's scale is
    chosen so that the row's largest magnitude becomes `largest`.

    Args:
        rows: the rows, [n, features], contiguous.
        dtype: the dtype of the quotients.
        largest: the largest magnitude of a quotient.
    """
    out, scales = (
        torch.empty_like(rows, dtype=dtype),
        rows.new_empty(len(rows), 1, dtype=torch.float32),
    )
    block = min(4096, triton.next_power_of_2(rows.shape[1]))
    _quantise_rows[(len(rows),)](
        rows, out, scales, rows.shape[1], largest, COLUMNS=block, num_warps=8
    )
    return out, scales


def _row(columns: int) -> dict[str, Any]:
    block = triton.next_power_of_2(columns)
    return {"COLUMNS": block, "num_warps": min(16, max(1, block // 512))}


def _norms(qkv: torch.Tensor, shape: HeadShape) -> tuple[torch.Tensor, torch.Tensor]:
    # Without norms, the kernel ignores the pointers to the norms' weights, so any tensor can be
    # passed.
    return (
        (qkv, qkv) if shape.q_norm is None or shape.k_norm is None else (shape.q_norm, shape.k_norm)
    )


def _blocks(shape: HeadShape) -> dict[str, Any]:
    heads, half = triton.next_power_of_2(shape.queries + 2), triton.next_power_of_2(shape.size // 2)
    return {
        "NORM": shape.q_norm is not None,
        "HEADS": heads,
        "HALF": half,
        "num_warps": min(8, max(1, heads * half // 128)),
    }
