"""LoRA on linear layers (Hu et al., 2021, arXiv:2106.09685): `W x + alpha / rank * B (A x)`.

Each of q, k, v, o, gate, up and down has its own A [rank, in] and B [out, rank], as in PEFT. Only
the base weights are fused as in Megatron. The adapters are fp32 and are cast to the activations'
dtype where a layer uses them. So the adapters themselves are the master weights.

The layers' own methods compute the gradients, without autograd. So `tandem.model.layer` decides
which tensors are saved for the gradients. Across tensor-parallel ranks:

- Column-parallel layers (q, k, v, gate, up): A is replicated, and B is cut along its outputs. The
  backward pass sums the gradient of x over the ranks, and also the gradient of `A x`.

- Row-parallel layers (o, down): A is cut along its inputs, and B is replicated. The forward pass
  sums the output over the ranks, and also `A x`.

With sequence parallelism, each rank has only its own tokens outside of column-parallel and
row-parallel layers. The input x of a column-parallel layer has only the rank's own tokens. The
output of a row-parallel layer has only the rank's own tokens, as does `A x`.

- Column-parallel layers gather x over the ranks in the forward pass. The backward pass sums the
  gradient of x over the ranks, and also the gradient of `A x`. Each rank gets the sums for its own
  tokens. The backward pass also sums A's gradient over the ranks.

- Row-parallel layers sum the output over the ranks in the forward pass, and also `A x`. Each rank
  gets the sums for its own tokens. The backward pass gathers the gradients of the output and of
  `A x`, and sums B's gradient over the ranks.

- Layers that are not cut (the layers that compute MLA's latents) compute only the rank's own
  tokens. The backward pass sums the gradients of A and B over the ranks.

So every rank's gradient is complete: a replicated tensor's gradient is the same on all ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear

from tandem.families.weight_rules import Cut
from tandem.model import gradients, parallel
from tandem.model.fp8 import Fp8Weight
from tandem.spool.schema import LoraShape


@dataclass
class AdapterSwitch:
    """Whether the adapter is in use. All layers of a policy share this object."""

    on: bool = True


@dataclass(frozen=True)
class LoraTensor:
    """A trainable tensor of this rank: a part of one PEFT tensor, or of the stacked PEFT tensors of
    a layer's experts."""

    parameter: nn.Parameter
    cut: Cut
    # Whether the tensor is [experts, rows, columns], with this rank's experts.
    stacked: bool = False
    # Sizes of the sections of the whole tensor's rows. Each section is cut separately. An empty
    # tuple stands for one section.
    sections: tuple[int, ...] = ()


