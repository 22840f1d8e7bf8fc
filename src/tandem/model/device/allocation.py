"""Many tensors in one allocation: of hundreds, each takes the driver a call, and all who want it meanwhile wait."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch

ALIGNMENT = 512  # bytes that each tensor begins at a multiple of, as it would in an allocation of its own


def allocate(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, where: torch.device, *, multiple: int = ALIGNMENT
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`(whole, parts)`, uninitialised: a tensor of each shape, in the order of `shapes`, and the flat one that they are
    views of, whose bytes are a multiple of `multiple`."""
    step = ALIGNMENT // dtype.itemsize
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    ends = list(itertools.accumulate((-(-size // step) * step for size in sizes.values()), initial=0))
    whole = torch.empty(
        -(-ends[-1] * dtype.itemsize // multiple) * multiple // dtype.itemsize, dtype=dtype, device=where
    )
    begins = zip(sizes.items(), ends[:-1], strict=True)
    return whole, {name: whole[begin : begin + size].view(shapes[name]) for (name, size), begin in begins}
