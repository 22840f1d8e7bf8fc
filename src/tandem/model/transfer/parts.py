"""Computes the parts of weights that a rank of the trainer holds, and the parts that the rank sends
to vLLM. Also computes the order in which the parts are sent. Trainer and vLLM compute the same list
of parts, so only values are transferred."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

from tandem.families.adapter import in_targets, stacked_name
from tandem.families.arch import Arch
from tandem.families.registry import weight_rules
from tandem.families.weight_rules import WeightRule, on_stage
from tandem.topology.sizes import Place, Sizes


@dataclass(frozen=True)
class Part:
    """A part of a Hugging Face tensor: a range in each dimension. For experts, the tensor is all
    experts' tensors, stacked along a first dimension."""

    name: str  # The Hugging Face tensor's name, with `*` for an expert's number.
    in_tensor: tuple[slice, ...]  # The part's ranges in the tensor, each with a begin and an end.
    parameter: str  # The Megatron parameter that contains the part.
    blocks: int  # The parameter is viewed as [blocks, rows] or [blocks, rows, columns].
    # The part's ranges of blocks and rows in the viewed parameter.
    in_parameter: tuple[slice, slice]
    begin: int  # in each block, the first row that belongs to this tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in self.in_tensor)

    @property
    def size(self) -> int:
        """The number of elements of the part."""
        return math.prod(self.shape)


def senders(sizes: Sizes) -> list[int]:
    """The ranks that send: the first ranks of each pipeline stage."""
    stage_ranks = range(max(sizes.tensor, sizes.expert_ranks))
    return [stage * sizes.stage + rank for stage in range(sizes.pipeline) for rank in stage_ranks]


def buffers(
    arch: Arch, targets: Collection[str] | None, *, sizes: Sizes, rank: int, most: int
) -> Iterator[list[Part]]:
    """The parts that the rank `rank` sends, in lists of at most `most` elements. Over all ranks,
    each element is sent exactly once.

    Args:
        targets: the linear layers whose weights are sent, as in `LoraShape`; None: every tensor.
    """
    full: list[Part] = []
    for part in rank_parts(arch, targets, sizes=sizes, rank=rank, most=most):
        if full and sum(other.size for other in full) + part.size > most:
            yield full
            full = []
        full.append(part)
    if full:
        yield full


