"""A packed row on the device, and its division among ranks.

Context-parallel ranks share each row: the row's slots are distributed to the ranks in blocks. In
the attention, each rank computes the queries of its blocks. The keys and values of all slots are
gathered for each layer and not kept. All other computations treat each slot separately.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.nn.functional import pad

from tandem.model import parallel
from tandem.model.flex_attention import BLOCK, seen_blocks
from tandem.model.layer.heads import Heads
from tandem.model.parallel import Topology


@dataclass(frozen=True)
class Deal:
    """The slots of a row that this rank has, if context-parallel ranks share the row. The row has
    `length` slots, and each rank has length / ranks slots. All tensors of a `Deal` are on the
    device."""

    slots: torch.Tensor  # This rank's slots, ascending: int64 [length / ranks].
    place: torch.Tensor  # Each block's index in `by_rank`: int64 [length / BLOCK].
    # The blocks of all ranks, ordered by rank: int64 [length / BLOCK].
    by_rank: torch.Tensor
    # The row's items that this rank predicts: int64 [rank items].
    items: torch.Tensor
    num_items: int
    group: dist.ProcessGroup

    def gather(self, heads: Heads) -> Heads:
        """This rank's queries, and the keys and values of the whole row in the row's order."""
        q, k, v = heads
        both = parallel.gather(torch.cat([k, v], 1), self.group)
        k, v = _reorder(both, self.place).chunk(2, 1)
        return q, k.contiguous(), v.contiguous()

    def scatter(self, gradients: Heads) -> Heads:
        """The gradients of the argument of `gather`, from the gradients of `gather`'s result. The
        ranks' gradients are summed in the order of ranks."""
        q, k, v = gradients
        k, v = parallel.scatter_sum(_reorder(torch.cat([k, v], 1), self.by_rank), self.group).chunk(
            2, 1
        )
        return q, k, v

    def gather_items(self, values: torch.Tensor) -> torch.Tensor:
        """Joins the values of all ranks' items, from [rank items] to [items]. Every rank computes
        the loss of all items, so the backward pass sums no gradients."""
        whole: torch.Tensor = _GatherItems.apply(values, self)
        return whole


class _GatherItems(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, deal: Deal) -> torch.Tensor:
        ctx.items = deal.items
        whole = values.new_zeros(deal.num_items).index_copy(0, deal.items, values)
        # The sum is exact, because each item's value is nonzero on one rank at most.
        parallel.all_reduce(whole, group=deal.group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient[ctx.items], None


def deal_blocks(subtree_end: NDArray[np.int64], ranks: int) -> list[NDArray[np.int64]]:
    """For each rank the indices of its query blocks, ascending, int64 [blocks / ranks]. All ranks
    have the same number of query blocks. The blocks of each rank see about the same number of key
    blocks. `subtree_end`: int64 [S], S a multiple of BLOCK.

    Query blocks are sorted by the number of key blocks that they see, in descending order. The
    ranks get the sorted blocks in turn: first from rank 0 to the last rank, next from the last rank
    to rank 0, and so on.
    """
    partial, full = seen_blocks(subtree_end, len(subtree_end))
    order = np.argsort(-(partial | full).sum(1), kind="stable")
    turns = order.reshape(-1, ranks)
    turns[1::2] = turns[1::2, ::-1]
    return [np.sort(turns[:, rank]) for rank in range(ranks)]


def _reorder(tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The tensor [blocks * BLOCK, ...] with its blocks in the order `order`."""
    return tensor.unflatten(0, (-1, BLOCK))[order].flatten(0, 1)


@dataclass(frozen=True)
class RowTensors:
    """A packed row in the form that the model needs. Tensors are int64 and on the device unless
    noted. Slots are indices into the row."""

    tokens: torch.Tensor  # Token ids, [S].
    positions: torch.Tensor  # Positions, [S].
    # The array `subtree_end` is on the host. The length of `subtree_end` is S, or larger if the
    # attention computes more slots. The additional entries are padding.
    subtree_end: torch.Tensor
    item_source: torch.Tensor  # [items]: the slot from which each item is predicted.
    item_token: torch.Tensor  # [items]: the predicted token.
    # The experts that compute each slot, int16 [S, layers, experts per token]. The router chooses
    # the experts of a slot if the value is -1, and of all slots if `slot_experts` is None.
    slot_experts: torch.Tensor | None = None
    # If `deal` is set, the other fields except `subtree_end` contain only this rank's slots and
    # items.
    deal: Deal | None = None


def deal_row(row: RowTensors, topology: Topology) -> RowTensors:
    """This rank's part of the row, if context-parallel ranks share the row."""
    group, sizes = topology.context, topology.sizes
    if group.size() == 1 or row.deal is not None:
        return row
    unit = math.lcm(BLOCK, sizes.tensor if sizes.sequence else 1) * group.size()
    row = pad_row(row, -(-max(len(row.tokens), len(row.subtree_end)) // unit) * unit)
    blocks, where = deal_blocks(row.subtree_end.cpu().numpy(), group.size()), row.tokens.device
    rank_slots = (blocks[group.rank()][:, None] * BLOCK + np.arange(BLOCK)).ravel()
    by_rank = np.concatenate(blocks)
    slots, place, order = (
        torch.from_numpy(array).to(where) for array in (rank_slots, np.argsort(by_rank), by_rank)
    )
    # Slot of the row -> index of the slot among this rank's slots, or -1.
    number = torch.full_like(row.tokens, -1)
    number[slots] = torch.arange(len(slots), device=where)
    sources, experts = number[row.item_source], row.slot_experts
    items = (sources >= 0).nonzero()[:, 0]  # the host waits for the device
    return RowTensors(
        tokens=row.tokens[slots],
        positions=row.positions[slots],
        subtree_end=row.subtree_end,
        item_source=sources[items],
        item_token=row.item_token[items],
        slot_experts=None if experts is None else experts[slots],
        deal=Deal(slots, place, order, items, len(row.item_source), group),
    )


def pad_row(row: RowTensors, slots: int) -> RowTensors:
    """The row, padded to `slots` slots. The row's `subtree_end` may already have more than `slots`
    entries."""
    missing, ends, experts = slots - len(row.tokens), row.subtree_end, row.slot_experts
    return replace(
        row,
        tokens=pad(row.tokens, (0, missing)),
        positions=pad(row.positions, (0, missing)),
        subtree_end=torch.cat(
            [ends, torch.arange(len(ends), max(slots, len(ends)), device=ends.device) + 1]
        ),
        slot_experts=None if experts is None else pad(experts, (0, 0, 0, 0, 0, missing), value=-1),
    )
