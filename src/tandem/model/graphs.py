"""The decoder's layers as two CUDA graphs: one for the forward pass, one for the backward pass.

Without graphs, the host launches a layer's kernels one by one. The GPU computes a small model's
kernels for a short row faster than the host launches them. A graph launches the kernels of all
layers together, and computes the same bits. A graph reads and writes the same memory addresses as
during its capture. So inputs are copied to the addresses of the capture, and weights, adapters and
gradients must stay at their addresses. All rows of a job have the same length, so all inputs have
the same shapes.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from tandem.model import device
from tandem.model.attention import TreeParams
from tandem.model.device import memory
from tandem.model.flex_attention import FlexMask
from tandem.model.layer.decoder_layer import DecoderLayer
from tandem.model.logprobs import working_bytes
from tandem.model.policy import Policy
from tandem.model.recompute import LEAST_HEADROOM
from tandem.model.rows import RowTensors
from tandem.planning.memory import FIRST_CHANNEL, HEADROOM

CAPTURE = 2.0
"""The time of a capture, as the number of forward and backward passes that the host could launch
in that time. A capture must save more time than that."""
_LAG = 2e-3
"""Seconds within which a GPU that waits for the host finishes the launched work."""


class LayerGraphs:
    """The forward graph and the backward graph, captured when this object is created. The graphs
    compute one row at a time: the backward pass of a row must come before the forward pass of the
    next row."""

    def __init__(
        self,
        layers: list[DecoderLayer],
        hidden: torch.Tensor,
        tree: TreeParams,
        adapter_fixed: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Captures both graphs. Each layer must have computed a row as long as `hidden` before, so
        that all kernels are loaded.

        Args:
            hidden: the input of `layers` for one row, [S, 1, hidden]. The memory of `hidden`
                becomes the graphs' input memory.
            tree: the row's parameters. The memory of `tree`'s tensors becomes the graphs' input
                memory, too.
            adapter_fixed: the method `Policy.adapter_fixed`; each replayed forward pass casts the
                adapters again.
        """
        self._hidden, self._tree = hidden.detach(), tree
        self._inputs = _tensors(tree)
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(self._stream), ExitStack() as fixed:
            self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with self._captured(self._forward):
                fixed.enter_context(adapter_fixed())
                saved, x = [], self._hidden[:, 0]
                for layer in layers:
                    x, kept = layer.compute(x, tree, layer.save_level)
                    saved.append(kept)
            self._output = x
            self._gradient = torch.empty_like(x)
            with self._captured(self._backward):
                gradient = self._gradient
                for layer in reversed(layers):
                    gradient = layer.go_back(gradient, saved.pop(), tree)
            self._input_gradient = gradient[:, None]
        torch.cuda.current_stream().wait_stream(self._stream)

    @contextmanager
    def _captured(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        # Other threads may use the GPU during the capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()

    def __call__(self, hidden: torch.Tensor, tree: TreeParams) -> torch.Tensor:
        """The layers' output for `hidden`, both [S, 1, hidden]. The output is valid until the next
        call."""
        # A leaf tensor that requires a gradient makes autograd call `_Replay.backward`.
        leaf = torch.empty((), requires_grad=True)
        output: torch.Tensor = _Replay.apply(leaf, hidden, self, tree)
        return output

    def forward(self, hidden: torch.Tensor, tree: TreeParams) -> torch.Tensor:
        """The output of all layers. `hidden` and the result are [S, 1, hidden]."""
        self._hidden.copy_(hidden)
        for there, tensor in zip(self._inputs, _tensors(tree), strict=True):
            there.copy_(tensor)
        self._forward.replay()
        return self._output[:, None].detach()

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of `hidden`, from the gradient of `forward`'s output. Also adds the
        parameters' gradients to their buffers. `gradient` and the result are [S, 1, hidden]."""
        self._gradient.copy_(gradient[:, 0])
        self._backward.replay()
        return self._input_gradient


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
    """All tensors of a row's parameters, in the same order for every row."""
    mask = list(tree.mask) if isinstance(tree.mask, FlexMask) else [tree.mask]
    reach = [tensor for tensor in tree.reach if tensor is not None]
    windowed = [] if tree.windowed is None else _tensors(tree.windowed)
    return [*mask, *tree.rotation, *reach, *windowed]


def repeat(policy: Policy, row: RowTensors, passes: int) -> None:
    """Capture the policy's passes as CUDA graphs, if the graphs save time and there is enough
    memory. The graphs compute all further rows of the length of `row`.

    Call the function right after the backward pass of `row`, so that the allocator's peaks belong
    to the passes over this row.

    Args:
        row: the row whose backward pass has just ended. `repeat` calls `Policy.lay_out` itself.
        passes: the number of further passes over rows of this length.
    """
    # Some models are not captured, because no test shows that their graphs compute the same bits:
    # models with trained base weights, models with latent attention, and the models for which
    # `of_rows` is true. Models with delta nets are not captured, because they launch different
    # kernels for rows with different trees.
    arch = policy.arch
    of_rows = arch.wide_qk_norm or arch.value_norm or arch.query_growth or arch.rope_layers
    if not device.is_cuda() or policy.lora is None or arch.moe or arch.gdn or arch.mla or of_rows:
        return
    if policy.topology.sizes.layers_shared or passes <= CAPTURE:
        return
    if not _gpu_is_done() or not _fits(policy, len(row.item_token)):
        return
    row = policy.lay_out(row)
    with torch.no_grad():
        hidden = policy.first_hidden(row)
        tree = policy.decoder_inputs(row)["packed_seq_params"]
    if worth_capturing(passes, *_layer_seconds(policy.gpt.decoder.layers[-1], hidden, tree)):
        capture(policy, hidden, tree)


def worth_capturing(passes: int, host: float, gpu: float) -> bool:
    """Whether a capture saves time.

    Args:
        passes: the number of further passes.
        host: the seconds in which the host launches one pass, or a fraction of a pass.
        gpu: the seconds in which the GPU computes one pass, or the same fraction of a pass.
    """
    return passes * (host - gpu) > CAPTURE * host


def capture(policy: Policy, hidden: torch.Tensor, tree: TreeParams) -> None:
    """Capture the policy's passes as graphs. If the capture fails, the host still launches each
    kernel.

    Args:
        hidden: the input of the first layer, [S, 1, hidden].
        tree: the parameters of the row that `hidden` belongs to.
    """
    # The graphs need as much memory as the earlier passes took. So the unused memory of these
    # passes is released.
    memory.release_cached()
    layers = list(policy.gpt.decoder.layers)
    failed = None
    try:
        policy.layer_graphs = LayerGraphs(layers, hidden, tree, policy.adapter_fixed)
    except RuntimeError as error:  # torch.OutOfMemoryError, or an error of CUDA
        failed = f"no CUDA graphs, the host launches each kernel: {error}"
    # The warning comes after the `except` block, because the error object keeps the tensors of its
    # stack frames alive.
    if failed is not None:
        warnings.warn(failed, stacklevel=2)
        memory.release_cached()


def drop(policy: Policy) -> bool:
    """Free the graphs and their memory. Returns False if there are no graphs."""
    if policy.layer_graphs is None:
        return False
    policy.layer_graphs = None
    memory.release_cached()
    return True


def _gpu_is_done() -> bool:
    """Whether the GPU has finished the launched work, or finishes it within `_LAG` seconds. A GPU
    that needs more than `_LAG` seconds is the bottleneck, so graphs would save no time."""
    stream, end = torch.cuda.current_stream(), time.perf_counter() + _LAG
    while not stream.query():
        if time.perf_counter() > end:
            return False
    return True


def _fits(policy: Policy, items: int) -> bool:
    """Whether there is enough memory for the graphs. Graphs keep the memory of the passes. So this
    memory must fit beside the memory that is allocated between passes."""
    stats, most = memory.stats(), memory.obtainable()
    adapter = sum(parameter.nbytes for parameter in policy.lora_parameters().values())
    # `between` is the larger of two sizes: the softmax's memory, and the memory of Adam's state.
    between = max(working_bytes(items, policy.head), 2 * adapter)
    if policy.topology.sizes.data > 1:
        between += FIRST_CHANNEL  # NCCL's memory, which NCCL may not have allocated yet
    headroom = max(HEADROOM * most, LEAST_HEADROOM)
    return stats["allocated_peak"] + between + headroom < most


def _layer_seconds(
    layer: DecoderLayer, hidden: torch.Tensor, tree: TreeParams
) -> tuple[float, float]:
    """Two durations in seconds: the host's time to launch the passes of one layer, and the GPU's
    time to compute these passes. The GPU is idle before the measurement. The measurement adds zeros
    to the parameters' gradients."""

    @torch.no_grad()
    def passes() -> float:
        begin = time.perf_counter()
        x, saved = layer.compute(hidden[:, 0], tree, layer.save_level)
        layer.go_back(torch.zeros_like(x), saved, tree)
        return time.perf_counter() - begin

    host = passes()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The GPU sleeps until all kernels are launched, so that the GPU computes the kernels without
    # gaps. No GPU runs at more than 2e9 cycles per second.
    torch.cuda._sleep(int(2 * host * 2e9))
    begin.record()
    passes()
    end.record()
    end.synchronize()
    return host, begin.elapsed_time(end) / 1000
