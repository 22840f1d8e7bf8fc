"""Places sequences in rows, and turns rows into the packed arrays.

A row is a prefix tree, stored as a sorted list of sequences. In lexicographic order a sequence
shares its longest prefix with a neighbour. The sorted list and the lengths of neighbours' common
prefixes describe the whole tree. Every common prefix within a row is stored once, whether it was
sampled or not. Sequences share prefixes even if they belong to different groups. Each shared token
saves a slot, and the cost of the attention mask stays the same.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from tandem.data.packed_format import Arrays, Float32, Int16, Int32, check_size

# A split group's next sequence is placed in one of the group's last OPEN_ROWS rows, if it fits. The
# constant limits the number of rows that are compared for each sequence.
OPEN_ROWS = 8


@dataclass(frozen=True, slots=True)
class LinearSequence:
    """A sequence of tokens, some of them trained.

    Attributes:
        `tokens`: int32 [n]; the last token is trained.
        `trained`: int32 [k], k >= 1: indices of the trained tokens in `tokens`, in rising order.
            The first trained index is at least 1.
        `targets`: int32 [k]: the tokens to predict at the indices `trained`.
        `weights`: float32 [k]: the factors of the tokens' losses.
        `logprobs`: float32 [k]: the sampler's log-probs in nats; NaN for tokens that were not
            sampled.
        `policy_steps`: int32 [k]: the steps of the checkpoints that sampled the tokens, or -1.
        `expert_ids`: int16 [m, layers, experts per token]: `slot_experts` of the first m tokens.
            The experts of later tokens are unknown.
        `rejected`: whether this is a pair's rejected answer.
    """

    tokens: Int32
    trained: Int32
    targets: Int32
    weights: Float32
    logprobs: Float32
    policy_steps: Int32
    expert_ids: Int16 | None = None
    rejected: bool = False

    @classmethod
    def of(
        cls,
        tokens: Int32,
        trained: Int32,
        *,
        targets: Int32 | None = None,
        weights: Float32 | None = None,
        logprobs: Float32 | None = None,
        policy_steps: Int32 | None = None,
        expert_ids: Int16 | None = None,
    ) -> Self:
        """The sequence, cut after the last trained token: no trained token attends to later tokens.
        The shapes and dtypes of the arrays are those of the class's fields.

        Args:
            targets: None means the tokens themselves.
            weights: None means 1 for every trained token.
            logprobs: None means NaN for every trained token.
            policy_steps: None means -1 for every trained token.
            expert_ids: None means that the experts of all tokens are unknown.
        """
        return cls(
            tokens[: trained[-1] + 1],
            trained,
            tokens[trained] if targets is None else targets,
            np.ones(len(trained), np.float32) if weights is None else weights,
            np.full(len(trained), np.nan, np.float32) if logprobs is None else logprobs,
            np.full(len(trained), -1, np.int32) if policy_steps is None else policy_steps,
            expert_ids,
        )

    def cut(self, length: int) -> "LinearSequence | None":
        """The first `length` tokens of the sequence, cut after the last trained token among them.
        Returns None if no trained token is left."""
        count = int(np.searchsorted(self.trained, length))
        if not count:
            return None
        return LinearSequence.of(
            self.tokens,
            self.trained[:count],
            targets=self.targets[:count],
            weights=self.weights[:count],
            logprobs=self.logprobs[:count],
            policy_steps=self.policy_steps[:count],
            expert_ids=self.expert_ids,
        )


@dataclass(frozen=True)
class PackedTrajectory:
    """The packed part of one trajectory. `sequences`: each is at most as long as a row. `group`:
    the number of the trajectory's group; groups are numbered 0, 1, ... in order. `batch`: the value
    for the packed array `row_batch`, equal within a group."""

    sequences: list[LinearSequence]
    group: int
    weight: float
    reward: float
    truncated: bool
    batch: int = 0
    rejected: bool = False


def common_prefix(a: Int32, b: Int32) -> int:
    """The number of equal tokens at the beginning of `a` and `b`, both int32 [tokens]."""
    shorter = min(len(a), len(b))
    differ = a[:shorter] != b[:shorter]
    first = int(differ.argmax()) if shorter else 0
    return first if shorter and differ[first] else shorter


def slots_of(sequences: Iterable[LinearSequence]) -> int:
    """The number of slots that the sequences take together in one row. A row stores a common prefix
    once."""
    ordered = sorted((one.tokens for one in sequences), key=_order)
    shared = sum(common_prefix(a, b) for a, b in pairwise(ordered))
    return sum(map(len, ordered)) - shared


def _order(tokens: Int32) -> bytes:
    """A key that sorts sequences lexicographically by their (non-negative) tokens."""
    return tokens.astype(">i4").tobytes()


class PrefixTree:
    """The sequences of one row or of one group, as a tree. `num_slots`: the number of slots that
    the tree takes.

    `tokens` holds all sequences of the job, in lexicographic order. The tree holds sorted indices
    into `tokens`.
    """

    def __init__(self, tokens: list[Int32], sequences: Iterable[int] = ()) -> None:
        """`tokens`: int32 [length] for each sequence of the job; `sequences`: the indices of the
        sequences to add."""
        self.num_slots = 0
        self.sequences: list[int] = []
        self._tokens = tokens
        for index in sequences:
            self.add(index)

    def cost(self, index: int) -> int:
        """The number of slots that sequence `index` would add. The longest prefix that the sequence
        shares with a neighbour adds no slots."""
        at = bisect_left(self.sequences, index)
        neighbours = [self._tokens[other] for other in self.sequences[max(at - 1, 0) : at + 1]]
        shared = max(
            (common_prefix(self._tokens[index], neighbour) for neighbour in neighbours), default=0
        )
        return len(self._tokens[index]) - shared

    def add(self, index: int) -> None:
        self.num_slots += self.cost(index)
        insort(self.sequences, index)

    def lay_out(self, row_tokens: Int32, positions: Int32, subtree_end: Int32) -> list[Int32]:
        """Writes the tree to the beginning of a row's arrays. Returns for each of `sequences` the
        slots of its tokens, int32 [length].

        Depth-first order is lexicographic order: each sequence appends the tokens that it does not
        share with the previous sequence. A token's subtree ends where the first later sequence
        without this token begins.

        Args:
            row_tokens, positions, subtree_end: the row's arrays, int32 [L] each, as in the packed
                format. Only the first `num_slots` entries of the arrays are written.
        """
        subtree_end[: self.num_slots] = self.num_slots
        previous = path = np.empty(0, np.int32)
        paths = []
        filled = 0
        for index in self.sequences:
            own = self._tokens[index]
            shared = common_prefix(previous, own)
            # The slice is empty if this sequence extends or repeats the previous sequence.
            subtree_end[path[shared:]] = filled
            end = filled + len(own) - shared
            row_tokens[filled:end] = own[shared:]
            positions[filled:end] = np.arange(shared, len(own))
            path = np.concatenate([path[:shared], np.arange(filled, end, dtype=np.int32)])
            paths.append(path)
            previous, filled = own, end
        return paths


def pack(trajectories: Sequence[PackedTrajectory], sequence_length: int) -> Arrays:
    """Packs trajectories (at least one, in the order of their groups). The same input gives the
    same arrays. Raises InvalidInput if the arrays are too large.

    All groups of a row belong to one batch. A group whose tree fits into a row is kept whole. The
    groups that fit are placed in order of size, the largest first. A group that fits goes into the
    row that has the fewest free slots among the rows with enough free slots (best-fit decreasing).
    A group whose tree is larger than a row is split, which stores prefixes several times.
    """
    owned = [
        (sequence, t)
        for t, trajectory in enumerate(trajectories)
        for sequence in trajectory.sequences
    ]
    owned.sort(key=lambda pair: _order(pair[0].tokens))  # sorted as PrefixTree requires
    sequences = [sequence for sequence, _ in owned]
    group_of = np.array([trajectory.group for trajectory in trajectories], np.int32)
    tokens = [sequence.tokens for sequence in sequences]
    batches = _batches(trajectories, [t for _, t in owned])
    placed = {
        batch: _place(groups.values(), tokens, sequence_length) for batch, groups in batches.items()
    }
    rows = [row for batch_rows in placed.values() for row in batch_rows]
    shape = (len(rows), sequence_length)
    token_shape = next(
        (
            sequence.expert_ids.shape[1:]
            for sequence in sequences
            if sequence.expert_ids is not None
        ),
        (0, 0),
    )
    # Even few tokens can make many rows, because each batch has its own rows. The size of the
    # arrays is checked before memory is allocated.
    check_size(math.prod(shape) * (3 * 4 + 2 * math.prod(token_shape)))
    row_tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    subtree_end = np.tile(np.arange(1, sequence_length + 1, dtype=np.int32), (len(rows), 1))
    slot_experts = np.full((*shape, *token_shape), -1, np.int16)
    targets, sources = [], []
    for r, row in enumerate(rows):
        paths = row.lay_out(row_tokens[r], positions[r], subtree_end[r])
        for index, path in zip(row.sequences, paths, strict=True):
            targets.append(path[sequences[index].trained])
            sources.append(path[sequences[index].trained - 1])
            if (expert_ids := sequences[index].expert_ids) is not None:
                slots = path[: len(expert_ids)]
                # A shared slot keeps the experts of the first sequence that has the slot.
                new = slot_experts[r, slots, 0, 0] < 0
                slot_experts[r, slots[new]] = expert_ids[: len(slots)][new]

    order = [index for row in rows for index in row.sequences]
    ordered = [sequences[index] for index in order]
    item_counts = [len(sequence.trained) for sequence in ordered]
    item_trajectory = np.repeat([owned[index][1] for index in order], item_counts).astype(np.int32)
    weights = np.array([trajectory.weight for trajectory in trajectories], np.float32)
    rejected = np.array([trajectory.rejected for trajectory in trajectories], np.bool_)
    items_of_row = [sum(len(sequences[index].trained) for index in row.sequences) for row in rows]
    return {
        "tokens": row_tokens,
        "positions": positions,
        "subtree_end": subtree_end,
        "slot_experts": slot_experts,
        "row_num_tokens": np.array([row.num_slots for row in rows], np.int32),
        "row_batch": (
            np.repeat(list(placed), [len(batch_rows) for batch_rows in placed.values()]).astype(
                np.int32
            )
        ),
        "item_offsets": np.concatenate([[0], np.cumsum(items_of_row)]).astype(np.int64),
        "item_target": np.concatenate(targets).astype(np.int32),
        "item_source": np.concatenate(sources).astype(np.int32),
        "item_token": np.concatenate([sequence.targets for sequence in ordered]),
        "item_sequence": np.repeat(np.arange(len(order)), item_counts).astype(np.int32),
        "item_trajectory": item_trajectory,
        "item_logprob": np.concatenate([sequence.logprobs for sequence in ordered]),
        "item_policy_step": np.concatenate([sequence.policy_steps for sequence in ordered]),
        "item_weight": (
            weights[item_trajectory] * np.concatenate([sequence.weights for sequence in ordered])
        ),
        "item_rejected": rejected[item_trajectory],
        "trajectory_group": group_of,
        "trajectory_num_items": (
            np.bincount(item_trajectory, minlength=len(trajectories)).astype(np.int32)
        ),
        "trajectory_reward": np.array(
            [trajectory.reward for trajectory in trajectories], np.float32
        ),
        "group_num_items": (
            np.bincount(group_of[item_trajectory], minlength=int(group_of[-1]) + 1).astype(np.int32)
        ),
    }


def _batches(
    trajectories: Sequence[PackedTrajectory], owners: list[int]
) -> dict[int, dict[int, list[int]]]:
    """Batch -> group -> the indices of the group's sequences. `owners`: the index of each
    sequence's trajectory."""
    batches: dict[int, dict[int, list[int]]] = {}
    for trajectory in trajectories:
        batches.setdefault(trajectory.batch, {}).setdefault(trajectory.group, [])
    for index, t in enumerate(owners):
        batches[trajectories[t].batch][trajectories[t].group].append(index)
    return batches


