"""LoRA on Megatron's parallel linear layers (Hu et al., 2021, arXiv:2106.09685): `W x + alpha / rank * B (A x)`.

Each of q, k, v, o, gate, up and down has its own A [rank, in] and B [out, rank], as in PEFT, also where Megatron fuses
the base weights. All are fp32 and cast to the activations' dtype in use, so they are their own master weights.

Across tensor-parallel ranks:

| layer | A | B | collective |
|---|---|---|---|
| column parallel (q, k, v, gate, up) | replicated | cut along out | A x: forward none, backward sum |
| row parallel (o, down) | cut along in | replicated | A x: forward sum, backward none |

So autograd leaves every rank's gradient complete: a replicated tensor's gradient is already the sum over the ranks, and
the same on all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear

from tandem.families.weight_rules import Cut
from tandem.model import mcore
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


Join = Callable[[list[torch.Tensor]], torch.Tensor]
"""From each target's output [S, 1, out of the target] to the fused output [S, 1, sum]."""


class LoraLinear(nn.Module):
    """A frozen Megatron linear layer with adapters, which are uninitialised; called like the layer itself."""

    def __init__(
        self,
        base: mcore.ColumnParallelLinear | mcore.RowParallelLinear,
        out_features: dict[str, int],
        join: Join,
        lora: LoraShape,
        switch: AdapterSwitch,
    ) -> None:
        """`out_features`: of this rank, for each target that `base` fuses, adapted or not."""
        super().__init__()
        self.base, self.out_features, self.join = base, out_features, join
        self.scale, self.rank, self.switch = lora.alpha / lora.rank, lora.rank, switch
        self.column = isinstance(base, mcore.ColumnParallelLinear)
        self.uncut = base.tp_group.size() == 1
        self.targets = [target for target in out_features if target in lora.targets]
        in_features = base.input_size if self.column else base.input_size_per_partition
        self.lora_a, self.lora_b = nn.ParameterDict(), nn.ParameterDict()
        for target in self.targets:
            self.lora_a[target] = nn.Parameter(torch.empty(lora.rank, in_features))
            self.lora_b[target] = nn.Parameter(torch.empty(out_features[target], lora.rank))
            # Megatron's optimizer counts replicated tensors once in norms; these marks say which are not replicated.
            if self.column:
                mcore.set_tensor_model_parallel_attributes(self.lora_b[target], True, 0, 1)
            else:
                mcore.set_tensor_model_parallel_attributes(self.lora_a[target], True, 1, 1)

    def lora_tensors(self) -> dict[str, tuple[LoraTensor, LoraTensor]]:
        """Adapted target -> A and B."""
        cut_a: Cut = "whole" if self.column else "columns"
        cut_b: Cut = "rows" if self.column else "whole"
        return {t: (LoraTensor(self.lora_a[t], cut_a), LoraTensor(self.lora_b[t], cut_b)) for t in self.targets}

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x: [S, 1, in] (of this rank, for a row-parallel layer) -> (output [S, 1, out], Megatron's unadded bias)."""
        output, bias = self._base(x) if self.uncut else self.base(x)
        if self.targets and self.switch.on:
            output = output + self._delta(x)
        return output, bias

    def _base(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What Megatron's forward computes where no other rank has a part of the layer. Megatron's own runs so much
        Python around that product that the GPU waits for it."""
        output, bias = linear(x, self.base.weight), self.base.bias
        if bias is None or self.base.skip_bias_add:
            return output, bias
        return output + bias, None

    def _delta(self, x: torch.Tensor) -> torch.Tensor:
        a = join_stacked([self.lora_a[target] for target in self.targets], dim=0).to(x.dtype)
        hidden = linear(x, a) * self.scale
        if not self.uncut:
            copy, reduce = mcore.copy_to_tensor_model_parallel_region, mcore.reduce_from_tensor_model_parallel_region
            hidden = (copy if self.column else reduce)(hidden, group=self.base.tp_group)
        hidden_of = dict(zip(self.targets, hidden.split(self.rank, dim=-1), strict=True))
        return self.join(
            [
                linear(hidden_of[target], self.lora_b[target].to(x.dtype))
                if target in hidden_of
                else x.new_zeros(()).expand(*x.shape[:-1], out_features)
                for target, out_features in self.out_features.items()
            ]
        )


def join_stacked(outputs: list[torch.Tensor], dim: int = -1) -> torch.Tensor:
    """One after the other: gate, up; or a single output."""
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=dim)


def join_qkv(groups: int) -> Join:
    """Megatron's order for `groups` key heads (of this rank): each group's queries, its key, its value."""

    def join(outputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([output.unflatten(-1, (groups, -1)) for output in outputs], dim=-1).flatten(-2)

    return join
