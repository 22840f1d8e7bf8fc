"""How Megatron's parameters are made of Hugging Face tensors and cut over tensor-parallel ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tandem.errors import InvalidInput
from tandem.families.arch import Arch

Cut = Literal["whole", "rows", "columns"]
"""The dimension along which tensor-parallel ranks hold equal consecutive parts; `whole`: each rank holds all."""


@dataclass(frozen=True)
class WeightRule:
    """One Megatron parameter: its sources stacked along the rows, in order."""

    parameter: str
    sources: Mapping[str, tuple[int, ...]]  # Hugging Face name -> uncut shape
    cut: Cut = "whole"
    groups: int = 1  # blocks of rows, each with its share of every source; for Megatron's `linear_qkv`
    experts: int | None = None  # stacked [experts, rows, columns]; the sources come expert by expert

    def shape(self, tp: int) -> tuple[int, ...]:
        """The parameter's shape on each of `tp` ranks: [rows], [rows, columns] or [experts, rows, columns]."""
        rows, rest = sum(shape[0] for shape in self.sources.values()), next(iter(self.sources.values()))[1:]
        if self.cut == "rows":
            rows //= tp
        if self.cut == "columns":
            rest = (rest[0] // tp,)
        return (rows, *rest) if self.experts is None else (self.experts, rows // self.experts, *rest)


def check_cut(arch: Arch, tp: int) -> None:
    """Raise InvalidInput if the model can't be cut over `tp` tensor-parallel ranks."""
    for parts, size in (
        ("key/value heads", arch.num_kv_heads),
        ("MLP features", arch.ffn_hidden_size),
        ("vocabulary entries", arch.vocab_size),
    ):
        if size % tp:
            raise InvalidInput(f"{size} {parts} don't divide over {tp} tensor-parallel ranks", field="tensor_parallel")
    if arch.moe and tp > 1:
        problem = f"Tandem can't cut {arch.model_type} over {tp} tensor-parallel ranks yet"
        remedy = "set TANDEM_TENSOR_PARALLEL=1 and use the GPUs for data parallelism"
        raise InvalidInput(f"{problem}; {remedy}", field="tensor_parallel")
