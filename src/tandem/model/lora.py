"""LoRA on Megatron's parallel linear layers (Hu et al., 2021, arXiv:2106.09685): `W x + alpha / rank * B (A x)`.

Each of q, k, v, o, gate, up and down has its own A [rank, in] and B [out, rank], as in PEFT, also where Megatron fuses
the base weights. All are fp32 and cast to the activations' dtype in use, so they are their own master weights.

Gradients are computed here, not by autograd, so that `tandem.model.layer` decides what is kept for them. Across
tensor-parallel ranks:

| layer | A | B | collective |
|---|---|---|---|
| column parallel (q, k, v, gate, up) | replicated | cut along out | backward sums the gradients of x and A x |
| row parallel (o, down) | cut along in | replicated | forward sums the output and A x |

With sequence parallelism a rank has a part of the tokens outside of these layers: x of a column-parallel layer, output
and A x of a row-parallel layer.

| layer | forward | backward |
|---|---|---|
| column parallel | gathers x | sums the gradients of x and A x, of its own tokens; sums A's gradient over the ranks |
| row parallel | sums output and A x, of its own tokens | gathers those of the output and A x; sums B's gradient |

So every rank's gradient is complete: a replicated tensor's gradient is the same on all ranks.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

from tandem.families.weight_rules import Cut
from tandem.model import gradients, mcore, parallel
from tandem.model.fp8 import Fp8Weight
from tandem.spool.schema import LoraShape


@dataclass
class AdapterSwitch:
    """Whether the adapter is in use; all layers of a policy share it."""

    on: bool = True


@dataclass(frozen=True)
class LoraTensor:
    """A trainable tensor of this rank: PEFT's, or PEFT's of all experts of a layer, stacked."""

    parameter: nn.Parameter
    cut: Cut
    experts: bool = False  # stacked, [experts, rows, columns]; the ranks of the experts have it


class LoraLinear(nn.Module):
    """A Megatron linear layer: frozen, with adapters, which are uninitialised; or trained itself."""

    def __init__(
        self,
        base: mcore.ColumnParallelLinear | mcore.RowParallelLinear,
        out_features: dict[str, int],
        lora: LoraShape | None,
        switch: AdapterSwitch,
        groups: int = 1,
    ) -> None:
        """`out_features`: of this rank, for each target that `base` fuses, adapted or not. `groups`: the rows of `base`
        are that many blocks, each with its share of every target's rows; Megatron's `linear_qkv` has one per key head.
        """
        super().__init__()
        self.base, self.out_features, self.groups = base, out_features, groups
        self.rank, self.switch = lora.rank if lora else 0, switch
        self.scale = lora.alpha / lora.rank if lora else 0.0
        self.column = isinstance(base, mcore.ColumnParallelLinear)
        self.group: dist.ProcessGroup = base.tp_group
        self.sequence = parallel.current().sizes.sequence
        self.fp8: Fp8Weight | None = None
        """The frozen weight, where it is quantised; `base.weight` then has no values."""
        self.targets = [target for target in out_features if lora and target in lora.targets]
        in_features = base.input_size if self.column else base.input_size_per_partition
        self.lora_a, self.lora_b = nn.ParameterDict(), nn.ParameterDict()
        for target in self.targets:
            self.lora_a[target] = nn.Parameter(torch.empty(self.rank, in_features))
            self.lora_b[target] = nn.Parameter(torch.empty(out_features[target], self.rank))

    def lora_tensors(self) -> dict[str, tuple[LoraTensor, LoraTensor]]:
        """Adapted target -> A and B."""
        cut_a: Cut = "whole" if self.column else "columns"
        cut_b: Cut = "rows" if self.column else "whole"
        return {t: (LoraTensor(self.lora_a[t], cut_a), LoraTensor(self.lora_b[t], cut_b)) for t in self.targets}

    def adapter(self) -> list[nn.Parameter]:
        """A of each adapted target, then B of each."""
        return [*self.lora_a.values(), *self.lora_b.values()]

    @property
    def adapted(self) -> bool:
        return bool(self.targets) and self.switch.on

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [S, in] (of this rank, for a row-parallel layer) -> (output [S, out], plus `residual`; A x of all targets
        [S, targets * rank], for `parameter_gradients`)."""
        if self.column and self.sequence:
            x = parallel.gather(x, self.group)
        # All ranks of a row-parallel layer have the same bias, so it is added once, after the sum.
        bias = None if self.column else self.base.bias
        if residual is not None and self.group.size() == 1 and self.fp8 is None and bias is None:
            output = torch.addmm(residual, x, self.base.weight.t())  # one pass less than the product and a sum
        else:
            output = self._product(x)
            if not self.column:
                output = self._summed(output)
            if bias is not None:
                output += bias
            if residual is not None:
                output += residual
        if not self.adapted:
            return output, None
        inner = linear(x, self._a(x.dtype))
        if not self.column:
            inner = self._summed(inner)
        return output.addmm_(inner, self._b(x.dtype).t()), inner

    def input_gradient(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """From the gradient of the output [S, out] those of x and of A x."""
        of_inner = gradient @ self._b(gradient.dtype) if self.adapted else None
        if self.sequence and not self.column:
            gradient = parallel.gather(gradient, self.group)
            of_inner = None if of_inner is None else parallel.gather(of_inner, self.group)
        of_x = gradient @ self.base.weight if self.fp8 is None else self.fp8.backward(gradient)
        if self.column:
            of_x = self._summed(of_x)
        if of_inner is None:
            return of_x, None
        if self.column:
            of_inner = self._summed(of_inner)
        return of_x.addmm_(of_inner, self._a(gradient.dtype)), of_inner

    def parameter_gradients(
        self, gradient: torch.Tensor, of_inner: torch.Tensor | None, x: torch.Tensor, inner: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """The gradients of `adapter()`, fp32. `of_inner`: from `input_gradient`; `inner`: from the forward. Adds those
        of the layer's own weight and bias to their buffers, where these are trained."""
        if gradients.wanted(self.base.weight):
            self._add_base_gradients(gradient, x)
        if of_inner is None or inner is None:
            return [torch.zeros_like(parameter) for parameter in self.adapter()]
        whole_a, of_b = gradients.product(of_inner, x), gradients.product(gradient, inner).mul_(self.scale)
        if self.sequence:  # each rank has that of its own tokens
            parallel.all_reduce(whole_a if self.column else of_b, group=self.group)
        of_a = whole_a.split(self.rank)
        parts = self._blocks(of_b.unflatten(0, (self.groups, -1)))
        return [*of_a, *(part.flatten(0, 1) for part in parts)]

    def _add_base_gradients(self, gradient: torch.Tensor, x: torch.Tensor) -> None:
        if gradients.wanted(self.base.bias):
            gradients.add(self.base.bias, gradient.sum(0, dtype=torch.float32))
        if self.sequence and self.column:
            x = parallel.gather(x, self.group)
        elif self.sequence:
            gradient = parallel.gather(gradient, self.group)
        gradients.add_product(self.base.weight, gradient, x)

    def _summed(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of [S, features]: of all tokens, or of this rank's."""
        if self.sequence:
            return parallel.scatter_sum(partial, self.group)
        parallel.all_reduce(partial, group=self.group)
        return partial

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """`W x`, with a column-parallel layer's bias: this rank's part."""
        bias = self.base.bias if self.column else None
        if self.fp8 is None:
            return linear(x, self.base.weight, bias)
        output = self.fp8.forward(x)
        return output if bias is None else output.add_(bias)

    def _a(self, dtype: torch.dtype) -> torch.Tensor:
        """A of all adapted targets, stacked: [targets * rank, in]."""
        return join_stacked(list(self.lora_a.values()), dim=0).to(dtype)

    def _b(self, dtype: torch.dtype) -> torch.Tensor:
        """alpha / rank * B of all targets, [out, targets * rank] in the order of `base`'s rows: zero where a row is of
        one target and a column of another."""
        first = next(iter(self.lora_b.values()))
        whole = first.new_zeros(
            self.groups, sum(self.out_features.values()) // self.groups, len(self.targets) * self.rank
        )
        for target, part in zip(self.targets, self._blocks(whole), strict=True):
            torch.mul(self.lora_b[target].view(part.shape), self.scale, out=part)
        return whole.flatten(0, 1).to(dtype)

    def _blocks(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Of [groups, out / groups, targets * rank], each adapted target's rows and columns."""
        rows = {target: features // self.groups for target, features in self.out_features.items()}
        return target_blocks(whole, rows, self.targets, self.rank)


def target_blocks(
    whole: torch.Tensor, rows: Mapping[str, int], adapted: Collection[str], rank: int
) -> list[torch.Tensor]:
    """Each adapted target's block of `whole` [n, sum of rows, columns], where a fused layer's B are: its own rows, and
    `rank` columns after those of the adapted targets before it. `rows`: of each target, adapted or not, in order."""
    blocks: list[torch.Tensor] = []
    begin = 0
    for target, count in rows.items():
        if target in adapted:
            column = len(blocks) * rank
            blocks.append(whole[:, begin : begin + count, column : column + rank])
        begin += count
    return blocks


def join_stacked(outputs: list[torch.Tensor], dim: int = -1) -> torch.Tensor:
    """One after the other: gate, up; or a single output."""
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=dim)
