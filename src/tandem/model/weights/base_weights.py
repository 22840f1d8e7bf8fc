"""Fills Megatron's parameters from a Hugging Face model's files, as the family's `WeightRule`s say."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from tandem.errors import InvalidInput
from tandem.families.arch import Arch
from tandem.families.registry import weight_rules
from tandem.families.topology import Place, Sizes
from tandem.families.weight_rules import WeightRule
from tandem.model.weights.safetensors_reader import Piece, StoredTensor, fill_targets, read_headers


def load_weights(
    directory: Path, arch: Arch, parameters: Callable[[], Mapping[str, torch.Tensor]], sizes: Sizes, place: Place
) -> None:
    """Fill `parameters()`, all of the model's or some, from the directory's safetensors files.

    `parameters()`: Megatron name -> this rank's tensor, of any dtype and on any device. It is called after the files'
    headers have been checked, so its memory may be allocated meanwhile. Only the rows that hold this rank's part are
    read, and only its part goes to the device.

    Raises:
        InvalidInput: a tensor is missing, has another shape than config.json says, or a file can't be read.
        AssertionError: a parameter is not the model's, or has another shape than its rule.
    """
    rules, stored = {rule.parameter: rule for rule in weight_rules(arch)}, read_headers(_files(directory))
    for rule in rules.values():
        for name, shape in rule.sources.items():
            if name not in stored:
                other = f", only {name}_blocks: it is quantised" if f"{name}_blocks" in stored else ""
                raise InvalidInput(f"{directory} has no tensor {name}{other}", field="base_model")
            if stored[name].shape != shape:
                problem = f"{name} has the shape {list(stored[name].shape)}, config.json says {list(shape)}"
                raise InvalidInput(f"{stored[name].path}: {problem}", field="base_model")
    targets = parameters()
    for name, target in targets.items():
        assert target.shape == rules[name].shape(sizes), f"{name} is {target.shape}, not {rules[name].shape(sizes)}"
    fill_targets(
        piece
        for name, target in targets.items()
        for piece in _pieces(rules[name], [stored[source] for source in rules[name].sources], target, sizes, place)
    )


def _pieces(
    rule: WeightRule, sources: list[StoredTensor], target: torch.Tensor, sizes: Sizes, place: Place
) -> Iterator[Piece]:
    """This rank's part of each source, and the part of `target` that it fills."""
    cut = rule.parts(sizes), rule.part(place)
    if rule.experts is None:
        yield from _matrix_pieces(rule, sources, target, cut)
        return
    each, first = len(sources) // rule.experts, rule.first_expert(sizes, place)
    for expert, matrix in enumerate(target, first):
        if rule.turns is not None:
            yield _expert_piece(rule, sources[0], expert, matrix, cut)
            continue
        yield from _matrix_pieces(rule, sources[expert * each : (expert + 1) * each], matrix, cut)


def _matrix_pieces(
    rule: WeightRule, sources: list[StoredTensor], target: torch.Tensor, cut: tuple[int, int]
) -> Iterator[Piece]:
    """`cut`: how many parts the matrix has, and which is this rank's."""
    parts, part = cut
    if rule.cut == "columns" and parts > 1:
        (source,) = sources
        columns = source.shape[1]
        mine = columns // parts
        yield Piece(source, 0, columns, target, slice(part * mine, (part + 1) * mine))
        return
    parts = parts if rule.cut == "rows" else 1
    groups = max(1, rule.groups // parts)
    blocks = target.view(groups, -1, *target.shape[1:])
    begin = 0  # of the source's rows in each block
    for source in sources:
        rows, width = source.shape[0] // parts, math.prod(source.shape[1:])
        block = blocks[:, begin : begin + rows // groups]
        begin += rows // groups
        first = part * rows * width if parts > 1 else 0
        if groups == 1:
            yield Piece(source, first, width, block[0])
        else:
            yield Piece(source, first, rows // groups * width, block)


def _expert_piece(
    rule: WeightRule, source: StoredTensor, expert: int, target: torch.Tensor, cut: tuple[int, int]
) -> Piece:
    """One expert's part of a tensor that stacks all (`WeightRule.turns`); `target`: [rows] or [rows, columns]."""
    assert rule.turns is not None
    (_, *columns, rows), (parts, part) = source.shape, cut
    blocks = target.unflatten(0, (rule.turns, -1))
    blocks = blocks.permute(*reversed(range(blocks.dim())))  # [columns, rows / turns, turns], the stored order
    blocks = blocks if columns else blocks[None]
    line, mine = expert * math.prod(columns), None
    if parts > 1 and rule.cut == "rows":
        mine = slice(part * rows // parts, (part + 1) * rows // parts)
    if rule.cut == "columns":
        line += part * columns[0] // parts
    return Piece(source, line * rows, rows, blocks, mine)


def _files(directory: Path) -> list[Path]:
    """The model's safetensors files: those that the index names if there is one, else `model.safetensors`."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    try:
        if index.is_file():
            return [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidInput(f"{index} can't be read: {error}", field="base_model") from error
    if single.is_file():
        return [single]
    raise InvalidInput(f"{directory} has neither {single.name} nor {index.name}", field="base_model")
