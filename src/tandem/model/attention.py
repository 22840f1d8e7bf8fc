"""Attention over packed prefix-tree rows: query q sees key k exactly when `k <= q < subtree_end[k]`.

Two kernels with the same result: `sdpa` materialises the mask and runs anywhere; `flex` is PyTorch's compiled
FlexAttention (Dong et al., 2024, arXiv:2412.05496), which skips the blocks that nobody sees. The mask is made once per
row and shared by the layers; it travels through Megatron in `PackedSeqParams`.
"""

from __future__ import annotations

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
    """What all layers need of a row: its mask, bool [S, S] for `sdpa`, Blocks for `flex`; S, to which the layers' slots
    are padded; and the slots' `rotation`."""

    mask: torch.Tensor | Blocks | None = None
    length: int = 0
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None


def tree_params(subtree_end: torch.Tensor, kernel: Kernel, rotation: tuple[torch.Tensor, torch.Tensor]) -> TreeParams:
    """`subtree_end`: int [S], on the host, where it is read; padding slots hold their own index + 1, so that each sees
    itself and no softmax is empty. `rotation`, of the slots that the layers compute: the first; the rest is padding."""
    device, slots = rotation[0].device, len(rotation[0])
    if kernel == "sdpa":
        subtree_end = subtree_end[:slots]
        mask: torch.Tensor | Blocks = dense_mask(subtree_end.to(device))
    else:
        mask = block_mask(subtree_end, device)
    # Not `thd`: a row is one sequence to Megatron.
    return TreeParams(qkv_format="sbhd", mask=mask, length=len(subtree_end), rotation=rotation)


def rotation(positions: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE's cosines and sines (Su et al., 2021, arXiv:2104.09864) for slots at `positions` [S] and pairs of dimensions
    that turn by `inv_freq` [head_dim / 2] radians per position: [S, 1, 1, head_dim] each, as `rotated` takes them."""
    angles = torch.outer(positions.float(), inv_freq)[:, None, None]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Queries or keys [S, 1, heads, head_dim], whose dimension i is paired with i + head_dim / 2, turned."""
    return heads * cos + heads.roll(heads.shape[-1] // 2, -1) * sin


def dense_mask(subtree_end: torch.Tensor) -> torch.Tensor:
    """bool [S, S], [query, key]."""
    slots = torch.arange(len(subtree_end), device=subtree_end.device)
    query, key = slots[:, None], slots[None, :]
    return (key <= query) & (query < subtree_end[None, :])


class Blocks(NamedTuple):
    """The mask as FlexAttention has it: int32 [1, 1, blocks] how many blocks of keys each block of queries sees in part
    (`kv`) and as a whole (`full_kv`), int32 [1, 1, blocks, blocks] which, and the same from the keys' side."""

    ends: torch.Tensor  # int64 [blocks * BLOCK], `subtree_end` with slots beyond the row as padding
    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    full_kv_num_blocks: torch.Tensor
    full_kv_indices: torch.Tensor
    q_num_blocks: torch.Tensor
    q_indices: torch.Tensor
    full_q_num_blocks: torch.Tensor
    full_q_indices: torch.Tensor


def block_mask(subtree_end: torch.Tensor, device: torch.device) -> Blocks:
    """The same for FlexAttention, exact, from each block's smallest and largest `subtree_end`: no [S, S] is made.

    A block of keys before the queries' own is needed if any key's subtree reaches the first query, and needs no mask if
    every key's subtree reaches past the last query. The queries' own block is always needed, with the mask.

    Made on the host: on a GPU it is some forty small kernels, each to be queued for every row, and loaded by the first.
    """
    length = len(subtree_end)
    blocks = -(-length // BLOCK)
    slots = np.arange(blocks * BLOCK)
    ends = slots + 1  # slots beyond the row are padding too
    ends[:length] = subtree_end.cpu().numpy()
    smallest, largest = ends.reshape(blocks, BLOCK).min(1), ends.reshape(blocks, BLOCK).max(1)
    first = slots[::BLOCK]
    before = first[None, :] < first[:, None]  # [query block, key block]
    seen = before & (largest[None, :] > first[:, None])
    full = seen & (smallest[None, :] >= np.minimum(first + BLOCK, length)[:, None])
    partial = (seen & ~full) | np.eye(blocks, dtype=bool)

    fields = [ends]
    for which in (partial, full, partial.T, full.T):
        fields += _ragged(which)
    # Of memory that isn't pinned the driver has a copy when `to` returns.
    return Blocks(*(torch.from_numpy(field).to(device, non_blocking=True) for field in fields))


def _ragged(blocks: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """bool [rows, columns] -> int32 [1, 1, rows], how many are set in each row, and int32 [1, 1, rows, columns], which:
    those first, in order."""
    counts = blocks.sum(1, dtype=np.int32)
    indices = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
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
"""softmax(q k^T * scale) v; query [1, heads, S, head_dim], key and value [1, kv_heads, S, head_dim], scale, Blocks."""


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
            # Expanded by hand: with `enable_gqa` the backward of CUDA's kernels is many times slower.
            repeat = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
            output = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=self.scale
            )
        return output.permute(2, 0, 1, 3)[:slots].flatten(2)


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """[S, ...] -> [length, ...], then zeros, with the strides that it has: kernels are compiled for those too."""
    whole = tensor.new_empty_strided((length, *tensor.shape[1:]), tensor.stride())
    whole[: len(tensor)], whole[len(tensor) :] = tensor, 0
    return whole
