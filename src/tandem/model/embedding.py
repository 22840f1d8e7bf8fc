"""Computes the embedding of a row's tokens, and the gradient of the embedding table if the table is
trained."""

from typing import Any

import torch

from tandem.families.arch import Arch
from tandem.model import gradients, parallel
from tandem.model.mcore import GPTModel
from tandem.model.parallel import Topology


def embed(gpt: GPTModel, tokens: torch.Tensor, arch: Arch, topology: Topology) -> torch.Tensor:
    """The tokens' embeddings: [S, 1, hidden]. With sequence parallelism, the result has only this
    rank's part of the slots, and S must be divisible by the number of tensor-parallel ranks.

    The vocabulary is cut over tensor-parallel ranks.

    Args:
        tokens: int64 [S], the same on all tensor-parallel ranks.
        arch: the architecture; its `embedding_scale` multiplies the embeddings.
    """
    # A leaf that requires a gradient makes autograd call `_Embed.backward`.
    leaf = torch.empty(
        (), requires_grad=gradients.has_gradient_buffer(gpt.embedding.word_embeddings.weight)
    )
    hidden: torch.Tensor = _Embed.apply(leaf, tokens, gpt, arch.embedding_scale, topology)
    return hidden


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        _leaf: torch.Tensor,
        tokens: torch.Tensor,
        gpt: GPTModel,
        scale: float | None,
        topology: Topology,
    ) -> torch.Tensor:
        ctx.weight, ctx.tokens, ctx.topology = (
            gpt.embedding.word_embeddings.weight,
            tokens,
            topology,
        )
        hidden: torch.Tensor = gpt.embedding(input_ids=tokens[None], position_ids=None)
        # The embedding scale is rounded to the embeddings' dtype, as in transformers and vLLM.
        ctx.scale = None if scale is None else torch.tensor(scale, dtype=hidden.dtype)
        if ctx.scale is not None:
            hidden = hidden * ctx.scale
        if topology.sizes.sequence:
            hidden = hidden.chunk(topology.sizes.tensor)[topology.place.tensor]
        return hidden

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        topology, rows = ctx.topology, len(ctx.weight)
        gradient = gradient[:, 0]
        if topology.sizes.sequence:
            gradient = parallel.gather(gradient, topology.tensor)
        if ctx.scale is not None:
            gradient = gradient * ctx.scale
        local = ctx.tokens - topology.place.tensor * rows
        here = (local >= 0) & (local < rows)
        grad_local = torch.where(here[:, None], gradient.float(), 0.0)
        # `index_put_` is deterministic on CUDA too, because torch sorts the indices.
        ctx.weight.gradient_sum.index_put_(
            (torch.where(here, local, 0),), grad_local, accumulate=True
        )
        return None, None, None, None, None
