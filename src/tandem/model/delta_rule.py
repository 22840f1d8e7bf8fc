"""Computes the gated delta rule (Yang et al., 2024, arXiv:2412.06464) and its short convolution
over packed prefix-tree rows.

A head's state S [key size, value size] starts at zero. Each token multiplies S by exp(g), adds
`beta k (v - S^T k)^T` to S and reads `S^T q`. A token starts from the state of its parent in the
tree. Siblings in the tree start from the same state, so the gradient of this state is the sum of
the siblings' gradients.

On a GPU, the package flash-linear-attention computes the delta rule if the package is installed.
Without the package, and on the CPU, torch computes the delta rule.
"""

import functools
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

CHUNK = 64
"""The number of slots whose state updates are computed together, as matrix products."""


@dataclass(frozen=True)
class Segment:
    """Consecutive slots of the row. The slots are also consecutive tokens of each sequence that
    contains them."""

    begin: int
    end: int
    parent: int  # index of the segment that has the first token's parent; -1: no parent


@dataclass(frozen=True)
class Level:
    """Pieces of a row that can be computed together. A piece is a segment or a chunk of a segment.
    A piece's level is the number of pieces that come before it in its sequences."""

    slots: torch.Tensor  # int64; its shape is described in `Recurrence`
    # int64 [pieces]: the index of each piece's parent among the pieces of the previous level
    parents: torch.Tensor
    offsets: torch.Tensor  # int64 [pieces + 1]: the index in `slots` at which each piece begins
    host_offsets: torch.Tensor


@dataclass(frozen=True)
class Neighbours:
    """The neighbours of each slot in a causal convolution over `tokens` tokens. The convolution
    computes a slot's result from the slot and its ancestors. A slot's readers are the slots whose
    results are computed from this slot, the slot itself included.

    Attributes:
        ancestors: int64 [tokens - 1, length]. For each slot, row d has the ancestor d + 1 tokens
            earlier. The value is `length` if there is no such ancestor.
        begins: for each slot, the index in `readers` at which the slot's pairs begin, int64 [length
            + 1].
        readers: for each slot, one pair for each reader of the slot, int64 [pairs, 2]. The first
            number of a pair is the reader. The second number is a column of the weights [features,
            tokens]: for the reader's result, the slot is multiplied by this column.
    """

    ancestors: torch.Tensor
    begins: torch.Tensor
    readers: torch.Tensor


