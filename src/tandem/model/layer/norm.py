"""The RMSNorms of a layer."""

from typing import Any

import torch
from torch import nn


class OffsetNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in fp32, as Gemma's; built as Megatron builds its norms."""

    def __init__(self, *, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x.float(), self.normalized_shape, multiplier(self), self.eps).to(x.dtype)


def multiplier(norm: Any) -> torch.Tensor:
    """What `norm` multiplies the normalised features by."""
    weight: torch.Tensor = norm.weight
    return weight.float() + 1 if isinstance(norm, OffsetNorm) else weight
