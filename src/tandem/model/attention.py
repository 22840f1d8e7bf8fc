"""Attention over packed prefix-tree rows: query q sees key k exactly when `k <= q <
subtree_end[k]`. With a sliding window q sees the last `window` of these keys in its sequence,
itself included.

Two kernels give the same result: `sdpa` materialises the mask and runs on every device; `flex` is
PyTorch's compiled FlexAttention (Dong et al., 2024, arXiv:2412.05496), which skips blocks without
visible keys. The mask is made once per row for all layers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from tandem.model.compiled import Compiled

if TYPE_CHECKING:
    from tandem.model.rows import Deal

Kernel = Literal["sdpa", "flex"]

BLOCK = 128  # FlexAttention's own default, in slots


@dataclass
class TreeParams:
    """What all layers need to know of a row. Megatron takes it for its own `PackedSeqParams`."""

    mask: "torch.Tensor | Blocks"  # bool [S, S] for `sdpa`, Blocks for `flex`
    length: int  # of the attention's queries, to which the layers' slots are padded
    rotation: tuple[torch.Tensor, torch.Tensor]  # of the layers' slots, from `rotation`
    # For `flex` in a sliding window: each slot's depth, and the depth that is just out of its
    # reach.
    reach: tuple[torch.Tensor, torch.Tensor] | tuple[None, None] = (None, None)
    # Which slots the queries are of, where context-parallel ranks share the row.
    deal: "Deal | None" = None
    experts: torch.Tensor | None = None  # `RowTensors.slot_experts`
    windowed: "TreeParams | None" = None  # what layers with a sliding window use instead


def tree_params(
    subtree_end: torch.Tensor,
    kernel: Kernel,
    rotation: tuple[torch.Tensor, torch.Tensor],
    window: int | None = None,
    deal: "Deal | None" = None,
) -> TreeParams:
    """The parameters of a row.

    Args:
        subtree_end: int [S], on the host. A padding slot holds its own index + 1: it sees itself,
        so no softmax is
            empty.
        rotation: of the slots that the layers compute, which are the row's first; all others are
        padding.
        window: how many tokens of its sequence a token sees, itself included; None: all before it.
        deal: which slots of the row this rank computes; None: the row's first.
    """
    slots, device = None if deal is None else deal.slots, rotation[0].device
    if kernel == "sdpa":
        if slots is None:
            mask = dense_mask(subtree_end[: len(rotation[0])].to(device), window)
        else:
            mask = dense_mask(subtree_end.to(device), window)[slots]
        return TreeParams(mask, len(mask), rotation, deal=deal)
    length = len(subtree_end) if slots is None else len(slots)
    params = TreeParams(block_mask(subtree_end, device, window, slots), length, rotation, deal=deal)
    if window is not None:
        depth = torch.from_numpy(depths(_padded_ends(subtree_end))).to(device)
        params.reach = depth, (depth if slots is None else depth[slots]) - window
    return params


def rotation(
    positions: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE's cosines and sines (Su et al., 2021, arXiv:2104.09864) times `factor`: [S, head_dim /
    2] each.

    `positions`: [S]; `inv_freq`: [head_dim / 2], radians per position of each pair of dimensions.
    """
    angles = torch.outer(positions.float(), inv_freq)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def depths(subtree_end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each slot's depth in its tree: [S]. The slots before it that are not its ancestors are those
    whose subtrees have ended."""
    length = len(subtree_end)
    return np.arange(length) - np.cumsum(np.bincount(subtree_end, minlength=length))[:length]


def dense_mask(subtree_end: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """The mask as bool [S, S], [query, key]."""
    slots = torch.arange(len(subtree_end), device=subtree_end.device)
    query, key = slots[:, None], slots[None, :]
    mask = (key <= query) & (query < subtree_end[None, :])
    if window is not None:
        depth = torch.from_numpy(depths(subtree_end.cpu().numpy())).to(mask.device)
        mask &= depth[:, None] - depth[None, :] < window
    return mask


class Blocks(NamedTuple):
    """The mask as FlexAttention takes it.

    For each block of queries: the number of key blocks that it sees partly (`kv`) and wholly
    (`full_kv`), int32 [1, 1, blocks], and the indices of these, then of all others, int32 [1, 1,
    blocks, blocks]. The same for each block of keys (`q`, `full_q`).
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


def block_mask(
    subtree_end: torch.Tensor,
    device: torch.device,
    window: int | None = None,
    slots: torch.Tensor | None = None,
) -> Blocks:
    """The mask for FlexAttention, exact, from each block's smallest and largest `subtree_end`; no
    [S, S] is made.

    A key block before the queries' own is needed if any of its subtrees reaches the first query,
    and needs no mask if all of them reach past the last query. The queries' own block is always
    needed, with the mask. A window drops the blocks that lie wholly out of it, by the smallest and
    largest depths of the two blocks.

    Computed on the host, because on a GPU it would be about forty small kernels for each row.
    """
    ends = _padded_ends(subtree_end)
    partial, full = seen_blocks(ends, len(subtree_end), window)
    if slots is not None:
        queries = (slots[::BLOCK] // BLOCK).cpu().numpy()
        partial, full = partial[queries], full[queries]
    fields: list[NDArray[Any]] = [ends]
    for needed in (partial, full, partial.T, full.T):
        first_needed = np.argsort(~needed, axis=1, kind="stable").astype(np.int32)
        fields += [needed.sum(1, dtype=np.int32)[None, None], first_needed[None, None]]
    # This memory isn't pinned, so the driver has copied it when `to` returns.
    return Blocks(*(torch.from_numpy(field).to(device, non_blocking=True) for field in fields))


def seen_blocks(
    ends: NDArray[np.int64], length: int, window: int | None = None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which blocks of keys each block of queries sees partly, and which wholly: bool [query blocks,
    key blocks].

    `ends`: `subtree_end` of whole blocks, of which the slots from `length` on are padding.
    """
    slots = np.arange(len(ends))
    blocks = len(ends) // BLOCK
    smallest, largest = ends.reshape(blocks, BLOCK).min(1), ends.reshape(blocks, BLOCK).max(1)
    first = slots[::BLOCK]
    before = first[None, :] < first[:, None]
    seen = before & (largest[None, :] > first[:, None])
    full = seen & (smallest[None, :] >= np.minimum(first + BLOCK, length)[:, None])
    if window is not None:
        depth = depths(ends).reshape(blocks, BLOCK)
        seen &= depth.min(1)[:, None] - depth.max(1)[None, :] < window
        full &= depth.max(1)[:, None] - depth.min(1)[None, :] < window
    return (seen & ~full) | np.eye(blocks, dtype=bool), full


def _padded_ends(subtree_end: torch.Tensor) -> NDArray[np.int64]:
    """`subtree_end` for whole blocks, with padding slots at the end."""
    length = len(subtree_end)
    ends = np.arange(-(-length // BLOCK) * BLOCK) + 1
    ends[:length] = subtree_end.cpu().numpy()
    return ends


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    slots: torch.Tensor | None,
    depth: torch.Tensor | None,
    out: torch.Tensor | None,
    sinks: torch.Tensor | None,
    ends: torch.Tensor,
    *blocks: torch.Tensor,
) -> torch.Tensor:
    def tree_mask(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        slot = query if slots is None else slots[query]
        seen = (key <= slot) & (slot < ends[key])
        return seen if depth is None or out is None else seen & (depth[key] > out[query])

    fields: dict[str, Any] = dict(zip(Blocks._fields[1:], blocks, strict=True))
    lengths = (query.shape[2], key.shape[2])
    mask = BlockMask(seq_lengths=lengths, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=tree_mask, **fields)
    if sinks is None:
        return flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)
    output, aux = flex_attention(
        query,
        key,
        value,
        block_mask=mask,
        scale=scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    assert aux.lse is not None
    # The sink adds exp(sink) to the sum of exponentials.
    return (output * torch.sigmoid(aux.lse - sinks.float()[:, None])[..., None]).to(query.dtype)


flex = Compiled(_attend)
"""softmax(q k^T * scale) v; query [1, heads, S, head_dim], key and value [1, kv_heads, keys,
head_dim], scale, the queries' slots if they are not all of the row's (`Deal.slots`),
`TreeParams.reach` or two None, sinks, *Blocks."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: TreeParams,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k^T * scale) v under the row's mask: query [length, heads, head_dim], key and value
    [keys, key heads, head_dim] -> [length, heads, head_dim]. `sinks` [heads]: one more logit of
    each head's softmax, without a value.
    """
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    if isinstance(row.mask, Blocks):
        slots = None if row.deal is None else row.deal.slots
        depth, out = row.reach
        output = flex(query, key, value, scale, slots, depth, out, sinks, *row.mask)
    else:
        # Not `enable_gqa`, with which the backward of CUDA's kernels is many times slower.
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        mask, size = row.mask, query.shape[-1]
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
    """Add a key that every query sees and whose value is zero. Its product with each query is the
    head's sink: eight dimensions are added (kernels want multiples of eight), and the first of them
    is 1 in queries.
    """
    key, value = pad(key, (0, 8, 0, 1)), pad(value, (0, 8, 0, 1))
    one = torch.zeros(8, dtype=query.dtype, device=query.device)
    one[0] = 1
    query = torch.cat([query, one.expand(*query.shape[:-1], 8)], -1)
    key[:, :, -1, -8] = sinks.to(key.dtype)
    return query, key, value, pad(mask, (0, 1), value=True)
