"""The gate of an attention's output (Qwen3.5). The output rows of q_proj contain each head's query,
followed by the head's gate.

The other kernels handle only queries, keys and values. So the forward pass takes the gates out of
Megatron's fused rows, and the backward pass puts their gradients back.
"""

import torch

from tandem.model.layer.heads import HeadShape


def take_gates(fused: torch.Tensor, shape: HeadShape) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts of the rows `fused`: queries, keys and values in the layout of `HeadShape`, and the
    gates [S, heads * size]."""
    pairs, keys_values = _grouped(fused, shape).split([2 * shape.queries, 2], 2)
    queries, gates = pairs.unflatten(2, (-1, 2)).unbind(3)
    return torch.cat([queries, keys_values], 2).flatten(1), gates.flatten(1)


def join_gates(qkv: torch.Tensor, gates: torch.Tensor, shape: HeadShape) -> torch.Tensor:
    """The fused rows of `qkv` and `gates`: the inverse of `take_gates`.

    Args:
        qkv: the rows without gates, [S, groups * (queries + 2) * size].
        gates: the gates, [S, heads * size].
    """
    grouped = qkv.view(len(qkv), shape.groups, shape.queries + 2, shape.size)
    queries, keys_values = grouped.split([shape.queries, 2], 2)
    pairs = torch.stack([queries, gates.view(queries.shape)], 3).flatten(2, 3)
    return torch.cat([pairs, keys_values], 2).flatten(1)


def gated(output: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """The attention's output [S, heads * size] times the gates' sigmoid."""
    return (output.float() * gates.float().sigmoid()).to(output.dtype)


def gated_backward(
    gradient: torch.Tensor, output: torch.Tensor, gates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `output` and of `gates`, in their shapes and dtypes.

    Args:
        gradient: the gradient of `gated`'s result, [S, heads * size].
        output, gates: the arguments of `gated`, [S, heads * size].
    """
    sigmoid, gradient = gates.float().sigmoid(), gradient.float()
    grad_gates = gradient * output.float() * sigmoid * (1 - sigmoid)
    return (gradient * sigmoid).to(output.dtype), grad_gates.to(gates.dtype)


def _grouped(fused: torch.Tensor, shape: HeadShape) -> torch.Tensor:
    return fused.view(len(fused), shape.groups, 2 * shape.queries + 2, shape.size)
