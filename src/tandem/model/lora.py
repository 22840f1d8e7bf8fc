"""LoRA on Megatron's parallel linear layers (Hu et al., 2021, arXiv:2106.09685): `W x + alpha / rank * B (A x)`.

Each of q, k, v, o, gate, up and down has its own A [rank, in] and B [out, rank], as PEFT has, also where Megatron fuses
the base's weights. All are fp32 and cast to the activations' dtype in use, so they are their own master weights.

Across tensor-parallel ranks:

| layer | A | B | collective |
|---|---|---|---|
| column parallel (q, k, v, gate, up) | replicated | cut along out | A x: forward none, backward sum |
| row parallel (o, down) | cut along in | replicated | A x: forward sum, backward none |

So every rank's gradient of its own tensor is complete as autograd leaves it: a replicated tensor's gradient is already
the sum over the ranks, and the same on all of them. With sequence parallelism it would not be: a column layer's input
would have to be gathered before A, a row layer's output reduce-scattered after B, and B's gradient summed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from tandem.model.mcore import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from tandem.spool.schema import LoraShape


@dataclass
class Switch:
    """Shared by all layers of one policy: is the adapter in use?"""

    on: bool = True


@dataclass(frozen=True)
class Part:
    """One of the linear layers that Megatron's layer stands for."""

    target: str  # q_proj, ...
    out_features: int  # of this rank


@dataclass(frozen=True)
class LoraTensor:
    """A trainable tensor of this rank: PEFT's, or a stack of PEFT's for all experts of a layer."""

    parameter: nn.Parameter
    cut: Literal["whole", "rows", "columns"]


Join = Callable[[list[torch.Tensor]], torch.Tensor]
"""From the parts' outputs, each [S, 1, out of the part], to the fused output [S, 1, sum]."""


class LoraLinear(nn.Module):
    """A frozen Megatron linear layer and the adapters of its parts, uninitialised; called like the layer itself."""

    def __init__(
        self,
        base: ColumnParallelLinear | RowParallelLinear,
        parts: list[Part],
        join: Join,
        lora: LoraShape,
        switch: Switch,
    ) -> None:
        super().__init__()
        self.base, self.parts, self.join = base, parts, join
        self.scale, self.rank, self.switch = lora.alpha / lora.rank, lora.rank, switch
        self.column = isinstance(base, ColumnParallelLinear)
        self.alone = base.tp_group.size() == 1
        self.targets = [part.target for part in parts if part.target in lora.targets]
        in_features = base.input_size if self.column else base.input_size_per_partition
        self.lora_a, self.lora_b = nn.ParameterDict(), nn.ParameterDict()
        for part in parts:
            if part.target not in self.targets:
                continue
            self.lora_a[part.target] = nn.Parameter(torch.empty(lora.rank, in_features))
            self.lora_b[part.target] = nn.Parameter(torch.empty(part.out_features, lora.rank))
            # Megatron's optimizer counts replicated tensors once in norms; these marks say which are not replicated.
            if self.column:
                set_tensor_model_parallel_attributes(self.lora_b[part.target], True, 0, 1)
            else:
                set_tensor_model_parallel_attributes(self.lora_a[part.target], True, 1, 1)

    def tensors(self) -> dict[tuple[str, Literal["A", "B"]], LoraTensor]:
        """(target, "A" or "B") -> tensor."""
        found: dict[tuple[str, Literal["A", "B"]], LoraTensor] = {}
        for target in self.targets:
            found[target, "A"] = LoraTensor(self.lora_a[target], "whole" if self.column else "columns")
            found[target, "B"] = LoraTensor(self.lora_b[target], "rows" if self.column else "whole")
        return found

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x: [S, 1, in] (of this rank, for a row-parallel layer) -> (output [S, 1, out], Megatron's unadded bias)."""
        output, bias = self._base(x) if self.alone else self.base(x)
        if self.targets and self.switch.on:
            output = output + self._delta(x)
        return output, bias

    def _base(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The layer's own, where no other rank has a part of it: Megatron's forward is the same product, and as much
        Python as keeps a GPU waiting."""
        output, bias = torch.nn.functional.linear(x, self.base.weight), self.base.bias
        if bias is None or self.base.skip_bias_add:
            return output, bias
        return output + bias, None

    def _delta(self, x: torch.Tensor) -> torch.Tensor:
        a = join_stacked([self.lora_a[target] for target in self.targets], dim=0).to(x.dtype)
        hidden = torch.nn.functional.linear(x, a) * self.scale
        if not self.alone:
            across = copy_to_tensor_model_parallel_region if self.column else reduce_from_tensor_model_parallel_region
            hidden = across(hidden, group=self.base.tp_group)
        per_target = dict(zip(self.targets, hidden.split(self.rank, dim=-1), strict=True))
        outputs = []
        for part in self.parts:
            if part.target in per_target:
                b = self.lora_b[part.target].to(x.dtype)
                outputs.append(torch.nn.functional.linear(per_target[part.target], b))
            else:
                outputs.append(x.new_zeros(()).expand(*x.shape[:-1], part.out_features))
        return self.join(outputs)


def join_stacked(outputs: list[torch.Tensor], dim: int = -1) -> torch.Tensor:
    """One after the other: gate, up; or a single part."""
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=dim)


def join_qkv(groups: int) -> Join:
    """Megatron's order for `groups` key heads (of this rank): each group's queries, its key, its value."""

    def join(outputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.unflatten(-1, (groups, -1)) for part in outputs], dim=-1).flatten(-2)

    return join
