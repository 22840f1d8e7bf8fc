"""A packed row on the device, and the part of it that one rank computes."""

import math
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from tandem.model.attention import BLOCK
from tandem.model.context import Deal, deal_row
from tandem.model.parallel import Topology


@dataclass(frozen=True)
class RowTensors:
    """What the model needs of a packed row, int64, on the device unless noted. Slots are indices into the row."""

    tokens: torch.Tensor  # [S]
    positions: torch.Tensor  # [S]
    subtree_end: torch.Tensor  # [S], or longer if the attention's row is: the rest is padding; on the host
    item_source: torch.Tensor  # [items], the slot each item is predicted from
    item_token: torch.Tensor  # [items], the predicted token
    # int16 [S, layers, experts per token], which compute the slot; -1, or None: those that the router chooses.
    slot_experts: torch.Tensor | None = None
    deal: Deal | None = None  # the other fields but `subtree_end` are then of this rank's slots and items


def dealt(row: RowTensors, topology: Topology) -> RowTensors:
    """This rank's part of the row, where context-parallel ranks share it."""
    group, sizes = topology.context, topology.sizes
    if group.size() == 1 or row.deal is not None:
        return row
    unit = math.lcm(BLOCK, sizes.tensor if sizes.sequence else 1) * group.size()
    row = padded(row, -(-max(len(row.tokens), len(row.subtree_end)) // unit) * unit)
    deal = deal_row(row.subtree_end, row.item_source, group)
    local = torch.empty_like(row.tokens)
    local[deal.slots] = torch.arange(len(deal.slots), device=local.device)
    experts = row.slot_experts
    return RowTensors(
        tokens=row.tokens[deal.slots], positions=row.positions[deal.slots], subtree_end=row.subtree_end,
        item_source=local[row.item_source[deal.items]], item_token=row.item_token[deal.items],
        slot_experts=None if experts is None else experts[deal.slots], deal=deal,
    )  # fmt: skip


def padded(row: RowTensors, slots: int) -> RowTensors:
    """The row with so many slots, of which the new ones are padding. `subtree_end` may be longer already."""
    missing, ends, experts = slots - len(row.tokens), row.subtree_end, row.slot_experts
    return replace(
        row, tokens=pad(row.tokens, (0, missing)), positions=pad(row.positions, (0, missing)),
        subtree_end=torch.cat([ends, torch.arange(len(ends), max(slots, len(ends)), device=ends.device) + 1]),
        slot_experts=None if experts is None else pad(experts, (0, 0, 0, 0, 0, missing), value=-1),
    )  # fmt: skip
