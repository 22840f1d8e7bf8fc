"""Which part of which weight a trainer's rank sends to vLLM, and in which order. Both sides compute the same list, so
only bytes travel."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tandem.families.adapter import stacked_name
from tandem.families.arch import Arch
from tandem.families.registry import weight_rules
from tandem.families.topology import Sizes, on_stage
from tandem.families.weight_rules import WeightRule


@dataclass(frozen=True)
class Part:
    """A box of a Hugging Face tensor; of experts: of the tensors of all experts, stacked along a first dimension."""

    name: str  # with `*` for an expert's number
    of: tuple[slice, ...]  # in the Hugging Face tensor; begin and end are numbers
    parameter: str  # Megatron's, in which it is
    blocks: int  # the parameter seen as [blocks, rows] or [blocks, rows, columns]
    at: tuple[slice, slice]  # in that view
    begin: int  # in each block the first row that is of this tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in self.of)

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def senders(sizes: Sizes) -> list[int]:
    """The ranks that send: the first ones of each pipeline stage."""
    return [stage * sizes.stage + rank for stage in range(sizes.pipeline) for rank in range(senders_of_stage(sizes))]


def senders_of_stage(sizes: Sizes) -> int:
    return max(sizes.tensor, sizes.experts)


def buffers(arch: Arch, targets: Collection[str] | None, *, sizes: Sizes, rank: int, most: int) -> Iterator[list[Part]]:
    """What `rank` of a trainer of these sizes sends, in lists of at most `most` elements.

    `targets`: linear layers, as in `LoraShape`; None: every tensor. Over all ranks each element is sent once.
    """
    full: list[Part] = []
    for part in parts(arch, targets, sizes=sizes, rank=rank, most=most):
        if full and sum(other.size for other in full) + part.size > most:
            yield full
            full = []
        full.append(part)
    if full:
        yield full


def layout(lists: Sequence[Sequence[Part]], dtype: str) -> list[object]:
    """What both sides must agree on: the dtype, and the elements of each buffer."""
    return [dtype, [sum(part.size for part in some) for some in lists]]


def parts(arch: Arch, targets: Collection[str] | None, *, sizes: Sizes, rank: int, most: int) -> Iterator[Part]:
    """See `buffers`. A part has more than `most` elements only if it is one row, or the rows of one head group or one
    expert."""
    place, rank = sizes.place(rank), rank % sizes.stage
    for index, rule in enumerate(weight_rules(arch)):
        ranks, cut = sizes.tensor if rule.experts is None else sizes.experts, rule.parts(sizes)
        whole = rule.cut == "whole" and index % ranks != rank
        if rank >= ranks or whole or not any(chosen(name, targets) for name in rule.sources):
            continue
        # The first stage that has it: the last one has a tied table too.
        if place.pipeline != next(s for s in range(sizes.pipeline) if on_stage(rule.parameter, arch, sizes, s)):
            continue
        cut_rows = cut if rule.cut == "rows" else 1
        blocks = max(1, rule.groups // cut_rows) if rule.experts is None else rule.experts // sizes.expert
        first_expert, begin = rule.first_expert(sizes, place), 0
        for name, shape in {stacked_name(name): shape for name, shape in rule.sources.items()}.items():
            rows = shape[0] // cut_rows // (1 if rule.experts else blocks)
            columns = tuple(slice(0, size) for size in shape[1:])
            if rule.cut == "columns":
                width = shape[1] // cut
                columns = (slice(rule.part(place) * width, (rule.part(place) + 1) * width),)
            if chosen(name, targets):
                share = shape[0] // cut_rows
                first = rule.part(place) * share if rule.cut == "rows" else 0
                yield from _cut(rule, name, columns, (blocks, begin, rows, first, first_expert), most)
            begin += rows


def chosen(name: str, targets: Collection[str] | None) -> bool:
    """Whether a tensor is the weight of a linear layer in `targets`; of None every tensor is chosen."""
    path, _, kind = name.rpartition(".")
    return targets is None or (kind == "weight" and path.rpartition(".")[2] in targets)


def _cut(
    rule: WeightRule, name: str, columns: tuple[slice, ...], place: tuple[int, int, int, int, int], most: int
) -> Iterator[Part]:
    """`place`: the parameter's blocks, where in each the source's rows begin, how many they are, which row of the
    Hugging Face tensor is the first here, and which expert."""
    blocks, begin, rows, first, expert = place
    width = math.prod(s.stop - s.start for s in columns)
    if blocks == 1 and not rule.experts:
        step = max(1, most // width)
        for row in range(0, rows, step):
            end = min(rows, row + step)
            of = (slice(first + row, first + end), *columns)
            yield Part(name, of, rule.parameter, 1, (slice(0, 1), slice(begin + row, begin + end)), begin)
        return
    step = max(1, most // (rows * width))
    for block in range(0, blocks, step):
        end = min(blocks, block + step)
        of = (slice(first + block * rows, first + end * rows), *columns)
        if rule.experts:
            of = (slice(expert + block, expert + end), slice(first, first + rows), *columns)
        yield Part(name, of, rule.parameter, blocks, (slice(block, end), slice(begin, begin + rows)), begin)
