"""A decoder layer of Megatron's GPTModel whose forward and backward are ours."""

from typing import Any

import torch
from torch.nn import Parameter

from tandem.model.attention import TreeParams
from tandem.model.layer.blocks import AttentionBlock, Keep, Kept, MlpBlock
from tandem.model.layer.moe_block import MoeBlock
from tandem.model.mcore import TransformerLayer


class DecoderLayer(TransformerLayer):
    """`blocks`: attention, and an MLP or a mixture of experts."""

    blocks: list[AttentionBlock | MlpBlock | MoeBlock]
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
        return x[:, None], None


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
