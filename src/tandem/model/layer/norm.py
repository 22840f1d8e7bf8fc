"""The RMSNorms of a layer."""

from typing import Any

import torch
from torch import nn

from tandem.families.arch import Arch


class OffsetNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in fp32, as Gemma's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(
            x.float(), self.normalized_shape, multiplier(self), self.eps
        ).to(x.dtype)


def make_norm(arch: Arch, dtype: torch.dtype, size: int | None = None, **_: Any) -> nn.RMSNorm:
    """The model's kind, of `size` features (None: of hidden states). Other options are
    Megatron's."""
    kind = OffsetNorm if arch.offset_norms else nn.RMSNorm
    return kind(size or arch.hidden_size, arch.rms_norm_eps, dtype=dtype)


def multiplier(norm: Any) -> torch.Tensor:
    """What `norm` multiplies the normalised features by."""
    weight: torch.Tensor = norm.weight
    return weight.float() + 1 if isinstance(norm, OffsetNorm) else weight
