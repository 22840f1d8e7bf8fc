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
    # whether RoPE rotates only a head's first dimensions; such heads use torch's kernels on every
    # device
    partial_rope: bool = False
    # whether heads are multiplied by 1 + weight; the kernels get this sum as the weight
    offset_norms: bool = False
    # whether each query is followed by a gate in rows that are not split yet (`output_gate.py`)
    output_gate: bool = False
