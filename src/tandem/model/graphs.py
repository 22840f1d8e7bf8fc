"""The decoder's layers as CUDA graphs: one for the forward pass, one for the backward pass.

The host launches a layer's kernels one by one; the GPU computes those of a short row of a small
model faster than that. A graph launches all layers' kernels at once. It reads and writes the memory
of its capture, so inputs are copied there, and weights, adapters and gradients must stay in theirs.
Rows of one length have inputs of the same shapes.
"""

from typing import Any

import torch

from tandem.model.attention import TreeParams
from tandem.model.flex_attention import FlexMask


class LayerGraphs:
    """Both graphs, captured when they are made. Of one row at a time: its backward pass comes
    before the next row's forward pass."""

    def __init__(self, layers: list[Any], hidden: torch.Tensor, tree: TreeParams) -> None:
        """`hidden` and `tree`: inputs of `layers`, `DecoderLayer`s. Their memory becomes that of
        the graphs' inputs.

        Each layer has computed such a row before, so that all kernels are loaded.
        """
        self._hidden, self._tree = hidden.detach(), tree
        self._inputs = _tensors(tree)
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(self._stream):
            self._forward = self._graph()
            try:
                saved, x = [], self._hidden[:, 0]
                for layer in layers:
                    x, kept = layer.compute(x, tree, layer.save_level)
                    saved.append(kept)
            finally:
                self._forward.capture_end()
            self._output = x
            self._gradient = torch.empty_like(x)
            self._backward = self._graph()
            try:
                gradient = self._gradient
                for layer in reversed(layers):
                    gradient = layer.go_back(gradient, saved.pop(), tree)
            finally:
                self._backward.capture_end()
            self._input_gradient = gradient[:, None]
        torch.cuda.current_stream().wait_stream(self._stream)

    def __call__(self, hidden: torch.Tensor, tree: TreeParams) -> torch.Tensor:
        """hidden [S, 1, hidden] -> the same, until the next call."""
        output: torch.Tensor = _Replay.apply(
            torch.empty((), requires_grad=True), hidden, self, tree
        )
        return output

    def forward(self, hidden: torch.Tensor, tree: TreeParams) -> torch.Tensor:
        self._hidden.copy_(hidden)
        for there, tensor in zip(self._inputs, _tensors(tree), strict=True):
            there.copy_(tensor)
        self._forward.replay()
        return self._output[:, None].detach()

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        self._gradient.copy_(gradient[:, 0])
        self._backward.replay()
        return self._input_gradient

    def _graph(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _leaf: torch.Tensor, hidden: torch.Tensor, graphs: LayerGraphs, tree: TreeParams
    ) -> torch.Tensor:
        ctx.graphs = graphs
        return graphs.forward(hidden, tree)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, ctx.graphs.backward(gradient), None, None


def _tensors(tree: TreeParams) -> list[torch.Tensor]:
    """All tensors of a row's parameters, in an order that all rows share."""
    mask = list(tree.mask) if isinstance(tree.mask, FlexMask) else [tree.mask]
    reach = [tensor for tensor in tree.reach if tensor is not None]
    windowed = [] if tree.windowed is None else _tensors(tree.windowed)
    return [*mask, *tree.rotation, *reach, *windowed]
