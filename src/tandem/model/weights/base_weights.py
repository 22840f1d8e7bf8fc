"""Fills Megatron's parameters from a Hugging Face model's files, by the family's `WeightRule`s."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from tandem.errors import InvalidInput
from tandem.families.arch import Arch
from tandem.families.model_config import weight_files
from tandem.families.registry import weight_rules
from tandem.families.weight_rules import WeightRule
from tandem.model.transfer.parts import Part, rule_parts
from tandem.model.weights.safetensors_reader import (
    Piece,
    StoredTensor,
    expert_by_expert,
    fill_targets,
    read_headers,
)
from tandem.topology.sizes import Place, Sizes

# The dtypes that can be read. int16 is the dtype of the remainders of fp32 master weights.
# `trainer/rank/model_checkpoint.py` reads the remainders by the same rules as weights.
_PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int16)


def load_weights(
    directory: Path,
    arch: Arch,
    parameters: Callable[[], Mapping[str, torch.Tensor]],
    sizes: Sizes,
    place: Place,
) -> None:
    """Fill all or some of the model's parameters from the directory's safetensors files. Only the
    rows that contain this rank's part are read, and only this rank's part is copied to the device.

    Args:
        parameters: a function that returns this rank's tensors by Megatron name, of any dtype and
            on any device. The function is called after the files' headers have been checked, so
            memory may be allocated during the check.
        place: this rank's place among the ranks of `sizes`.

    Raises:
        InvalidInput: a tensor is missing, is quantised, or has another shape than config.json says;
            or a file can't be read.
        AssertionError: a parameter does not belong to the model, or has another shape than its
            rule says.
    """
    rules, stored = (
        {rule.parameter: rule for rule in weight_rules(arch)},
        expert_by_expert(read_headers(weight_files(directory))),
    )
    for rule in rules.values():
        for name, shape in rule.sources.items():
            if name not in stored:
                other = (
                    f", only {name}_blocks: it is quantised" if f"{name}_blocks" in stored else ""
                )
                raise InvalidInput(f"{directory} has no tensor {name}{other}", field="base_model")
            if stored[name].shape != shape:
                problem = (
                    f"{name} has the shape {list(stored[name].shape)}, config.json says"
                    f" {list(shape)}"
                )
                raise InvalidInput(f"{stored[name].path}: {problem}", field="base_model")
            if stored[name].dtype not in _PLAIN:
                problem = (
                    f"{name} is {stored[name].dtype}: quantised weights are not built; use the"
                    " model in bfloat16"
                )
                raise InvalidInput(f"{stored[name].path}: {problem}", field="base_model")
    targets = parameters()
    for name, target in targets.items():
        assert target.shape == rules[name].shape(sizes), (
            f"{name} is {target.shape}, not {rules[name].shape(sizes)}"
        )
    fill_targets(
        piece
        for name, target in targets.items()
        for piece in _pieces(rules[name], stored, target, sizes, place)
    )


def _pieces(
    rule: WeightRule,
    stored: Mapping[str, StoredTensor],
    target: torch.Tensor,
    sizes: Sizes,
    place: Place,
) -> Iterator[Piece]:
    """The pieces that together fill `target`: this rank's part of each source of the rule."""
    if rule.interleaved is not None:
        [name] = rule.sources
        for expert, matrix in enumerate(target, rule.first_expert(sizes, place)):
            yield from _expert_pieces(
                rule, stored[name], expert, matrix, (rule.num_parts(sizes), rule.part_number(place))
            )
        return
    for part in rule_parts(rule, sizes, place):
        blocks = part_view(part, target)
        if rule.num_experts is None:
            yield _piece(
                stored[part.name], part.in_tensor, blocks if part.blocks > 1 else blocks[0]
            )
            continue
        for expert, matrix in enumerate(blocks, part.in_tensor[0].start):
            yield _piece(stored[part.name.replace("*", str(expert))], part.in_tensor[1:], matrix)


def part_view(part: Part, parameter: torch.Tensor) -> torch.Tensor:
    """The part as a view of its parameter, [blocks, rows] or [blocks, rows, columns]."""
    columns = parameter.shape[-1:] if parameter.ndim > 1 else ()
    return parameter.view(part.blocks, -1, *columns)[part.in_parameter]


def _piece(source: StoredTensor, box: tuple[slice, ...], target: torch.Tensor) -> Piece:
    """The piece that reads `box`, which is a range in each dimension of a stored tensor. The rows
    of the box fill `target`, block by block or row by row."""
    rows, *columns = box
    width = math.prod(source.shape[1:])
    unit = (rows.stop - rows.start) * width // len(target)
    cut = None if columns in ([], [slice(0, width)]) else columns[0]
    return Piece(source, rows.start * width, unit, target, cut)


def _expert_pieces(
    rule: WeightRule, source: StoredTensor, expert: int, target: torch.Tensor, cut: tuple[int, int]
) -> Iterator[Piece]:
    """The pieces that read one expert's part of a tensor that stacks all experts
    (`WeightRule.interleaved`). There is one piece per section. `target`: [rows] or [rows,
    columns]."""
    assert rule.interleaved is not None
    (_, *columns, width), (parts, part) = source.shape, cut
    [sections] = rule.sections.values() or [(width,)]
    cut_rows = parts if rule.cut == "rows" else 1
    first = 0
    for rows in target.split([size // cut_rows for size in sections]):
        blocks = rows.unflatten(0, (rule.interleaved, -1))
        # The stored order is [columns, rows / interleaved, interleaved].
        blocks = blocks.permute(*reversed(range(blocks.dim())))
        blocks = blocks if columns else blocks[None]
        line, columns_of_rank = expert * math.prod(columns), None
        if len(rows) < width:
            begin = first * cut_rows + (part * len(rows) if cut_rows > 1 else 0)
            columns_of_rank = slice(begin, begin + len(rows))
        if rule.cut == "columns":
            line += part * columns[0] // parts
        yield Piece(source, line * width, width, blocks, columns_of_rank)
        first += len(rows)
