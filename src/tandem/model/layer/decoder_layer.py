"""A decoder layer of Megatron's GPTModel whose forward and backward are ours."""

from typing import Any

import torch
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from tandem.model.attention import TreeParams
from tandem.model.layer.blocks import AttentionBlock, Keep, Kept, MlpBlock
from tandem.model.mcore import TransformerLayer


class DecoderLayer(TransformerLayer):
    """`blocks`: attention, and the MLP unless that is Megatron's mixture of experts. `keep`: see `Keep`; of a mixture
    of experts `ALL` keeps what autograd keeps, and the others nothing."""

    blocks: list[AttentionBlock | MlpBlock]
    keep = Keep.ALL

    def forward(
        self, hidden_states: torch.Tensor, *, packed_seq_params: TreeParams, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [S, 1, hidden] -> the same, and for Megatron no context."""
        x = hidden_states[:, 0]
        if torch.is_grad_enabled():
            parameters = [parameter for block in self.blocks for parameter in block.parameters()]
            x = _Blocks.apply(x, self.blocks, packed_seq_params, self.keep, *parameters)
        else:
            for block in self.blocks:
                x, _kept = block.forward(x, packed_seq_params, None)
        x = x[:, None]
        if len(self.blocks) == 2:
            return x, None
        if torch.is_grad_enabled() and self.keep < Keep.ALL:
            return checkpoint(self._mixture, x, use_reentrant=False, preserve_rng_state=False), None
        return self._mixture(x), None

    def _mixture(self, x: torch.Tensor) -> torch.Tensor:
        output, _bias = self.mlp(self.pre_mlp_layernorm(x))
        return x + output


class _Blocks(torch.autograd.Function):
    """Blocks one after the other, with their own backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, blocks: list[Any], row: TreeParams, keep: Keep, *_parameters: Parameter
    ) -> torch.Tensor:
        ctx.blocks, ctx.row, ctx.kept = blocks, row, []
        x = x.detach()
        for block in blocks:
            x, kept = block.forward(x, row, keep)
            ctx.kept.append(kept)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        kept: list[Kept] = ctx.kept
        gradient = gradient.contiguous()
        of_parameters: list[torch.Tensor] = []
        for index in reversed(range(len(kept))):
            if kept[index].x is None:
                kept[index].x = ctx.blocks[index - 1].output_again(kept[index - 1])
            gradient, more = ctx.blocks[index].backward(gradient, kept.pop(), ctx.row)
            of_parameters = [*more, *of_parameters]
        return gradient, None, None, None, *of_parameters
