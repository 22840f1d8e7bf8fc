"""Queries, keys and values of an attention layer, and their shape."""

from dataclasses import dataclass

import torch

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries [length, heads, head_dim], keys and values [length, key heads, head_dim]."""


@dataclass(frozen=True)
class HeadShape:
    """The layout of a row of Megatron's fused q, k and v: for each of `groups` key heads its
    queries, its key, its value."""

    groups: int
    queries: int  # per group
    size: int  # of a head
    eps: float
    q_norm: torch.Tensor | None  # weight [size]; None: heads are not normalised
    k_norm: torch.Tensor | None
    # RoPE turns only the first dimensions of a head; torch's kernels on every device.
    partial_rope: bool = False
    # Heads are multiplied by 1 + weight; the kernels get that sum as the weight.
    offset_norms: bool = False
    # A gate follows each query in rows that are not split yet (`output_gate.py`).
    output_gate: bool = False