class _OpenRows:
    """Rows that are being filled. A prefix that several groups of a row share is stored once."""

    def __init__(self, sequence_length: int) -> None:
        self.trees: list[PrefixTree] = []
        self._length = sequence_length
        self._by_free: list[tuple[int, int]] = []  # (free slots, row), sorted

    def free(self, row: int) -> int:
        """The free slots of a row."""
        return self._length - self.trees[row].num_slots

    def append(self, tree: PrefixTree) -> int:
        """Adds `tree` as a new row and returns the row's number."""
        self.trees.append(tree)
        row = len(self.trees) - 1
        insort(self._by_free, (self.free(row), row))
        return row

    def add(self, row: int, sequences: list[int]) -> None:
        self._by_free.pop(bisect_left(self._by_free, (self.free(row), row)))
        for index in sequences:
            self.trees[row].add(index)
        insort(self._by_free, (self.free(row), row))

    def tightest(self, size: int) -> int | None:
        """The row with the fewest free slots among the rows with at least `size` free slots."""
        at = bisect_left(self._by_free, (size, -1))
        return self._by_free[at][1] if at < len(self._by_free) else None

    def emptiest(self, size: int) -> int | None:
        """The row with the most free slots; None if it has fewer than `size` free slots."""
        return self._by_free[-1][1] if self._by_free and self._by_free[-1][0] >= size else None


