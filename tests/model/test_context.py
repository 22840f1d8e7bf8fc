"""Context parallelism without ranks. The tests check the blocks of each rank, and the mask of a
rank's slots. `test_topologies.py` checks the computations of several ranks.
"""

from unittest import mock

import numpy as np
import pytest
import torch

from tandem.model.attention import TreeParams, dense_mask, tree_params
from tandem.model.flex_attention import BLOCK, FlexMask, seen_blocks
from tandem.model.rows import Deal, RowTensors, deal_blocks, pad_row

SEQUENCE = np.full(64 * BLOCK, 64 * BLOCK)
# A prompt of 2048 slots and 16 answers of 512 slots each.
GROUP = np.array([10240] * 2048 + [2048 + 512 * (1 + slot // 512) for slot in range(16 * 512)])


@pytest.mark.parametrize("ends", [SEQUENCE, GROUP], ids=["sequence", "group"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_see_about_as_many_blocks(ends, ranks):
    blocks = deal_blocks(ends, ranks)
    assert sorted(np.concatenate(blocks)) == list(range(len(ends) // BLOCK))
    assert len({len(of_rank) for of_rank in blocks}) == 1
    partial, full = seen_blocks(ends, len(ends))
    seen = [(partial | full)[of_rank].sum() for of_rank in blocks]
    assert max(seen) <= 1.1 * np.mean(seen)


@pytest.mark.parametrize("window", [None, 400])
def test_the_masks_of_some_slots_are_the_rows_of_the_whole(window):
    ends = torch.tensor([640] * 300 + [400] * 100 + [640] * 240 + [768] * 128)
    slots = torch.cat([torch.arange(128), torch.arange(384, 640)])
    whole = dense_mask(ends, window)
    angles = torch.zeros(len(slots), 4)
    deal = mock.Mock(spec=Deal, slots=slots)
    part = tree_params(ends, "sdpa", (angles, angles), window, deal)
    assert torch.equal(part.mask, whole[slots])
    blocks = tree_params(ends, "flex", (angles, angles), window, deal)
    assert torch.equal(evaluate(blocks), whole[slots])
    assert int(blocks.mask.full_kv_num_blocks.sum()) > 0


def test_padding_keeps_a_longer_row_of_the_attention():
    """The probe computes only the first slots of a row that is as long as the job's rows. Padding
    of the computed slots does not shorten the row that attention uses."""
    few = RowTensors(
        torch.arange(5), torch.arange(5), torch.arange(512) + 1, torch.arange(4), torch.arange(4)
    )
    row = pad_row(few, 6)
    assert (len(row.tokens), len(row.positions)) == (6, 6)
    assert torch.equal(row.subtree_end, few.subtree_end)
    assert torch.equal(pad_row(few, 640).subtree_end, torch.arange(640) + 1)


def evaluate(tree: TreeParams) -> torch.Tensor:
    """The mask of keys that FlexAttention sees. In a partly visible block the exact rule decides
    about each key. All keys of a full block are visible."""
    mask = tree.mask
    assert isinstance(mask, FlexMask)
    assert tree.deal is not None
    slots = tree.deal.slots
    seen = torch.zeros(len(slots), len(mask.ends), dtype=torch.bool)
    keys = torch.arange(len(mask.ends))
    exact = (keys <= slots[:, None]) & (slots[:, None] < mask.ends)
    if tree.reach[0] is not None:
        exact &= tree.reach[0] > tree.reach[1][:, None]
    for query in range(len(slots) // BLOCK):
        of_query = slice(query * BLOCK, (query + 1) * BLOCK)
        for counts, indices, wholly in (
            (mask.kv_num_blocks, mask.kv_indices, False),
            (mask.full_kv_num_blocks, mask.full_kv_indices, True),
        ):
            for block in indices[0, 0, query, : int(counts[0, 0, query])].tolist():
                of_keys = slice(block * BLOCK, (block + 1) * BLOCK)
                seen[of_query, of_keys] = True if wholly else exact[of_query, of_keys]
    return seen
