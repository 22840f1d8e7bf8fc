"""Prefix trees over token sequences, kept as a sorted list.

In lexicographic order a sequence shares its longest prefix with a neighbour. So the sorted list and the common prefix
lengths of neighbours are the whole tree, without nodes. Every common prefix within a row is shared, of any length,
sampled or not, between trajectories, groups and duplicates: a shared token saves a slot, and the mask costs the same.
"""

from bisect import bisect_left, insort

import numpy as np

from tandem.data.packed_format import Int32


def common_prefix(a: Int32, b: Int32) -> int:
    """The number of leading tokens that are equal."""
    shorter = min(len(a), len(b))
    differ = a[:shorter] != b[:shorter]
    first = int(differ.argmax()) if shorter else 0
    return first if shorter and differ[first] else shorter


class PrefixTree:
    """The sequences of one row (or group) and `num_slots`, the slots that their tree takes.

    `tokens` are all sequences of the job, in lexicographic order. The tree holds indices into it, sorted.
    """

    def __init__(self, tokens: list[Int32]) -> None:
        self.num_slots = 0
        self.sequences: list[int] = []
        self._tokens = tokens

    def cost(self, index: int) -> int:
        """Slots that adding sequence `index` would take: its length less the prefix that it shares with a neighbour."""
        at = bisect_left(self.sequences, index)
        neighbours = [self._tokens[other] for other in self.sequences[max(at - 1, 0) : at + 1]]
        shared = max((common_prefix(self._tokens[index], neighbour) for neighbour in neighbours), default=0)
        return len(self._tokens[index]) - shared

    def add(self, index: int) -> None:
        self.num_slots += self.cost(index)
        insort(self.sequences, index)


def lay_out(
    tree: PrefixTree, tokens: list[Int32], row_tokens: Int32, positions: Int32, subtree_end: Int32
) -> list[Int32]:
    """Writes the tree to the beginning of a row's arrays (int32 [L], as in the packed format); returns for each of
    `tree.sequences` its slots, int32, token by token.

    Depth-first order is lexicographic order: each sequence appends the tokens that it does not share with the one
    before it. This ends the subtrees of those tokens of the one before that it does not share.
    """
    subtree_end[: tree.num_slots] = tree.num_slots
    previous = path = np.empty(0, np.int32)
    paths = []
    filled = 0
    for index in tree.sequences:
        own = tokens[index]
        shared = common_prefix(previous, own)
        subtree_end[path[shared:]] = filled  # nothing, if this sequence extends or repeats the one before
        end = filled + len(own) - shared
        row_tokens[filled:end] = own[shared:]
        positions[filled:end] = np.arange(shared, len(own))
        path = np.concatenate([path[:shared], np.arange(filled, end, dtype=np.int32)])
        paths.append(path)
        previous, filled = own, end
    assert filled == tree.num_slots
    return paths