def _place(
    groups: Iterable[list[int]], tokens: list[Int32], sequence_length: int
) -> list[PrefixTree]:
    """The rows, as trees. The size of a group includes the slots that it shares with other groups
    of the row, so no row overflows."""
    trees = [PrefixTree(tokens, group) for group in groups]
    rows = _OpenRows(sequence_length)
    for tree in sorted(trees, key=lambda tree: -tree.num_slots):
        if tree.num_slots > sequence_length:
            _split(tree, tokens, rows)
        elif (row := rows.tightest(tree.num_slots)) is not None:
            rows.add(row, tree.sequences)
        else:
            rows.append(tree)
    return rows.trees


def _split(tree: PrefixTree, tokens: list[Int32], rows: _OpenRows) -> None:
    """Places a tree that is larger than a row, sequence by sequence in lexicographic order.

    A sequence goes to one of the last `OPEN_ROWS` rows of this tree: to the row in which the
    sequence adds the fewest slots. If the sequence adds equally many slots in several rows, the row
    with the fewest free slots is chosen. If none of the last `OPEN_ROWS` rows has enough free
    slots, the sequence goes to the row with the most free slots of all rows. If no row has enough
    free slots, the sequence goes to a new row.
    """
    window: list[int] = []
    for index in tree.sequences:
        costs = [(rows.trees[row].cost(index), rows.free(row), row) for row in window]
        fitting = [entry for entry in costs if entry[0] <= entry[1]]
        if fitting:
            rows.add(min(fitting)[2], [index])
            continue
        row = rows.emptiest(len(tokens[index]))
        if row is None:
            row = rows.append(PrefixTree(tokens))
        rows.add(row, [index])
        window = [*window, row][-OPEN_ROWS:]