@dataclass
class Recurrence:
    """The segments of a row, through which the states of a gated delta net pass. The object's
    tensors are on the device."""

    segments: list[Segment]
    length: int  # number of slots
    device: torch.device
    _neighbours: dict[int, Neighbours] = field(default_factory=dict)

    def neighbours(self, tokens: int) -> Neighbours:
        """The `Neighbours` of a convolution over `tokens` tokens."""
        if tokens not in self._neighbours:
            self._neighbours[tokens] = self._find_neighbours(tokens)
        return self._neighbours[tokens]

    def _find_neighbours(self, tokens: int) -> Neighbours:
        before = [_ancestors(self.segments, self.length, distance) for distance in range(1, tokens)]
        own = np.arange(self.length)
        # All pairs of a slot and an earlier slot of its sequences, sorted by the earlier slot.
        earlier = np.concatenate([own, *before])
        readers = np.stack(
            [np.tile(own, tokens), np.repeat(np.arange(tokens - 1, -1, -1), self.length)], 1
        )
        order = np.argsort(earlier, kind="stable")[: np.count_nonzero(earlier < self.length)]
        begins = np.searchsorted(earlier[order], np.arange(self.length + 1))
        ancestors = np.array(before, np.int64).reshape(tokens - 1, self.length)
        found = (torch.from_numpy(x).to(self.device) for x in (ancestors, begins, readers[order]))
        return Neighbours(*found)

    @functools.cached_property
    def order(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The slots of all levels, one level after another, and each slot's place in this order:
        int64 [length] each. The result is None if the row's slots are already ordered by level."""
        order = torch.cat([level.slots for level in self.levels])
        if torch.equal(order, torch.arange(self.length, device=self.device)):
            return None
        return order, torch.argsort(order)

    @functools.cached_property
    def levels(self) -> list[Level]:
        """The levels whose pieces are segments. In a level, `slots` has the slots of the level's
        segments, one segment after another."""
        return self._levels(self.segments)

    @functools.cached_property
    def chunks(self) -> list[Level]:
        """The levels whose pieces are chunks of segments. In a level, `slots` is [chunks, CHUNK];
        entries after the end of a chunk have the value `length`."""
        chunks: list[Segment] = []
        last: list[int] = []  # segment -> its last chunk
        for segment in self.segments:
            parent = -1 if segment.parent < 0 else last[segment.parent]
            for begin in range(segment.begin, segment.end, CHUNK):
                chunks.append(Segment(begin, min(begin + CHUNK, segment.end), parent))
                parent = len(chunks) - 1
            last.append(parent)
        return self._levels(chunks, CHUNK)

    def _levels(self, pieces: Sequence[Segment], width: int | None = None) -> list[Level]:
        depths, place, members = [0] * len(pieces), [0] * len(pieces), list[list[int]]()
        for index, piece in enumerate(pieces):  # a parent comes before its children
            depth = depths[index] = 0 if piece.parent < 0 else depths[piece.parent] + 1
            if depth == len(members):
                members.append([])
            place[index] = len(members[depth])
            members[depth].append(index)
        return [self._level([pieces[i] for i in level], place, width) for level in members]

    def _level(self, pieces: list[Segment], place: list[int], width: int | None) -> Level:
        slots = [np.arange(piece.begin, piece.end) for piece in pieces]
        if width is not None:
            fill = self.length
            slots = [np.pad(s, (0, width - len(s)), constant_values=fill)[None] for s in slots]
        parents = [place[piece.parent] for piece in pieces if piece.parent >= 0]
        offsets = torch.from_numpy(np.cumsum([0, *(piece.end - piece.begin for piece in pieces)]))
        return Level(
            torch.from_numpy(np.concatenate(slots)).to(self.device),
            torch.tensor(parents, dtype=torch.int64).to(self.device),
            offsets.to(self.device),
            offsets,
        )


def recurrence(subtree_end: torch.Tensor, slots: int, device: torch.device) -> Recurrence:
    """The `Recurrence` of a row.

    Args:
        subtree_end: int [slots, or longer], on the host, as in `RowTensors`.
    """
    return Recurrence(_segments(subtree_end[:slots].cpu().numpy()), slots, device)


def _segments(ends: NDArray[np.int64]) -> list[Segment]:
    """The segments in the row's order. A new segment begins where a subtree ends or branches.
    Padding consists of trees of one slot. All padding is a single segment, because nothing is
    predicted from padding."""
    index = np.arange(1, len(ends))
    starts = np.flatnonzero((ends[1:] != ends[:-1]) | (ends[:-1] <= index)) + 1
    begins = [0, *starts.tolist()]
    segments: list[Segment] = []
    path: list[tuple[int, int]] = []  # pairs: a segment's index, the end of its subtree
    alone = False  # whether the previous segment consists of trees of one slot
    for begin, end in zip(begins, [*begins[1:], len(ends)], strict=True):
        while path and path[-1][1] <= begin:
            path.pop()
        parent = path[-1][0] if path else -1
        single = parent < 0 and int(ends[begin]) == begin + 1
        if single and alone:
            segments[-1] = Segment(segments[-1].begin, end, -1)
            continue
        path.append((len(segments), int(ends[begin])))
        segments.append(Segment(begin, end, parent))
        alone = single
    return segments


def _ancestors(segments: list[Segment], length: int, distance: int) -> NDArray[np.int64]:
    """For each slot, its ancestor `distance` tokens earlier, or `length` if there is no such
    ancestor."""
    found = np.arange(length) - distance
    for segment in segments:
        for slot in range(segment.begin, min(segment.begin + distance, segment.end)):
            found[slot] = _ancestor(segments, segment, slot, distance, length)
    return found


def _ancestor(
    segments: list[Segment], segment: Segment, slot: int, distance: int, none: int
) -> int:
    while slot - distance < segment.begin:
        if segment.parent < 0:
            return none
        distance -= slot - segment.begin + 1
        segment = segments[segment.parent]
        slot = segment.end - 1
    return slot - distance


def convolve(x: torch.Tensor, weight: torch.Tensor, row: Recurrence) -> torch.Tensor:
    """The causal convolution of each feature along its sequences, [slots, features], at least fp32.

    Args:
        x: the features of each slot, [slots, features].
        weight: the convolution's weight, [features, tokens]; the last column applies to the current
            token.
        row: the row's `Recurrence`.
    """
    weight, kernel = _wide(weight), weight.shape[1]
    wide = _wide(x)
    output, padded = wide * weight[:, -1], pad(wide, (0, 0, 0, 1))
    for distance, earlier in enumerate(row.neighbours(kernel).ancestors, 1):
        output = output + padded[earlier] * weight[:, kernel - 1 - distance]
    return output


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    row: Recurrence,
) -> torch.Tensor:
    """The value that each token reads from its state, [slots, value heads, value size], in the
    dtype of `value`.

    Args:
        query, key: the queries and keys, [slots, key heads, key size]. The function divides queries
            and keys by their norms, and then queries by the square root of the key size.
        value: the values, [slots, value heads, value size]. Each key head serves an equal number of
            value heads.
        g: the logarithm of the decay, fp32 [slots, value heads].
        beta: the factor of each token's update, fp32 [slots, value heads].
        row: the row's `Recurrence`.
    """
    if value.is_cuda and (rule := _flash_linear_attention()) is not None:
        return _by_levels(rule, query, key, value, g, beta, row)
    return _in_chunks(query, key, value, g, beta, row)


