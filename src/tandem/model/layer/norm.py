"""The RMSNorms of a layer."""

from typing import Any

import torch
from torch import nn

from tandem.families.arch import Arch
from tandem.model import gradients
from tandem.model.layer import kernels


class OffsetNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in fp32, as the norms of Gemma do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(
            x.float(), self.normalized_shape, multiplier(self), self.eps
        ).to(x.dtype)


def make_norm(arch: Arch, dtype: torch.dtype, size: int | None = None, **_: Any) -> nn.RMSNorm:
    """A norm of the kind that the model uses. Further options come from Megatron and are ignored.

    Args:
        dtype: the weight's dtype.
        size: the number of features; None: the hidden size.
    """
    kind = OffsetNorm if arch.offset_norms else nn.RMSNorm
    return kind(size or arch.hidden_size, arch.rms_norm_eps, dtype=dtype)


def multiplier(norm: Any) -> torch.Tensor:
    """The factor by which `norm` multiplies the normalised features. The result is [features]."""
    weight: torch.Tensor = norm.weight
    return weight.float() + 1 if isinstance(norm, OffsetNorm) else weight


def normalise(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """The RMSNorm `norm` of x [S, features]; the result has the same shape."""
    return kernels.rms_norm(x, multiplier(norm), norm.eps)


def norm_backward(
    norm: Any, gradient: torch.Tensor, x: torch.Tensor, plus: torch.Tensor
) -> torch.Tensor:
    """The sum of `plus` and the gradient of the norm's input `x`. Also adds the weight's gradient
    to its buffer.

    Args:
        gradient: the gradient of the norm's output.
    """
    add_norm_gradient(norm, gradient, x)
    return kernels.rms_norm_backward(gradient, x, multiplier(norm), norm.eps, plus)


def add_norm_gradient(norm: Any, gradient: torch.Tensor, x: torch.Tensor) -> None:
    """Adds the gradient of the norm's weight to its buffer, if the weight is trained.

    Args:
        gradient: the gradient of the norm's output.
        x: the norm's input.
    """
    if gradients.has_gradient_buffer(norm.weight):
        gradients.add(norm.weight, kernels.norm_weight_gradient(gradient, x, norm.eps))