class Adapters(nn.Module):
    """Uninitialised A and B for each adapted target of a weight. The weight is a matrix that fuses
    several targets, or a stack of such matrices for experts.

    The rows of a matrix are divided into `blocks` equal blocks. Each block has an equal share of
    every target's rows. In a stack, each expert's rows are one block.

    Args:
        in_features: the number of input features on this rank.
        out_features: target, adapted or not -> the number of its output features on this rank.
        cut: how the weight is divided among ranks.
        lora: the shape of the adapters; None: there are no adapters.
        switch: the switch of the policy's adapters.
        groups: the number of blocks of a matrix; Megatron's `linear_qkv` has one block per key
            head.
        experts: the number of this rank's experts; None: the weight is a matrix.
        sections: the sections of each target's rows; see `WeightRule`.
    """

    aligned = 1
    """A's rows and B's columns, over all targets, are padded with zeros until their number is a
    multiple of `aligned`."""

    def __init__(
        self,
        in_features: int,
        out_features: Mapping[str, int],
        cut: Cut,
        lora: LoraShape | None,
        switch: AdapterSwitch,
        *,
        groups: int = 1,
        experts: int | None = None,
        sections: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        super().__init__()
        self.column, self.stacked, self.switch = cut == "rows", experts is not None, switch
        self._cut = cut
        self.rank, self.scale = (lora.rank, lora.alpha / lora.rank) if lora else (0, 0.0)
        self.targets = [target for target in out_features if lora and target in lora.targets]
        self.blocks = groups if experts is None else experts
        self._sections = sections or {}
        self.block_features = {target: count // groups for target, count in out_features.items()}
        stack = () if experts is None else (experts,)
        self.lora_a, self.lora_b = nn.ParameterDict(), nn.ParameterDict()
        for target in self.targets:
            self.lora_a[target] = nn.Parameter(torch.empty(*stack, self.rank, in_features))
            self.lora_b[target] = nn.Parameter(torch.empty(*stack, out_features[target], self.rank))
        self._a, self._b = list(self.lora_a.values()), list(self.lora_b.values())
        self._columns = -(-len(self.targets) * self.rank // self.aligned) * self.aligned
        self._cast_memory: tuple[torch.Tensor, torch.Tensor] | None = None
        self._cast_is_written = False

    def lora_tensors(self) -> dict[str, tuple[LoraTensor, LoraTensor]]:
        """A mapping from each adapted target to the target's A and B."""
        cut_a: Cut = "columns" if self._cut == "columns" else "whole"
        cut_b: Cut = "rows" if self._cut == "rows" else "whole"
        return {
            target: (
                LoraTensor(a, cut_a, self.stacked),
                LoraTensor(b, cut_b, self.stacked, self._sections.get(target, ())),
            )
            for (target, a), b in zip(self.lora_a.items(), self.lora_b.values(), strict=True)
        }

    @property
    def adapted(self) -> bool:
        return bool(self.targets) and self.switch.on

    def cast(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Two padded tensors. The first tensor is A of all adapted targets, [targets * rank, in].
        The second tensor is B of all adapted targets times alpha / rank, [out, targets * rank], in
        the order of the weight's rows. For experts, the shapes are [experts, targets * rank, in]
        and [experts, out, targets * rank]. An element of the second tensor is zero if its row and
        its column belong to different targets."""
        if self._cast_memory is None:
            a, b = (self._a[0].new_zeros(shape, dtype=dtype) for shape in self.cast_shapes())
            return self._write_cast(a, b)
        if not self._cast_is_written:
            self._write_cast(*self._cast_memory)
            self._cast_is_written = True
        return self._cast_memory

    def hold(
        self, memory: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Make `cast` write its result once into `memory`, and return `memory` in each call.
        `memory`: tensors of zeros with the shapes `cast_shapes`. If `memory` is None, `cast`
        computes its result in each call. Returns the memory that was set before. While memory is
        set, the parameters must not change."""
        before, self._cast_memory, self._cast_is_written = self._cast_memory, memory, False
        return before

    def cast_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the tensors that `cast` returns."""
        stack = (self.blocks,) if self.stacked else ()
        features = sum(self.block_features.values()) * (1 if self.stacked else self.blocks)
        return (*stack, self._columns, self._a[0].shape[-1]), (*stack, features, self._columns)

    @torch.no_grad()
    def _write_cast(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch._foreach_copy_(self._target_rows(a), self._a)
        blocks = self._target_blocks(b.view(self.blocks, -1, self._columns))
        for target_b, block in zip(self._b, blocks, strict=True):
            torch.mul(target_b.view(block.shape), self.scale, out=block)
        return a, b

    def _add_gradients(self, grad_a: torch.Tensor, grad_b: torch.Tensor) -> None:
        """Add the gradients of the tensors that `cast` returns, both fp32, to the gradients of the
        parameters. `grad_b` is not yet multiplied by alpha / rank."""
        blocks = self._target_blocks(grad_b.view(self.blocks, -1, grad_b.shape[-1]))
        sums_a = [gradients.accumulator(a) for a in self._a]
        sums_b = [
            gradients.accumulator(b).view(block.shape)
            for b, block in zip(self._b, blocks, strict=True)
        ]
        torch._foreach_add_(sums_a, self._target_rows(grad_a))
        torch._foreach_add_(sums_b, blocks, alpha=self.scale)

    def _target_rows(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The rows of each target in `whole`, which is the stacked A of all targets."""
        return list(whole[..., : len(self.targets) * self.rank, :].split(self.rank, -2))

    def _target_blocks(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Views of each adapted target's own rows and columns in `whole` [blocks, sum of rows,
        columns]. Each adapted target has `rank` columns, in the order of the targets."""
        blocks: list[torch.Tensor] = []
        begin = 0
        for target, count in self.block_features.items():
            if target in self.targets:
                column = len(blocks) * self.rank
                blocks.append(whole[:, begin : begin + count, column : column + self.rank])
            begin += count
        return blocks


class LoraLinear(Adapters):
    """A linear layer. The weight is frozen and has adapters, or is trained itself. The layer is
    column parallel if the weight's rows are cut, and row parallel if the weight's columns are cut.
    The parameters are uninitialised.

    Args:
        in_features: the number of input features, over all ranks.
        out_features: target -> the number of its output features, over all ranks.
        cut, lora, switch, sections: as in `Adapters`.
        dtype: the dtype of weight and bias.
        groups: the number of blocks on this rank; see `Adapters`.
        bias: whether the layer has a bias.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Mapping[str, int],
        cut: Cut,
        lora: LoraShape | None,
        switch: AdapterSwitch,
        *,
        dtype: torch.dtype,
        groups: int = 1,
        bias: bool = False,
        sections: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        topology = parallel.current()
        parts = topology.sizes.tensor
        if cut == "rows":
            out_features = {target: count // parts for target, count in out_features.items()}
        elif cut == "columns":
            in_features //= parts
        super().__init__(
            in_features, out_features, cut, lora, switch, groups=groups, sections=sections
        )
        self.group, self._alone = topology.tensor, parts == 1 or cut == "whole"
        self._own_tokens = topology.sizes.sequence
        self.sequence = topology.sizes.sequence and cut != "whole"
        self.weight = nn.Parameter(
            torch.empty(sum(out_features.values()), in_features, dtype=dtype)
        )
        self.bias = nn.Parameter(torch.empty(len(self.weight), dtype=dtype)) if bias else None
        self.fp8: Fp8Weight | None = None
        """The quantised frozen weight, or None. If the quantised weight exists, `weight` has no
        values."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the output [S, out] plus `residual`, and A x of all targets [S, targets * rank]
        for `add_gradients`. The input x is [S, in]; in a row-parallel layer, x has only this rank's
        features."""
        if self.column and self.sequence:
            x = parallel.gather(x, self.group)
        output, inner = self._product(x), None
        if not self.column:
            output = self._sum_over_ranks(output)
            # All ranks of a row-parallel layer have the same bias, so it is added after the sum.
            if self.bias is not None:
                output += self.bias
        if self.adapted:
            a, b = self.cast(x.dtype)
            inner = linear(x, a)
            if not self.column:
                inner = self._sum_over_ranks(inner)
            output.addmm_(inner, b.t())
        # The residual is added last, because it is the largest summand. bf16 rounds a sum in
        # proportion to the sum's size.
        return (output if residual is None else output.add_(residual)), inner

    def inner(self, x: torch.Tensor) -> torch.Tensor | None:
        """The product A x of a column-parallel layer, equal to the product that `forward` returns.
        The input x is [S, in]; the result is [S, targets * rank]."""
        if not self.adapted:
            return None
        x = parallel.gather(x, self.group) if self.sequence else x
        return linear(x, self.cast(x.dtype)[0])

    def input_gradient(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradients of x and of A x, from the gradient of the output [S, out]."""
        a, b = self.cast(gradient.dtype) if self.adapted else (None, None)
        grad_inner = None if b is None else gradient @ b
        if self.sequence and not self.column:
            gradient = parallel.gather(gradient, self.group)
            grad_inner = None if grad_inner is None else parallel.gather(grad_inner, self.group)
        grad_x = gradient @ self.weight if self.fp8 is None else self.fp8.backward(gradient)
        if self.column:
            grad_x = self._sum_over_ranks(grad_x)
        if grad_inner is None or a is None:
            return grad_x, None
        if self.column:
            grad_inner = self._sum_over_ranks(grad_inner)
        return grad_x.addmm_(grad_inner, a), grad_inner

    def add_gradients(
        self,
        gradient: torch.Tensor,
        grad_inner: torch.Tensor | None,
        x: torch.Tensor,
        inner: torch.Tensor | None,
    ) -> None:
        """Add the gradients of the adapters, and of a trained weight and bias, to their buffers.
        `gradient`: [S, out]; `x`: [S, in]; `grad_inner` and `inner`: [S, targets * rank].

        Args:
            grad_inner: the second result of `input_gradient`.
            inner: the product A x from the forward pass.
        """
        if gradients.has_gradient_buffer(self.weight):
            self._add_base_gradients(gradient, x)
        if grad_inner is None or inner is None:
            return
        grad_a, grad_b = gradients.product(grad_inner, x), gradients.product(gradient, inner)
        if self._own_tokens:  # each rank's gradients are sums over its own tokens only
            if self.column or not self.sequence:
                parallel.all_reduce(grad_a, group=self.group)
            if not self.column:
                parallel.all_reduce(grad_b, group=self.group)
        self._add_gradients(grad_a, grad_b)

    def _add_base_gradients(self, gradient: torch.Tensor, x: torch.Tensor) -> None:
        if gradients.has_gradient_buffer(self.bias):
            gradients.add(self.bias, gradient.sum(0, dtype=torch.float32))
        if self.sequence and self.column:
            x = parallel.gather(x, self.group)
        elif self.sequence:
            gradient = parallel.gather(gradient, self.group)
        gradients.add_product(self.weight, gradient, x)

    def _sum_over_ranks(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of `partial` [S, features] over the ranks. With sequence parallelism, the result
        has only this rank's tokens."""
        if self._alone:
            return partial
        if self.sequence:
            return parallel.scatter_sum(partial, self.group)
        parallel.all_reduce(partial, group=self.group)
        return partial

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of `W x`, plus the bias of a column-parallel layer."""
        bias = self.bias if self.column else None
        if self.fp8 is None:
            return linear(x, self.weight, bias)
        output = self.fp8.forward(x)
        return output if bias is None else output.add_(bias)
