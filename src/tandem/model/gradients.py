"""Gradients of base weights, where a run trains all weights. Layers add them to fp32 buffers; autograd makes none.

autograd would give each gradient in the weight's dtype, as a tensor of its own for every row.
"""

from typing import Any

import torch
from torch import Tensor


def attach(parameter: Tensor, buffer: Tensor) -> None:
    """From now on the parameter's gradients are added to `buffer`, fp32 and of its shape."""
    parameter.gradient_sum = buffer  # type: ignore[attr-defined]


def wanted(parameter: Tensor | None) -> bool:
    """Whether the parameter has a buffer."""
    return getattr(parameter, "gradient_sum", None) is not None


def add(parameter: Any, gradient: Tensor) -> None:
    parameter.gradient_sum.add_(gradient)


def add_product(parameter: Any, left: Tensor, right: Tensor) -> None:
    """Add `left^T right` of [S, a] and [S, b], the gradient of a weight [a, b], with sums in fp32."""
    if left.is_cuda and left.dtype is not torch.float32:
        parameter.gradient_sum.add_(torch.mm(left.t(), right, out_dtype=torch.float32))
    else:
        parameter.gradient_sum.addmm_(left.float().t(), right.float())
