"""A mixture's experts with LoRA. Megatron's need TransformerEngine or run one by one.

The weights of all experts are stacked [experts, out, in] and multiplied by torch's grouped matrix product. The
adapters are stacked too: A [experts, rank, in] and B [experts, out, rank]. Rows are ordered by expert. As in `lora.py`,
gradients are computed here, not by autograd.
"""

from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import pad

from tandem.families.weight_rules import Cut
from tandem.model import gradients, parallel
from tandem.model.lora import AdapterSwitch, LoraTensor, join_stacked, target_blocks
from tandem.model.mcore import MegatronModule, TransformerConfig
from tandem.spool.schema import LoraShape

Part = Literal["gate_up", "down"]
_CUTS: dict[Part, tuple[Cut, Cut]] = {"gate_up": ("whole", "rows"), "down": ("columns", "whole")}
"""How A and B are cut over expert-tensor-parallel ranks."""
_ALIGNED = 8  # elements; in bf16 torch's grouped product takes only rows of whole 16 bytes


def grouped_product(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each group of rows of `x` times its own matrix: [N, in] -> [N, out].

    Args:
        x: rows of group 0 first, then those of group 1, ...
        matrices: [groups, in, out], of x's dtype.
        ends: int32 [groups], one past each group's last row; the last is N. Groups may be empty.
    """
    if _on_tensor_cores(x, *matrices.shape[1:]):
        return torch.nn.functional.grouped_mm(x, matrices, offs=ends)
    return torch.cat([rows @ matrix for rows, matrix in zip(x.split(_sizes(ends)), matrices, strict=True)])


def grouped_outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`left^T right` of each group's rows: [N, a] and [N, b] -> [groups, a, b], zero for an empty group."""
    if _on_tensor_cores(left, left.shape[1], right.shape[1]):
        return torch.nn.functional.grouped_mm(left.t(), right, offs=ends)
    sizes = _sizes(ends)
    return torch.stack([a.t() @ b for a, b in zip(left.split(sizes), right.split(sizes), strict=True)])


def _on_tensor_cores(x: torch.Tensor, *sizes: int) -> bool:
    return x.is_cuda and x.dtype is torch.bfloat16 and not any(size % _ALIGNED for size in sizes)


def _sizes(ends: torch.Tensor) -> list[int]:
    sizes: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return sizes


class Experts(MegatronModule):
    """The weights of a layer's experts: of this rank's, and its part of their features. A part is two projections, gate
    and up, or one, down.

    Ranks that cut the same experts (ETP) have the same rows in the same order. Outputs, gradients of rows and gradients
    of probabilities are then this rank's summands; gradients of adapters are complete.
    """

    def __init__(self, _num_experts: int, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config=config)
        topology, hidden, dtype = parallel.current(), config.hidden_size, config.params_dtype
        num_experts = config.num_moe_experts // topology.sizes.expert
        ffn = config.moe_ffn_hidden_size // topology.sizes.expert_tensor
        self.topology = topology
        self.fc1 = nn.Parameter(torch.empty(num_experts, 2 * ffn, hidden, dtype=dtype))  # gate, then up
        self.fc2 = nn.Parameter(torch.empty(num_experts, hidden, ffn, dtype=dtype))
        self.bias1: nn.Parameter | None = None  # [experts, 2 * ffn]
        self.bias2: nn.Parameter | None = None  # [experts, hidden], on all ranks that cut an expert
        self.features: dict[Part, dict[str, tuple[int, int]]] = {
            "gate_up": {"gate_proj": (hidden, ffn), "up_proj": (hidden, ffn)},
            "down": {"down_proj": (ffn, hidden)},
        }
        self.lora_a, self.lora_b = nn.ParameterDict(), nn.ParameterDict()
        self.switch, self.rank, self.scale = AdapterSwitch(), 0, 0.0

    def add_biases(self) -> None:
        """Add frozen biases to both parts, uninitialised."""
        self.bias1, self.bias2 = (
            nn.Parameter(weight.new_empty(weight.shape[:2]), requires_grad=False) for weight in (self.fc1, self.fc2)
        )

    def add_adapters(self, lora: LoraShape, switch: AdapterSwitch) -> None:
        """Add the adapters of the targets that `lora` names, uninitialised."""
        self.switch, self.rank, self.scale = switch, lora.rank, lora.alpha / lora.rank
        experts = len(self.fc1)
        for projections in self.features.values():
            for target, (in_features, out_features) in projections.items():
                if target in lora.targets:
                    self.lora_a[target] = nn.Parameter(torch.empty(experts, lora.rank, in_features))
                    self.lora_b[target] = nn.Parameter(torch.empty(experts, out_features, lora.rank))

    def lora_tensors(self) -> dict[str, tuple[LoraTensor, LoraTensor]]:
        """Adapted target -> A and B of all experts."""
        tensors = {}
        for target in self.lora_a:
            cut_a, cut_b = _CUTS["down" if target in self.features["down"] else "gate_up"]
            a, b = self.lora_a[target], self.lora_b[target]
            tensors[target] = LoraTensor(a, cut_a, experts=True), LoraTensor(b, cut_b, experts=True)
        return tensors

    def adapter(self, part: Part) -> list[nn.Parameter]:
        """A of each adapted target, then B of each."""
        targets = self._targets(part)
        return [*(self.lora_a[target] for target in targets), *(self.lora_b[target] for target in targets)]

    def row_biases(self, part: Part, ends: torch.Tensor, rows: int) -> torch.Tensor | None:
        """The bias of each of the `rows` rows, or None. Where ranks cut an expert and their outputs are summed, only
        the first has one."""
        bias = self.bias1 if part == "gate_up" else self.bias2
        if bias is None or (part == "down" and self.topology.place.expert_tensor):
            return None
        row = torch.arange(rows, device=ends.device)
        return bias[torch.searchsorted(ends, row, right=True)]

    def product(self, part: Part, rows: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows [N, in], whose groups end at `ends` -> (output [N, out]; A x [N, targets * rank], padded)."""
        output = grouped_product(rows, self._weight(part).transpose(1, 2), ends)
        if not self._adapted(part):
            return output, None
        inner = grouped_product(rows, self._a(part, rows.dtype).transpose(1, 2), ends)
        return output.add_(grouped_product(inner, self._b(part, rows.dtype).transpose(1, 2), ends)), inner

    def input_gradient(
        self, part: Part, gradient: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """From the gradient of the output, those of the rows and of A x."""
        of_rows = grouped_product(gradient, self._weight(part), ends)
        if not self._adapted(part):
            return of_rows, None
        of_inner = grouped_product(gradient, self._b(part, gradient.dtype), ends)
        return of_rows.add_(grouped_product(of_inner, self._a(part, gradient.dtype), ends)), of_inner

    def parameter_gradients(
        self, part: Part, gradient: torch.Tensor, of_inner: torch.Tensor | None, rows: torch.Tensor,
        inner: torch.Tensor | None, ends: torch.Tensor,
    ) -> list[torch.Tensor]:  # fmt: skip
        """The gradients of `adapter(part)`, fp32. Adds the weight's to its buffer, where it is trained."""
        if gradients.wanted(self._weight(part)):
            gradients.add(self._weight(part), grouped_outer(gradient, rows, ends))
        if of_inner is None or inner is None:
            return [torch.zeros_like(parameter) for parameter in self.adapter(part)]
        targets = self._targets(part)
        whole_a = grouped_outer(of_inner, rows, ends).float()
        of_b = grouped_outer(gradient, inner, ends).float().mul_(self.scale)
        # The tensor that all ranks have whole; of_inner of gate and up, and A x of down, are this rank's summands.
        parallel.all_reduce(whole_a if part == "gate_up" else of_b, group=self.topology.expert_tensor)
        of_a = whole_a[:, : len(targets) * self.rank].split(self.rank, 1)
        return [*of_a, *self._blocks(part, of_b)]

    def _weight(self, part: Part) -> nn.Parameter:
        return self.fc1 if part == "gate_up" else self.fc2

    def _targets(self, part: Part) -> list[str]:
        return [target for target in self.features[part] if target in self.lora_a]

    def _adapted(self, part: Part) -> bool:
        return self.switch.on and bool(self._targets(part))

    def _a(self, part: Part, dtype: torch.dtype) -> torch.Tensor:
        """A of the part's adapted targets: [experts, targets * rank, in], padded to whole 16 bytes."""
        whole = join_stacked([self.lora_a[target] for target in self._targets(part)], dim=1)
        return pad(whole, (0, 0, 0, -whole.shape[1] % _ALIGNED)).to(dtype)

    def _b(self, part: Part, dtype: torch.dtype) -> torch.Tensor:
        """alpha / rank * B: [experts, out, targets * rank], padded likewise; zero where a row is of one target and a
        column of another."""
        targets, experts = self._targets(part), len(self.fc1)
        columns = len(targets) * self.rank
        rows = sum(out_features for _, out_features in self.features[part].values())
        whole = self.lora_b[targets[0]].new_zeros(experts, rows, columns + -columns % _ALIGNED)
        for target, block in zip(targets, self._blocks(part, whole), strict=True):
            torch.mul(self.lora_b[target], self.scale, out=block)
        return whole.to(dtype)

    def _blocks(self, part: Part, whole: torch.Tensor) -> list[torch.Tensor]:
        """Of [experts, out, columns], each adapted target's rows and columns."""
        rows = {target: out_features for target, (_, out_features) in self.features[part].items()}
        return target_blocks(whole, rows, self.lora_a.keys(), self.rank)
