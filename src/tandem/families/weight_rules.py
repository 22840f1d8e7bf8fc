"""Maps Hugging Face tensors to Megatron's parameters, and cuts the parameters over ranks."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tandem.families.arch import Arch
from tandem.topology.sizes import Place, Sizes

Cut = Literal["whole", "rows", "columns"]
"""The dimension along which a tensor is cut into equal, consecutive parts, one for each rank.
`whole`: each rank holds the whole tensor. The ranks are the tensor-parallel ranks; for experts,
they are the expert-tensor-parallel ranks."""


@dataclass(frozen=True)
class WeightRule:
    """The rule for one Megatron parameter. The parameter is made of its source tensors, stacked
    along the rows in the order of `sources`."""

    parameter: str
    sources: Mapping[str, tuple[int, ...]]  # Hugging Face name -> shape before the cut
    cut: Cut = "whole"
    # The parameter's rows are divided into `groups` blocks. Every block has an equal share of each
    # source, as Megatron's `linear_qkv` needs.
    groups: int = 1
    # If `num_experts` is not None, the parameter is [experts, rows, columns] or [experts, rows],
    # and `sources` lists the tensors of one expert after another.
    num_experts: int | None = None
    # If `interleaved` is not None, a single source of shape [experts, columns, rows] or [experts,
    # rows] stacks all experts. The parameter has `interleaved` blocks of rows, which alternate in
    # the source. If `interleaved` is 2, the source's even rows are gate and the odd rows are up. If
    # `interleaved` is None, the sources are matrices.
    interleaved: int | None = None
    # Whether the parameter is fp32, even if the other parameters are not. Only a parameter that is
    # not cut over ranks may have `fp32`.
    fp32: bool = False
    # For each source, the sizes of consecutive sections of the source's rows. The ranks cut each
    # section separately.
    sections: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The parameter's shape on each rank: [rows], [rows, columns], [experts, rows] or [experts,
        rows, columns]."""
        rows, rest = (
            sum(shape[0] for shape in self.sources.values()),
            next(iter(self.sources.values()))[1:],
        )
        if self.interleaved is not None:
            rows, rest = rows * rest[-1], rest[:-1]
        parts, experts = self.num_parts(sizes), self.num_experts
        if self.cut == "rows":
            rows //= parts
        if self.cut == "columns":
            rest = (rest[0] // parts,)
        return (
            (rows, *rest) if experts is None else (experts // sizes.expert, rows // experts, *rest)
        )

    def num_parts(self, sizes: Sizes) -> int:
        """The number of parts into which the rows or columns are cut."""
        if self.cut == "whole":
            return 1
        return sizes.tensor if self.num_experts is None else sizes.expert_tensor

    def part_number(self, place: Place) -> int:
        """The number of this rank's part, from 0."""
        if self.cut == "whole":
            return 0
        return place.tensor if self.num_experts is None else place.expert_tensor

    def first_expert(self, sizes: Sizes, place: Place) -> int:
        """The number of the first expert that this rank holds. Expert-parallel ranks hold equal,
        consecutive parts of the experts."""
        return 0 if self.num_experts is None else place.expert * (self.num_experts // sizes.expert)


def on_stage(parameter: str, arch: Arch, sizes: Sizes, stage: int) -> bool:
    """Whether a pipeline stage has the parameter of a `WeightRule`. A tied embedding table is on
    the first and on the last stage.

    Args:
        parameter: the name in the rule, where layers are counted over all stages.
        stage: the number of the pipeline stage, from 0.
    """
    if layer := re.search(r"layers\.(\d+)\.", parameter):
        return int(layer[1]) in sizes.layers(arch.num_layers, stage)
    first, last = stage == 0, stage == sizes.pipeline - 1
    return (first or (last and arch.tie_embeddings)) if parameter.startswith("embedding.") else last