def shares(arch: Arch, *, sizes: Sizes, rank: int, most: int) -> Iterator[list[Part]]:
    """The `buffers` of all weights that `rank` writes to files. If n ranks hold the same parts,
    each of these ranks writes every n-th buffer.

    Args:
        sizes: the trainer's sizes.
        rank: the rank's number, from 0.
        most: the most elements of a list.
    """
    in_stage, different = rank % sizes.stage, math.lcm(sizes.tensor, sizes.expert_ranks)
    # The first of the ranks that hold the same parts.
    first = rank - in_stage + in_stage % different
    for number, share in enumerate(buffers(arch, None, sizes=sizes, rank=first, most=most)):
        if number % (sizes.stage // different) == in_stage // different:
            yield share


@dataclass(frozen=True)
class SendBuffer:
    """A buffer that one sender sends to all workers."""

    sender: int  # index in `senders`
    parts: list[Part]

    @property
    def size(self) -> int:
        """The number of elements of the buffer."""
        return sum(part.size for part in self.parts)


def send_order(
    arch: Arch, targets: Collection[str] | None, *, sizes: Sizes, most: int
) -> list[SendBuffer]:
    """The `buffers` of all senders, in the order in which they are sent. While one sender's buffer
    is being sent, the next sender fills its own buffer.

    Args:
        targets: linear layers, as in `LoraShape`; None: every tensor.
        sizes: the trainer's sizes.
        most: the most elements of a buffer.
    """
    lists = [buffers(arch, targets, sizes=sizes, rank=rank, most=most) for rank in senders(sizes)]
    rounds = zip_longest(*lists)
    return [
        SendBuffer(sender, parts)
        for per_sender in rounds
        for sender, parts in enumerate(per_sender)
        if parts
    ]


def agreement(order: list[SendBuffer], dtype: str) -> list[object]:
    """A list that trainer and vLLM compare: the dtype, and the sender and size of each buffer."""
    return [dtype, [[buffer.sender, buffer.size] for buffer in order]]


def rank_parts(
    arch: Arch, targets: Collection[str] | None, *, sizes: Sizes, rank: int, most: int
) -> Iterator[Part]:
    """The parts that a rank has (see `buffers`). A part has more than `most` elements only if it is
    one row, or the rows of one head group or one expert.

    Args:
        targets: linear layers, as in `LoraShape`; None: every tensor.
        sizes: the trainer's sizes.
        rank: the rank's number, from 0.
        most: the most elements of a part.
    """
    place, rank = sizes.place(rank), rank % sizes.stage
    for index, rule in enumerate(weight_rules(arch)):
        ranks = sizes.tensor if rule.num_experts is None else sizes.expert_ranks
        if rank >= ranks or (rule.cut == "whole" and index % ranks != rank):
            continue
        # A tied embedding table is on the first and on the last stage. So only the first stage that
        # has a parameter sends the parameter.
        if place.pipeline != next(
            s for s in range(sizes.pipeline) if on_stage(rule.parameter, arch, sizes, s)
        ):
            continue
        for part in rule_parts(rule, sizes, place):
            if in_targets(part.name, targets):
                yield from _cut(part, most)


def rule_parts(rule: WeightRule, sizes: Sizes, place: Place) -> Iterator[Part]:
    """The parts that a rank holds of each source of a rule.

    Args:
        rule: a rule whose tensors are not interleaved.
        sizes: the sizes of the trainer's parallel dimensions.
        place: the rank's indices in the parallel dimensions.
    """
    cut, number = rule.num_parts(sizes), rule.part_number(place)
    cut_rows = cut if rule.cut == "rows" else 1
    blocks = (
        max(1, rule.groups // cut_rows)
        if rule.num_experts is None
        else rule.num_experts // sizes.expert
    )
    begin = 0
    # The sources of the first expert represent all experts.
    for name, shape in list(rule.sources.items())[: len(rule.sources) // (rule.num_experts or 1)]:
        tensor_begin, section_begin = begin, 0
        for size in rule.sections.get(name, shape[:1]):
            share = size // cut_rows
            first = section_begin + (number * share if rule.cut == "rows" else 0)
            # The weight of a convolution, [features, 1, tokens], is treated as a matrix.
            columns = [slice(0, math.prod(shape[1:]))] if shape[1:] else []
            in_tensor = [slice(first, first + share), *columns]
            if rule.cut == "columns":
                width = shape[1] // cut
                in_tensor[1] = slice(number * width, (number + 1) * width)
            rows = share // blocks
            if rule.num_experts is not None:
                expert, rows = rule.first_expert(sizes, place), share
                in_tensor.insert(0, slice(expert, expert + blocks))
            in_parameter = (slice(0, blocks), slice(begin, begin + rows))
            box = tuple(in_tensor)
            yield Part(stacked_name(name), box, rule.parameter, blocks, in_parameter, tensor_begin)
            begin += rows
            section_begin += size


def _cut(part: Part, most: int) -> Iterator[Part]:
    """`part`, cut into parts of at most `most` elements: along the rows if there is a single block,
    else along the blocks."""
    (blocks, rows), stacked, whole = part.in_parameter, "*" in part.name, part.in_tensor[0]
    by_rows = part.blocks == 1 and not stacked
    cut = rows if by_rows else blocks
    count = cut.stop - cut.start
    unit = (whole.stop - whole.start) // count
    step = max(1, most * count // part.size)
    for begin in range(0, count, step):
        end = min(count, begin + step)
        piece = slice(cut.start + begin, cut.start + end)
        box = (slice(whole.start + begin * unit, whole.start + end * unit), *part.in_tensor[1:])
        yield replace(
            part, in_tensor=box, in_parameter=(blocks, piece) if by_rows else (piece, rows)
        )
