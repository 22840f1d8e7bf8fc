"""FlexAttention over packed prefix-tree rows: the block mask and the compiled kernel.

PyTorch's FlexAttention (Dong et al., 2024, arXiv:2412.05496) skips blocks without visible keys.
`Compiled` hashes this module's source, so this module contains all code from which the kernel is
traced.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from tandem.model.compiled import Compiled

BLOCK = 128  # FlexAttention's own default, in slots
WIDE_HEAD = 256
"""The most features of a head for which FlexAttention's own choice of blocks fits into an H100's
shared memory (227 KiB). With 512 features its forward kernel needs 257 KiB."""


class FlexMask(NamedTuple):
    """The attention mask in the form of FlexAttention's BlockMask.

    The fields `kv` describe the key blocks that a query block sees in part. The fields `full_kv`
    describe the key blocks that a query block sees as a whole. `kv_num_blocks` and
    `full_kv_num_blocks`, int32 [1, 1, blocks], are the numbers of described key blocks for each
    query block. `kv_indices` and `full_kv_indices`, int32 [1, 1, blocks, blocks], list all key
    blocks for each query block, the described key blocks first. In the same way, the fields `q` and
    `full_q` describe the query blocks that see a key block.
    """

    ends: torch.Tensor  # int64 [blocks * BLOCK]: `subtree_end`, padded
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
) -> FlexMask:
    """The exact mask for FlexAttention, computed from the smallest and largest `subtree_end` of
    each block, without an [S, S] tensor.

    A key block before the query block is needed if any subtree of its keys reaches the query
    block's first query. A needed key block needs no mask if all subtrees of its keys extend past
    the query block's last query. The key block with the same slots as the query block is always
    needed and masked. With a window, key blocks that are entirely outside the window are left out.
    The smallest and largest depths of the query block and the key block show whether the key block
    is outside the window.

    The mask is computed on the host, because on a GPU it would take about forty small kernels for
    each row.

    Args:
        subtree_end: int [S], on the host.
        window: the number of tokens that a token sees in its sequence, itself included.
        slots: int64 [queries], the slots of this rank's queries; None: all slots.
    """
    ends = padded_ends(subtree_end)
    partial, full = seen_blocks(ends, len(subtree_end), window)
    if slots is not None:
        queries = (slots[::BLOCK] // BLOCK).cpu().numpy()
        partial, full = partial[queries], full[queries]
    fields: list[NDArray[Any]] = [ends]
    for needed in (partial, full, partial.T, full.T):
        first_needed = np.argsort(~needed, axis=1, kind="stable").astype(np.int32)
        fields += [needed.sum(1, dtype=np.int32)[None, None], first_needed[None, None]]
    # The host arrays aren't pinned, so the driver has copied them when `to` returns.
    return FlexMask(*(torch.from_numpy(field).to(device, non_blocking=True) for field in fields))


def depths(subtree_end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each slot's depth in its tree, [S]. The depth is the number of earlier slots whose subtrees
    have not ended, because these slots are the ancestors."""
    length = len(subtree_end)
    return np.arange(length) - np.cumsum(np.bincount(subtree_end, minlength=length))[:length]


def seen_blocks(
    ends: NDArray[np.int64], length: int, window: int | None = None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Two arrays, bool [query blocks, key blocks]. The first array marks the key blocks that a
    query block sees in part. The second array marks the key blocks that a query block sees as a
    whole.

    Args:
        ends: the array `subtree_end`, padded to whole blocks; slots from `length` on are padding.
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


def padded_ends(subtree_end: torch.Tensor) -> NDArray[np.int64]:
    """`subtree_end` for whole blocks, with padding slots at the end. The input is int [S]; the
    result is int64 [blocks * BLOCK]."""
    length = len(subtree_end)
    ends = np.arange(-(-length // BLOCK) * BLOCK) + 1
    ends[:length] = subtree_end.cpu().numpy()
    return ends


def _wide_head_options(itemsize: int) -> dict[str, int]:
    """FlexAttention's blocks for heads of more than `WIDE_HEAD` features.

    BLOCK_M and BLOCK_N are the forward kernel's numbers of queries and keys per block. The suffixes
    1 and 2 stand for the two halves of the backward kernel. For heads of 512 features, the blocks
    need about 128 KiB of shared memory.

    Args:
        itemsize: bytes of an element of q, k and v.
    """
    half = 64 // itemsize
    options = dict.fromkeys(("BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), half)
    return options | {"BLOCK_M": 2 * half, "num_stages": 1, "num_warps": 8}


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

    fields: dict[str, Any] = dict(zip(FlexMask._fields[1:], blocks, strict=True))
    wide = query.is_cuda and query.shape[-1] > WIDE_HEAD
    options: Any = _wide_head_options(query.itemsize) if wide else None
    lengths = (query.shape[2], key.shape[2])
    mask = BlockMask(seq_lengths=lengths, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=tree_mask, **fields)
    common: dict[str, Any] = {
        "block_mask": mask,
        "scale": scale,
        "enable_gqa": True,
        "kernel_options": options,
    }
    if sinks is None:
        return flex_attention(query, key, value, **common)
    output, aux = flex_attention(query, key, value, return_aux=AuxRequest(lse=True), **common)
    assert aux.lse is not None
    # The sink adds exp(sink) to the softmax's sum of exponentials.
    return (output * torch.sigmoid(aux.lse - sinks.float()[:, None])[..., None]).to(query.dtype)


flex = Compiled(_attend)
"""softmax(q k^T * scale) v. Arguments: query [1, heads, S, head_dim], key and value [1, kv_heads,
keys, head_dim]; scale; the queries' slots (`Deal.slots`), or None if they are all slots of the row;
the two fields of `TreeParams.reach`; sinks; *FlexMask."""
