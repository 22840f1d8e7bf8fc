"""Finds the place of each Hugging Face tensor in the parameters of vLLM's model on this worker.

vLLM fuses the projections q, k and v of a layer into one parameter, and the projections gate and up
into another. For a mixture of experts, `w13_weight` contains gate and up of all experts of a layer,
and `w2_weight` contains down of all experts. The parameters are cut over vLLM's tensor-parallel
workers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

_UNQUANTISED = (
    "UnquantizedLinearMethod",
    "UnquantizedEmbeddingMethod",
    "UnquantizedFusedMoEMethod",
)


class CannotWrite(Exception):
    """The weights of this model can't be replaced in place. The error's message names the layer."""


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of one Hugging Face tensor, and its place in a parameter of vLLM. For experts,
    the same rectangle of every expert's tensor is stacked in one parameter.

    `names` has the tensor's name. For experts, `names` has one name for each index of the
    parameter's first dimension.
    """

    parameter: str
    names: tuple[str, ...]
    in_parameter: tuple[slice, ...]  # place in the parameter; for experts, in each expert's matrix
    in_tensor: tuple[slice, ...]  # place in the Hugging Face tensor
    stacked: bool = False

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """The rectangle's values in `parameter`, or in a copy of the parameter: [names, rows,
        columns], or [names, rows] for a vector."""
        if self.stacked:
            return parameter[(slice(None), *self.in_parameter)]
        return parameter[self.in_parameter].unsqueeze(0)


def weight_layout(model: torch.nn.Module) -> list[Rectangle]:
    """The rectangles of all tensors of the checkpoint, as far as they are on this worker, in the
    order of the model's modules.

    Raises CannotWrite for quantised weights, for experts that are distributed over workers, and for
    unknown fused layers. Raises CannotWrite if vLLM has removed a parameter, or if a parameter's
    place in the checkpoint is unknown.
    """
    # `named_parameters` lists each parameter once. A tied lm_head is the same parameter as the
    # embedding, and is therefore not listed a second time.
    parameters = dict(model.named_parameters())
    rectangles = [
        rectangle
        for path, module in model.named_modules()
        for rectangle in _rectangles(path, module)
        if rectangle.parameter in parameters
    ]
    if unknown := parameters.keys() - {rectangle.parameter for rectangle in rectangles}:
        raise CannotWrite(f"vLLM's parameter {min(unknown)} has no known place in a checkpoint")
    return rectangles


def _rectangles(path: str, module: Any) -> Iterator[Rectangle]:
    parameters = dict(module.named_parameters(recurse=False))
    if not parameters:
        return
    method = getattr(module, "quant_method", None)
    if method is not None and type(method).__name__ not in _UNQUANTISED:
        raise CannotWrite(f"{path} is quantised ({type(method).__name__})")
    for name, value in parameters.items():
        if value.numel() == 0:
            raise CannotWrite(f"vLLM has packed {path}.{name} into a layout of its own")
    if "w13_weight" in parameters:
        yield from _experts(path, module)
        return
    for name, value in parameters.items():
        columns_at = columns_of = (slice(None),) * (value.ndim - 1)
        if type(module).__name__ == "RowParallelLinear" and name == "weight":
            width = value.shape[1]
            columns_of = (slice(module.tp_rank * width, (module.tp_rank + 1) * width),)
        for source, at, of in _rows(path, module, value.shape[0]):
            yield Rectangle(
                f"{path}.{name}", (f"{source}.{name}",), (at, *columns_at), (of, *columns_of)
            )


def _rows(path: str, module: Any, length: int) -> Iterator[tuple[str, slice, slice]]:
    """The Hugging Face tensors whose rows are in the parameter. Yields for each tensor its path,
    the range of its rows in the parameter, and the range of the same rows in the tensor."""
    parent, _, name = path.rpartition(".")
    match type(module).__name__:
        case "QKVParallelLinear":
            size, kv_rank = module.head_size, module.tp_rank // module.num_kv_head_replicas
            queries, keys = module.num_heads * size, module.num_kv_heads * size
            parts = [
                ("q_proj", queries, module.tp_rank),
                ("k_proj", keys, kv_rank),
                ("v_proj", keys, kv_rank),
            ]
        case "MergedColumnParallelLinear":
            if name != "gate_up_proj":
                raise CannotWrite(f"{path} is fused from layers that Tandem does not know")
            half = length // 2
            parts = [("gate_proj", half, module.tp_rank), ("up_proj", half, module.tp_rank)]
        case "ColumnParallelLinear":
            parts = [(name, length, module.tp_rank)]
        case "VocabParallelEmbedding" | "ParallelLMHead":
            shard = module.shard_indices
            begin, end = shard.org_vocab_start_index, shard.org_vocab_end_index
            # the range ends before vLLM's padding of the vocabulary
            yield path, slice(0, end - begin), slice(begin, end)
            return
        case _:
            # A row-parallel layer, a router or a norm is not cut by rows.
            yield path, slice(None), slice(None)
            return
    begin = 0
    for source, rows, rank in parts:
        yield (
            f"{parent}.{source}",
            slice(begin, begin + rows),
            slice(rank * rows, (rank + 1) * rows),
        )
        begin += rows


def _experts(path: str, module: Any) -> Iterator[Rectangle]:
    parallel = module.moe_config.moe_parallel_config
    if parallel.use_ep or parallel.dp_size > 1:
        raise CannotWrite(
            f"{path}: the experts are distributed over workers (expert or data parallelism)"
        )
    experts, width, _ = module.w13_weight.shape
    half, prefix = width // 2, path[: path.index(".experts") + len(".experts")]
    mine = slice(parallel.tp_rank * half, (parallel.tp_rank + 1) * half)
    for source, at in (("gate_proj", slice(0, half)), ("up_proj", slice(half, width))):
        names = tuple(f"{prefix}.{expert}.{source}.weight" for expert in range(experts))
        yield Rectangle(
            f"{path}.w13_weight", names, (at, slice(None)), (mine, slice(None)), stacked=True
        )
    names = tuple(f"{prefix}.{expert}.down_proj.weight" for expert in range(experts))
    yield Rectangle(
        f"{path}.w2_weight", names, (slice(None),) * 2, (slice(None), mine), stacked=True
    )
