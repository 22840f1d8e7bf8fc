"""Buffers to which layers add the gradients that they compute: the gradients of adapters or, if a
run trains all weights, of the weights.

The buffers for base weights are fp32. Only the gradient of the last norm comes from autograd. The
layers compute the other gradients, because autograd would return every gradient in the weight's
dtype, as a new tensor for every row.
"""

from typing import Any

import torch
from torch import Tensor

_PRODUCT_ELEMENTS = 2**26


def attach_buffer(parameter: Tensor, buffer: Tensor) -> None:
    """Make layers add the parameter's gradients to `buffer`, which is fp32 and has the parameter's
    shape."""
    parameter.gradient_sum = buffer  # type: ignore[attr-defined]


def has_gradient_buffer(parameter: Tensor | None) -> bool:
    """Whether `attach_buffer` has given the parameter a gradient buffer."""
    return getattr(parameter, "gradient_sum", None) is not None


def add(parameter: Any, gradient: Tensor) -> None:
    """Add `gradient`, which has the parameter's shape, to the parameter's buffer in fp32."""
    parameter.gradient_sum.add_(gradient)


def add_product(parameter: Any, left: Tensor, right: Tensor) -> None:
    """Add `left^T right`, the gradient of a weight, to the weight's buffer, with sums in fp32.

    Args:
        parameter: a weight [a, b] that has a buffer.
        left: the left factor, [S, a].
        right: the right factor, [S, b].
    """
    if not left.is_cuda or left.dtype is torch.float32:
        parameter.gradient_sum.addmm_(left.float().t(), right.float())
        return
    # A few rows of the result are computed at a time, because the fp32 product needs extra memory:
    # gigabytes for an output layer.
    rows = max(1, _PRODUCT_ELEMENTS // right.shape[1])
    for part, buffer in zip(left.split(rows, 1), parameter.gradient_sum.split(rows), strict=True):
        buffer.add_(product(part, right))


def accumulator(parameter: Tensor) -> Tensor:
    """The parameter's `grad`, which the first call fills with zeros. The tensor has the parameter's
    shape and dtype."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left^T right`, fp32 [a, b], of `left` [S, a] and `right` [S, b]."""
    if left.is_cuda and left.dtype is not torch.float32:
        return torch.mm(left.t(), right, out_dtype=torch.float32)
    return left.t() @ right
