"""Attention over packed prefix-tree rows: query q sees key k exactly when `k <= q <
subtree_end[k]`. With a sliding window, query q sees only the last `window` keys of its own
sequence. The key of the query's own slot counts towards `window`.

Two kernels give the same result: `sdpa` materialises the mask and runs on every device; `flex` is
PyTorch's compiled FlexAttention (`flex_attention.py`). The mask is made once per row for all
layers.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from tandem.model.delta_rule import Recurrence
from tandem.model.flex_attention import FlexMask, block_mask, depths, flex, padded_ends
from tandem.model.rows import Deal

Kernel = Literal["sdpa", "flex"]


@dataclass
class TreeParams:
    """The parameters of a row's prefix trees that all layers need. Megatron passes this object to
    the layers as `packed_seq_params`. `packed_seq_params` is the only argument of Megatron's
    decoder that reaches the layers unchanged."""

    mask: torch.Tensor | FlexMask  # For `sdpa` a bool [S, S], for `flex` a FlexMask.
    length: int  # The number of queries in the attention, padding included.
    # RoPE's cosines and sines for the slots that the layers compute (see the function `rotation`).
    rotation: tuple[torch.Tensor, torch.Tensor]
    # For `flex` with a sliding window: each slot's depth in its tree, and a limit for each query. A
    # query sees no key whose depth is less than or equal to the limit.
    reach: tuple[torch.Tensor, torch.Tensor] | tuple[None, None] = (None, None)
    # The slots of this rank's queries, if context-parallel ranks share the row.
    deal: Deal | None = None
    slot_experts: torch.Tensor | None = None  # As in `RowTensors`.
    # For gated delta nets: the row's segments, through which the recurrent states pass.
    recurrence: Recurrence | None = None
    windowed: "TreeParams | None" = None  # The parameters for layers with a sliding window.
    unrotated: "TreeParams | None" = None  # The parameters for layers without RoPE.
    # For `Arch.query_growth`: the factor of each slot's query, fp32.
    query_scale: torch.Tensor | None = None


def tree_params(
    subtree_end: torch.Tensor,
    kernel: Kernel,
    rotation: tuple[torch.Tensor, torch.Tensor],
    window: int | None = None,
    deal: Deal | None = None,
) -> TreeParams:
    """The `TreeParams` of a row.

    Args:
        subtree_end: int [S], on the host. For a padding slot, the value is the slot's index + 1, so
            that the slot sees itself and no softmax is empty.
        rotation: cosines and sines of the slots that the layers compute. The layers compute the
            first slots of the row; all other slots are padding.
        window: the number of tokens that a token sees in its sequence, itself included; None: the
            token sees itself and all tokens before it.
        deal: the slots of the row that this rank computes; None: the first slots of the row.
    """
    slots, device = None if deal is None else deal.slots, rotation[0].device
    if kernel == "sdpa":
        if slots is None:
            mask = dense_mask(subtree_end[: len(rotation[0])].to(device), window)
        else:
            mask = dense_mask(subtree_end.to(device), window)[slots]
        return TreeParams(mask, len(mask), rotation, deal=deal)
    length = len(subtree_end) if slots is None else len(slots)
    tree = TreeParams(block_mask(subtree_end, device, window, slots), length, rotation, deal=deal)
    if window is not None:
        depth = torch.from_numpy(depths(padded_ends(subtree_end))).to(device)
        tree.reach = depth, (depth if slots is None else depth[slots]) - window
    return tree


def rotation(
    positions: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE's cosines and sines (Su et al., 2021, arXiv:2104.09864) times `factor`, [S, head_dim /
    2] each.

    Args:
        positions: the slots' positions, [S].
        inv_freq: the angle per position in radians of each pair of dimensions, [head_dim / 2].
    """
    angles = torch.outer(positions.float(), inv_freq)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def without_rotation(tree: TreeParams) -> TreeParams:
    """The parameters for layers without RoPE."""
    cos, sin = tree.rotation
    return replace(tree, rotation=(torch.ones_like(cos), torch.zeros_like(sin)))


def dense_mask(subtree_end: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """The mask, bool [S, S]: entry [query, key] is true if the query sees the key."""
    slots = torch.arange(len(subtree_end), device=subtree_end.device)
    query, key = slots[:, None], slots[None, :]
    mask = (key <= query) & (query < subtree_end[None, :])
    if window is not None:
        depth = torch.from_numpy(depths(subtree_end.cpu().numpy())).to(mask.device)
        mask &= depth[:, None] - depth[None, :] < window
    return mask


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree: TreeParams,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention softmax(q k^T * scale) v under the row's mask, [length, heads, value's dim].

    Args:
        query: the queries, [length, heads, head_dim].
        key: the keys, [keys, key heads, head_dim].
        value: the values, [keys, key heads, value's dim].
        sinks: the additional logit of each head's softmax, [heads]; the logit adds no value to the
            output.
    """
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    if isinstance(tree.mask, FlexMask):
        slots = None if tree.deal is None else tree.deal.slots
        depth, out = tree.reach
        output = flex(query, key, value, scale, slots, depth, out, sinks, *tree.mask)
    else:
        # `enable_gqa` is not used, because this option makes the backward pass of CUDA's kernels
        # many times slower.
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        mask, size = tree.mask, value.shape[-1]
        if sinks is not None:
            query, key, value, mask = _with_sinks(query, key, value, mask, sinks / scale)
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)[
            ..., :size
        ]
    return output[0].transpose(0, 1)


def _with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns queries, keys, values and mask with one additional key for the sinks. Every query
    sees the additional key. The value that belongs to the additional key is zero. The product of
    the additional key and a query is the head's sink. Eight dimensions are added to each head,
    because kernels want multiples of eight. In each query, the first added dimension is 1.
    """
    key, value = pad(key, (0, 8, 0, 1)), pad(value, (0, 8, 0, 1))
    one = torch.zeros(8, dtype=query.dtype, device=query.device)
    one[0] = 1
    query = torch.cat([query, one.expand(*query.shape[:-1], 8)], -1)
    key[:, :, -1, -8] = sinks.to(key.dtype)
    return query, key, value, pad(mask, (0, 1), value=True)
