"""Attention over packed prefix-tree rows: query q sees key k exactly when `k <= q < subtree_end[k]`.

Two kernels give the same result: `sdpa` materialises the mask and runs on every device; `flex` is PyTorch's compiled
FlexAttention (Dong et al., 2024, arXiv:2412.05496), which skips blocks without visible keys. The mask is made once per
row for all layers and passes through Megatron in `PackedSeqParams`.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tandem.model.compiled import Compiled
from tandem.model.mcore import MegatronModule, PackedSeqParams, TransformerConfig

Kernel = Literal["sdpa", "flex"]

BLOCK = 128  # FlexAttention's own default, in slots


@dataclass
class TreeParams(PackedSeqParams):
    """What all layers need to know of a row."""

    mask: "torch.Tensor | Blocks | None" = None  # bool [S, S] for `sdpa`, Blocks for `flex`
    length: int = 0  # S, to which the layers' slots are padded
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None  # of the layers' slots, from `rotation`


def tree_params(subtree_end: torch.Tensor, kernel: Kernel, rotation: tuple[torch.Tensor, torch.Tensor]) -> TreeParams:
    """The parameters of a row.

    Args:
        subtree_end: int [S], on the host. A padding slot holds its own index + 1: it sees itself, so no softmax is
            empty.
        rotation: of the slots that the layers compute, which are the row's first; all others are padding.
    """
    device, slots = rotation[0].device, len(rotation[0])
    if kernel == "sdpa":
        subtree_end = subtree_end[:slots]
        mask: torch.Tensor | Blocks = dense_mask(subtree_end.to(device))
    else:
        mask = block_mask(subtree_end, device)
    # Not `thd`: to Megatron a row is one sequence.
    return TreeParams(qkv_format="sbhd", mask=mask, length=len(subtree_end), rotation=rotation)


def rotation(positions: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE's cosines and sines for `rotated` (Su et al., 2021, arXiv:2104.09864): [S, 1, 1, head_dim] each.

    `positions`: [S]; `inv_freq`: [head_dim / 2], radians per position of each pair of dimensions.
    """
    angles = torch.outer(positions.float(), inv_freq)[:, None, None]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Queries or keys [S, 1, heads, head_dim] with RoPE applied; dimension i is paired with i + head_dim / 2."""
    return heads * cos + heads.roll(heads.shape[-1] // 2, -1) * sin


def dense_mask(subtree_end: torch.Tensor) -> torch.Tensor:
    """The mask as bool [S, S], [query, key]."""
    slots = torch.arange(len(subtree_end), device=subtree_end.device)
    query, key = slots[:, None], slots[None, :]
    return (key <= query) & (query < subtree_end[None, :])


class Blocks(NamedTuple):
    """The mask as FlexAttention takes it.

    For each block of queries: the number of key blocks that it sees partly (`kv`) and wholly (`full_kv`), int32
    [1, 1, blocks], and their indices, int32 [1, 1, blocks, blocks]. The same for each block of keys (`q`, `full_q`).
    """

    ends: torch.Tensor  # int64 [blocks * BLOCK], `subtree_end`, padded
    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    full_kv_num_blocks: torch.Tensor
    full_kv_indices: torch.Tensor
    q_num_blocks: torch.Tensor
    q_indices: torch.Tensor
    full_q_num_blocks: torch.Tensor
    full_q_indices: torch.Tensor


def block_mask(subtree_end: torch.Tensor, device: torch.device) -> Blocks:
    """The mask for FlexAttention, exact, from each block's smallest and largest `subtree_end`; no [S, S] is made.

    A key block before the queries' own is needed if any of its subtrees reaches the first query, and needs no mask if
    all of them reach past the last query. The queries' own block is always needed, with the mask.

    Computed on the host, because on a GPU it would be about forty small kernels for each row.
    """
    length = len(subtree_end)
    blocks = -(-length // BLOCK)
    slots = np.arange(blocks * BLOCK)
    ends = slots + 1  # as padding slots have it
    ends[:length] = subtree_end.cpu().numpy()
    smallest, largest = ends.reshape(blocks, BLOCK).min(1), ends.reshape(blocks, BLOCK).max(1)
    first = slots[::BLOCK]
    before = first[None, :] < first[:, None]  # [query block, key block]
    seen = before & (largest[None, :] > first[:, None])
    full = seen & (smallest[None, :] >= np.minimum(first + BLOCK, length)[:, None])
    partial = (seen & ~full) | np.eye(blocks, dtype=bool)

    fields = [ends]
    for needed in (partial, full, partial.T, full.T):
        fields += _counts_and_indices(needed)
    # This memory isn't pinned, so the driver has copied it when `to` returns.
    return Blocks(*(torch.from_numpy(field).to(device, non_blocking=True) for field in fields))


def _counts_and_indices(needed: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """bool [rows, columns] -> int32 [1, 1, rows], the number of true columns in each row, and int32
    [1, 1, rows, columns], the columns, true ones first, in order."""
    counts = needed.sum(1, dtype=np.int32)
    indices = np.argsort(~needed, axis=1, kind="stable").astype(np.int32)
    return counts[None, None], indices[None, None]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *blocks: torch.Tensor
) -> torch.Tensor:
    ends, *indices = blocks

    def tree_mask(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < ends[key])

    length = query.shape[2]
    fields: dict[str, Any] = dict(zip(Blocks._fields[1:], indices, strict=True))
    mask = BlockMask(seq_lengths=(length, length), BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=tree_mask, **fields)
    return flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)


flex = Compiled(_attend)
"""softmax(q k^T * scale) v; query [1, heads, S, head_dim], key and value [1, kv_heads, S, head_dim], scale, *Blocks."""


class TreeAttention(MegatronModule):
    """Megatron's core attention for packed rows: softmax(q k^T / sqrt(head_dim)) v under the row's mask, no dropout."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(
        self,
        query: torch.Tensor,  # [S, 1, heads, head_dim]
        key: torch.Tensor,  # [S, 1, kv_heads, head_dim]
        value: torch.Tensor,
        _attention_mask: None,  # Megatron's own; the tree's is in packed_seq_params
        *,
        packed_seq_params: TreeParams,
        **_: Any,
    ) -> torch.Tensor:
        """[S, 1, heads * head_dim], of this rank's heads."""
        slots, length = len(query), packed_seq_params.length
        assert packed_seq_params.rotation is not None
        query, key = (rotated(heads, *packed_seq_params.rotation) for heads in (query, key))
        if slots < length:
            query, key, value = (_padded(tensor, length) for tensor in (query, key, value))
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        mask = packed_seq_params.mask
        if isinstance(mask, Blocks):
            output = flex(query, key, value, self.scale, *mask)
        else:
            # Not `enable_gqa`, with which the backward of CUDA's kernels is many times slower.
            repeat = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
            output = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=self.scale
            )
        return output.permute(2, 0, 1, 3)[:slots].flatten(2)


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """[S, ...] -> [length, ...], with zeros at the end and the same strides, for which kernels are compiled."""
    whole = tensor.new_empty_strided((length, *tensor.shape[1:]), tensor.stride())
    whole[: len(tensor)], whole[len(tensor) :] = tensor, 0
    return whole
