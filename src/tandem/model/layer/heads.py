"""Queries, keys and values of an attention layer, and their shape."""

from dataclasses import dataclass

import torch

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries [length, heads, head_dim], keys and values [length, key heads, head_dim]."""


@dataclass(frozen=True)
class HeadShape:
    """The layout of a row of Megatron's fused queries, keys and values. A row has `groups` groups,
    one for each key head: first the group's queries, then its key, then its value."""

    groups: int
    queries: int  # per group
    size: int  # of a head
    eps: float
    q_norm: torch.Tensor | None  # weight [size]; None: heads are not normalised
    k_norm: torch.Tensor | None
    # Whether RoPE rotates only a head's first dimensions. torch's kernels compute heads with
    # partial RoPE on every device.
    partial_rope: bool = False
    # Whether the norms multiply heads by 1 + weight. If so, the caller passes 1 + weight to the
    # kernels instead of the weight.
    offset_norms: bool = False
    # Whether a gate follows each query in the fused rows. `output_gate.py` takes the gates out of
    # the rows.
    output_gate: bool = False
