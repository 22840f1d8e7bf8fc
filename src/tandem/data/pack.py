"""Sequences into rows, and rows into the packed arrays."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.data.packed import PackedArrays
from tandem.data.sequences import LinearSequence
from tandem.data.tree import PrefixTree, lay_out, sort_keys

# Rows of a split group that its next sequence may still go to. Bounds the work at this many comparisons a sequence.
OPEN_ROWS = 8


@dataclass(frozen=True)
class PackedTrajectory:
    """What is packed of one trajectory: its sequences, each no longer than a row; `group`: 0, 1, ... in order."""

    sequences: list[LinearSequence]
    group: int
    advantage: float
    reward: float


def pack(trajectories: Sequence[PackedTrajectory], sequence_length: int) -> PackedArrays:
    """Trajectories (at least one) in the order of their groups to packed arrays; the same input gives the same arrays.

    A group whose tree fits a row is kept whole: groups go, largest first, into the row with the least room that is
    enough for them (best-fit decreasing). A group whose tree is larger is split over rows, prefixes repeated.
    """
    sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
    owner = np.repeat(np.arange(len(trajectories)), [len(trajectory.sequences) for trajectory in trajectories])
    group_of = np.array([trajectory.group for trajectory in trajectories], np.int32)
    groups: list[list[int]] = [[] for _ in range(int(group_of[-1]) + 1)]
    for index, trajectory in enumerate(owner):
        groups[group_of[trajectory]].append(index)
    tokens = [sequence.tokens for sequence in sequences]
    rows = _place(groups, PrefixTree(tokens, sort_keys(tokens)), sequence_length)

    shape = (len(rows), sequence_length)
    row_tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    subtree_end = np.tile(np.arange(1, sequence_length + 1, dtype=np.int32), (len(rows), 1))
    order: list[int] = []
    targets, sources, items_of_row = [], [], []
    for r, row in enumerate(rows):
        layout = lay_out(row, tokens)
        used = row.num_slots
        row_tokens[r, :used] = layout.tokens
        positions[r, :used] = layout.positions
        subtree_end[r, :used] = layout.subtree_end
        members = row.sequences
        for index, path in zip(members, layout.paths, strict=True):
            targets.append(path[sequences[index].targets])
            sources.append(path[sequences[index].targets - 1])
        order.extend(members)
        items_of_row.append(sum(len(sequences[index].targets) for index in members))

    item_counts = [len(sequences[index].targets) for index in order]
    item_trajectory = np.repeat(owner[order], item_counts).astype(np.int32)
    advantages = np.array([trajectory.advantage for trajectory in trajectories], np.float32)
    return PackedArrays(
        tokens=row_tokens,
        positions=positions,
        subtree_end=subtree_end,
        row_num_tokens=np.array([row.num_slots for row in rows], np.int32),
        item_offsets=np.concatenate([[0], np.cumsum(items_of_row)]).astype(np.int64),
        item_target=np.concatenate(targets).astype(np.int32),
        item_source=np.concatenate(sources).astype(np.int32),
        item_sequence=np.repeat(np.arange(len(order)), item_counts).astype(np.int32),
        item_trajectory=item_trajectory,
        item_logprob=np.concatenate([sequences[index].logprobs for index in order]),
        item_advantage=advantages[item_trajectory],
        trajectory_group=group_of,
        trajectory_num_items=np.bincount(item_trajectory, minlength=len(trajectories)).astype(np.int32),
        trajectory_reward=np.array([trajectory.reward for trajectory in trajectories], np.float32),
        group_num_items=np.bincount(group_of[item_trajectory], minlength=len(groups)).astype(np.int32),
    )


class _Rows:
    """Rows being filled. Room is what a row really has left, with prefixes that its groups share counted once."""

    def __init__(self, sequence_length: int) -> None:
        self.trees: list[PrefixTree] = []
        self._length = sequence_length
        self._by_room: list[tuple[int, int]] = []  # (room, row), sorted

    def room(self, row: int) -> int:
        return self._length - self.trees[row].num_slots

    def open(self, tree: PrefixTree) -> int:
        self.trees.append(tree)
        row = len(self.trees) - 1
        insort(self._by_room, (self.room(row), row))
        return row

    def add(self, row: int, sequences: list[int]) -> None:
        self._by_room.pop(bisect_left(self._by_room, (self.room(row), row)))
        for index in sequences:
            self.trees[row].add(index)
        insort(self._by_room, (self.room(row), row))

    def tightest(self, size: int) -> int | None:
        """The row with the least room that is at least `size`."""
        at = bisect_left(self._by_room, (size, -1))
        return self._by_room[at][1] if at < len(self._by_room) else None

    def emptiest(self, size: int) -> int | None:
        """The row with the most room, if that is at least `size`."""
        return self._by_room[-1][1] if self._by_room and self._by_room[-1][0] >= size else None


def _place(groups: list[list[int]], empty: PrefixTree, sequence_length: int) -> list[PrefixTree]:
    """The rows, as trees. Whether a group fits is judged by its size alone, so that no row can overflow."""
    trees = []
    for group in groups:
        tree = empty.fresh()
        for index in group:
            tree.add(index)
        trees.append(tree)

    rows = _Rows(sequence_length)
    for tree in sorted(trees, key=lambda tree: -tree.num_slots):
        if tree.num_slots > sequence_length:
            _split(tree, rows)
        elif (row := rows.tightest(tree.num_slots)) is not None:
            rows.add(row, tree.sequences)
        else:
            rows.open(tree)
    return rows.trees


def _split(tree: PrefixTree, rows: _Rows) -> None:
    """Place a tree that is larger than a row. In lexicographic order each sequence goes, among the last few rows this
    tree went to, where it takes the fewest slots, then where the least room is left. If it fits none of them, it goes
    to the row with the most room (so that its siblings can follow), and if it does not fit there, to a new row."""
    window: list[int] = []
    for index in tree.sequences:
        costs = [(rows.trees[row].cost(index), rows.room(row), row) for row in window]
        fitting = [entry for entry in costs if entry[0] <= entry[1]]
        if fitting:
            rows.add(min(fitting)[2], [index])
            continue
        row = rows.emptiest(tree.length(index))
        if row is None:
            row = rows.open(tree.fresh())
        rows.add(row, [index])
        window = [*window, row][-OPEN_ROWS:]
