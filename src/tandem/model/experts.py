"""The experts of a mixture, with LoRA, computed as grouped matrix products. Megatron's own experts
are not used: they need TransformerEngine, or are computed one by one.

The weights of all experts are stacked [experts, out, in] and multiplied by torch's grouped matrix
product. The adapters are stacked too: A [experts, rank, in] and B [experts, out, rank]. The rows of
inputs and outputs are ordered by expert. As in `lora.py`, the gradients are computed by methods of
the layer and not by autograd.
"""

from collections.abc import Mapping

import torch
from torch import nn

from tandem.families.weight_rules import Cut
from tandem.model import gradients, parallel
from tandem.model.lora import Adapters, AdapterSwitch
from tandem.spool.schema import LoraShape

# torch's grouped product in bf16 requires that a row's size is a multiple of 16 bytes (8 elements).
_ALIGNED = 8


def grouped_product(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The product of each group of rows of `x` with the group's own matrix, [N, out].

    Args:
        x: the groups' rows, [N, in]; first the rows of group 0, then the rows of group 1, and so
            on.
        matrices: the groups' matrices, [groups, in, out], of x's dtype.
        ends: int32 [groups], one past each group's last row. The last value of `ends` is N. Groups
            may be empty.
    """
    if _on_tensor_cores(x, *matrices.shape[1:]):
        return torch.nn.functional.grouped_mm(x, matrices, offs=ends)
    return torch.cat(
        [rows @ matrix for rows, matrix in zip(x.split(_sizes(ends)), matrices, strict=True)]
    )


def grouped_outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The product `left^T right` of each group's rows, [groups, a, b]; zero for an empty group.

    Args:
        left: the left rows, [N, a]; first the rows of group 0, then the rows of group 1, and so on.
        right: the right rows, [N, b], in left's dtype and order.
        ends: int32 [groups], one past each group's last row.
    """
    if _on_tensor_cores(left, left.shape[1], right.shape[1]):
        return torch.nn.functional.grouped_mm(left.t(), right, offs=ends)
    sizes = _sizes(ends)
    return torch.stack(
        [a.t() @ b for a, b in zip(left.split(sizes), right.split(sizes), strict=True)]
    )


def _on_tensor_cores(x: torch.Tensor, *sizes: int) -> bool:
    return x.is_cuda and x.dtype is torch.bfloat16 and not any(size % _ALIGNED for size in sizes)


def _sizes(ends: torch.Tensor) -> list[int]:
    sizes: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return sizes


class ExpertLinear(Adapters):
    """One linear layer for each of this rank's experts. The weight is frozen and has adapters, or
    is trained itself. The parameters are uninitialised.

    With expert tensor parallelism, several ranks have a part of each expert. The ranks that share
    an expert have the same assignments of tokens in the same order. If several ranks share an
    expert, a rank's outputs, gradients of x and gradients of probabilities are only summands. The
    results are the sums over the ranks that share the expert. The gradients of adapters are
    complete on every rank.

    Args:
        experts: the number of experts, over all ranks.
        in_features: the number of input features, over all ranks.
        out_features: target -> the number of its output features, over all ranks.
        cut, lora, switch: as in `Adapters`.
        dtype: the dtype of weight and bias.
        bias: whether each expert has a bias.
    """

    aligned = _ALIGNED

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: Mapping[str, int],
        cut: Cut,
        lora: LoraShape | None,
        switch: AdapterSwitch,
        *,
        dtype: torch.dtype,
        bias: bool,
    ) -> None:
        topology = parallel.current()
        sizes = topology.sizes
        if cut == "rows":
            out_features = {
                target: count // sizes.expert_tensor for target, count in out_features.items()
            }
        else:
            in_features //= sizes.expert_tensor
        experts //= sizes.expert
        super().__init__(in_features, out_features, cut, lora, switch, experts=experts)
        self.topology = topology
        self.weight = nn.Parameter(
            torch.empty(experts, sum(out_features.values()), in_features, dtype=dtype)
        )
        self.bias = nn.Parameter(torch.empty(self.weight.shape[:2], dtype=dtype)) if bias else None

    def assignment_biases(self, ends: torch.Tensor, count: int) -> torch.Tensor | None:
        """The bias for each of the `count` assignments, [count, out], or None. If several ranks
        have a part of an expert and their outputs are summed, only the first of these ranks adds
        the bias. `ends`: int32 [experts]."""
        if self.bias is None or (not self.column and self.topology.place.expert_tensor):
            return None
        assignments = torch.arange(count, device=ends.device)
        return self.bias[torch.searchsorted(ends, assignments, right=True)]

    def forward(
        self, x: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the output [N, out] without bias, and A x [N, targets * rank], padded. `x` is [N,
        in], with one row per assignment. `ends`: int32 [experts], one past each expert's last
        assignment."""
        output = grouped_product(x, self.weight.transpose(1, 2), ends)
        if not self.adapted:
            return output, None
        a, b = self.cast(x.dtype)
        inner = grouped_product(x, a.transpose(1, 2), ends)
        return output.add_(grouped_product(inner, b.transpose(1, 2), ends)), inner

    def input_gradient(
        self, gradient: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradients of x, [N, in], and of A x, [N, targets * rank], from the gradient of the
        output, [N, out]. `ends` is int32 [experts]."""
        grad_x = grouped_product(gradient, self.weight, ends)
        if not self.adapted:
            return grad_x, None
        a, b = self.cast(gradient.dtype)
        grad_inner = grouped_product(gradient, b, ends)
        return grad_x.add_(grouped_product(grad_inner, a, ends)), grad_inner

    def add_gradients(
        self,
        gradient: torch.Tensor,
        grad_inner: torch.Tensor | None,
        x: torch.Tensor,
        inner: torch.Tensor | None,
        ends: torch.Tensor,
    ) -> None:
        """Add the gradients of the adapters, and of a trained weight, to their buffers.

        Args:
            gradient: the gradient of the output, [N, out].
            grad_inner: the second result of `input_gradient`, [N, targets * rank].
            x: the input of the forward pass, [N, in].
            inner: the product A x from the forward pass, [N, targets * rank].
            ends: int32 [experts].
        """
        if gradients.has_gradient_buffer(self.weight):
            gradients.add(self.weight, grouped_outer(gradient, x, ends))
        if grad_inner is None or inner is None:
            return
        grad_a = grouped_outer(grad_inner, x, ends).float()
        grad_b = grouped_outer(gradient, inner, ends).float()
        # Every rank holds one of the matrices A and B as a whole, and the gradient of this matrix
        # is summed over the ranks. One factor of the gradient (grad_inner for gate and up, A x for
        # down) is only this rank's summand.
        parallel.all_reduce(grad_a if self.column else grad_b, group=self.topology.expert_tensor)
        self._add_gradients(grad_a, grad_b)