@functools.cache
def _flash_linear_attention() -> Any:
    """The kernel of flash-linear-attention, or None if the package is not installed."""
    if importlib.util.find_spec("fla") is None:
        logging.getLogger(__name__).warning(
            "flash-linear-attention is not installed: torch computes the delta rule, slowly;"
            " pip install tandem-rl[delta-nets]"
        )
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule


def _by_levels(
    rule: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    row: Recurrence,
) -> torch.Tensor:
    """The result of `delta_rule`, computed by calls of the function `rule` for one level after
    another. All segments of a level are computed together."""
    sizes = [len(level.slots) for level in row.levels]
    order = row.order
    parts = zip(
        *(_permuted(x, order).split(sizes) for x in (query, key, value, g, beta)), strict=True
    )
    outputs: list[torch.Tensor] = []
    states: torch.Tensor | None = None
    for number, (level, inputs) in enumerate(zip(row.levels, parts, strict=True), 1):
        output, states = rule(
            *(x[None] for x in inputs),
            initial_state=None if states is None else _of_parents(states, level.parents),
            output_final_state=number < len(row.levels),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=level.offsets,
            cu_seqlens_cpu=level.host_offsets,
        )
        outputs.append(output[0])
    return _permuted(torch.cat(outputs), None if order is None else order[::-1])


class _Permutation(torch.autograd.Function):
    """`x[order]`, whose backward pass is `gradient[places]`. The backward pass of torch's indexing
    would sort the indices and add, because torch does not know that each slot occurs once."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, order: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradients[0][places], None, None


def _permuted(x: torch.Tensor, order: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """`x[order[0]]`. `order` is as in `Recurrence.order`."""
    if order is None:
        return x
    result: torch.Tensor = _Permutation.apply(x, *order)
    return result


def _in_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    row: Recurrence,
) -> torch.Tensor:
    """The result of `delta_rule`, computed as in section 3.3 of Yang et al., 2024. Within a chunk,
    the updates are the solution of a triangular system of equations. Only the state passes from one
    chunk to the next."""
    slots = torch.cat([level.slots for level in row.chunks])
    repeat = value.shape[1] // key.shape[1]

    def chunked(x: torch.Tensor) -> torch.Tensor:
        """[slots, heads, ...] -> [chunks, heads, CHUNK, ...]; padding is zero."""
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded[slots].transpose(1, 2)

    q, k = (chunked(_unit(_wide(x)).repeat_interleave(repeat, 1)) for x in (query, key))
    v, decay, rate = chunked(_wide(value)), chunked(_wide(g)).cumsum(-1), chunked(_wide(beta))
    q = q * query.shape[-1] ** -0.5
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    # The mask is applied before the exponential, because the exponential would overflow without the
    # mask.
    pairwise = (decay[..., :, None] - decay[..., None, :]).masked_fill(upper, -torch.inf).exp()
    k_rate = k * rate[..., None]
    system = (k_rate @ k.transpose(-1, -2)) * pairwise
    right = torch.cat([v * rate[..., None], k_rate * decay.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, erased = solved.split([v.shape[-1], k.shape[-1]], -1)
    seen = (q @ k.transpose(-1, -2)) * pairwise
    q = q * decay.exp()[..., None]
    k = k * (decay[..., -1:] - decay).exp()[..., None]
    kept = decay[..., -1, None, None].exp()
    outputs: list[torch.Tensor] = []
    begin, states = 0, v.new_zeros(0)
    for number, level in enumerate(row.chunks):
        part = slice(begin, begin := begin + len(level.slots))
        if number == 0:
            new = written[part]
            outputs.append(seen[part] @ new)
            states = k[part].transpose(-1, -2) @ new
            continue
        states = _of_parents(states, level.parents)
        new = written[part] - erased[part] @ states
        outputs.append(q[part] @ states + seen[part] @ new)
        states = states * kept[part] + k[part].transpose(-1, -2) @ new
    flat = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
    place = slots.new_empty(row.length + 1)
    place[slots.flatten()] = torch.arange(slots.numel(), device=slots.device)
    return flat[place[: row.length]].to(value.dtype)


def _of_parents(states: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """The states at the beginning of a level's pieces. The backward pass of indexing sums the
    gradients of siblings in a fixed order."""
    return states[parents]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _unit(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(|x|^2 + 1e-6), over the last dimension."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
