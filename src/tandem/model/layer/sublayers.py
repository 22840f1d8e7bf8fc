"""The sublayers of a decoder layer, each with its residual connection: attention, and a dense MLP.
The sublayer of a mixture of experts is in `moe_sublayer.py`.

Each sublayer computes its own backward pass from the tensors that its forward pass saved. So
`SaveLevel`, not autograd, decides what is saved. Other tensors are recomputed, with the same bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn import Parameter
from torch.nn.functional import pad

from tandem.model import gradients
from tandem.model.attention import TreeParams, attend
from tandem.model.layer import kernels
from tandem.model.layer.head_rows import HeadRows
from tandem.model.layer.heads import Heads, HeadShape
from tandem.model.layer.norm import norm_backward, normalise
from tandem.model.layer.output_gate import gated, gated_backward, join_gates, take_gates
from tandem.model.lora import LoraLinear


class SaveLevel(IntEnum):
    """How many tensors a layer saves for its backward pass, in ascending order. Each level saves
    the tensors of the lower levels too."""

    INPUT = 0  # the layer's input and the attention's output
    ATTENTION = 1  # also the MLP's input, and the attention sublayer's intermediate tensors
    ALL = 2  # also the MLP's gate and up


@dataclass
class Saved:
    """A sublayer's input, and the named tensors that are saved for the backward pass."""

    x: torch.Tensor | None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    graph: "_HeadsGraph | None" = None


class Sublayer:
    """The base class of sublayers. A sublayer normalises its input x, and adds the output to x."""

    def __init__(self, norm: Any, post_norm: Any = None) -> None:
        """`norm` normalises x; `post_norm` normalises the output before the sum; None: no norm."""
        self._norm, self._post_norm = norm, post_norm

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._norm is None else normalise(self._norm, x)

    def _add_output(
        self, linear: LoraLinear, features: torch.Tensor, x: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """x plus the output of `linear`, the sublayer's last linear layer, for the input
        `features`. The second result is A x of `linear`'s adapter."""
        if self._post_norm is None:
            return linear(features, x)
        output, inner = linear(features)
        return x + normalise(self._post_norm, output), inner

    def _post_norm_backward(
        self, gradient: torch.Tensor, linear: LoraLinear, features: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the last linear layer's output, from the gradient of `_add_output`'s
        result. The linear layer's output is recomputed if needed."""
        if self._post_norm is None:
            return gradient
        output, _inner = linear(features)
        return norm_backward(self._post_norm, gradient, output, torch.zeros_like(output))

    def _input_gradient(
        self, grad_normalised: torch.Tensor, x: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the sublayer's input. `gradient`: the gradient of the sublayer's output,
        which the residual connection passes to the input."""
        if self._norm is None:
            return grad_normalised + gradient
        return norm_backward(self._norm, grad_normalised, x, gradient)


class AttentionSublayer(Sublayer):
    """`x + W_o attention(heads(W_qkv norm(x)))`."""

    def __init__(
        self,
        norm: Any,
        qkv: LoraLinear,
        proj: LoraLinear,
        shape: HeadShape,
        *,
        windowed: bool = False,
        scale: float | None = None,
        post_norm: Any = None,
        sinks: Parameter | None = None,
        rows: HeadRows | None = None,
        rope: bool = True,
    ) -> None:
        """`windowed`: whether attention is limited to the sliding window. `scale`: see
        `Arch.attention_scale`. `sinks`: frozen, [heads]; see `Arch.sinks`. `rows`: a family's
        change of queries, keys and values before they are split into heads."""
        super().__init__(norm, post_norm)
        self._windowed, self._sinks, self._rows, self._rope = windowed, sinks, rows, rope
        self._qkv, self._proj, self._shape = qkv, proj, shape
        self._scale = shape.size**-0.5 if scale is None else scale

    def forward(
        self, x: torch.Tensor, tree: TreeParams, level: SaveLevel | None
    ) -> tuple[torch.Tensor, Saved]:
        """The output, [S, hidden], and the tensors that `backward` needs.

        Args:
            x: the sublayer's input, [S, hidden].
            level: which tensors are saved; None if there is no backward pass.
        """
        saved, tree = Saved(x), self._layer_tree(tree)
        qkv, inner, heads = self._heads(self._normalise(x), tree)
        if level is None:
            output = attend(*heads, tree, self._scale, self._sinks)
        else:
            saved.graph = _HeadsGraph()
            with saved.graph.record(
                heads, forget=level < SaveLevel.ATTENTION or tree.deal is not None
            ) as graph_heads:
                output = attend(*graph_heads, tree, self._scale, self._sinks)
            saved.tensors = {"output": output}
            if level >= SaveLevel.ATTENTION:
                saved.tensors |= {"qkv": qkv} | entry("qkv_inner", inner)
            elif self._shape.output_gate:
                saved.tensors["gates"] = take_gates(qkv, self._shape)[1]
        y, inner = self._add_output(self._proj, self._features(output, x, saved, qkv), x)
        if level is not None:
            saved.tensors |= entry("proj_inner", inner)
        return y, saved

    def recompute_output(self, saved: Saved) -> torch.Tensor:
        """The output that `forward` returned, computed again."""
        assert saved.x is not None
        features = self._features(saved.tensors["output"], saved.x, saved)
        return self._add_output(self._proj, features, saved.x)[0]

    def backward(self, gradient: torch.Tensor, saved: Saved, tree: TreeParams) -> torch.Tensor:
        """The gradient of x, [S, hidden]. Adds the parameters' gradients to their buffers.

        Args:
            gradient: the gradient of the output, [S, hidden].
            saved: the second result of `forward`; it can't be used again.
        """
        x, graph, output, tree = (
            saved.x,
            saved.graph,
            saved.tensors.pop("output"),
            self._layer_tree(tree),
        )
        assert x is not None
        assert graph is not None
        features = self._features(output, x, saved)
        grad_projected = self._post_norm_backward(gradient, self._proj, features)
        grad_output, grad_inner = self._proj.input_gradient(grad_projected)
        inner = saved.tensors.pop("proj_inner", None)
        self._proj.add_gradients(grad_projected, grad_inner, features, inner)
        del features
        normalised = self._normalise(x)
        if "qkv" in saved.tensors:
            qkv, inner = saved.tensors.pop("qkv"), saved.tensors.pop("qkv_inner", None)
            if tree.deal is not None:
                graph.restore(self._split(qkv, tree))
        else:
            qkv, inner, heads = self._heads(normalised, tree)
            graph.restore(heads)
        shape, grad_gates = self._head_shape(), None
        if shape.output_gate:
            qkv, gates = take_gates(qkv, shape)
            features = _flatten(output.detach(), self._slots(x))
            grad_output, grad_gates = gated_backward(grad_output, features, gates)
        grad_output = grad_output.view(self._slots(x), *output.shape[1:])
        if missing := len(output) - len(grad_output):
            grad_output = pad(grad_output, (0, 0, 0, 0, 0, missing))
        grad_heads = graph.gradients(output, grad_output)
        if tree.deal is not None:
            grad_heads = tree.deal.scatter(grad_heads)
        grad_normalised = self._heads_backward(grad_heads, qkv, grad_gates, normalised, inner, tree)
        return self._input_gradient(grad_normalised, x, gradient)

    def _heads_backward(
        self,
        grad_heads: Heads,
        qkv: torch.Tensor,
        grad_gates: torch.Tensor | None,
        normalised: torch.Tensor,
        inner: torch.Tensor | None,
        tree: TreeParams,
    ) -> torch.Tensor:
        """The gradient of `normalised`, from the gradients of the heads that `_heads` made. `qkv`:
        the fused rows without gates."""
        shape = self._head_shape()
        grad_qkv = self._split_backward(grad_heads, qkv, tree)
        if grad_gates is not None:
            grad_qkv = join_gates(grad_qkv, grad_gates, shape)
        grad_normalised, grad_inner = self._qkv.input_gradient(grad_qkv)
        self._qkv.add_gradients(grad_qkv, grad_inner, normalised, inner)
        return grad_normalised

    def _layer_tree(self, tree: TreeParams) -> TreeParams:
        """The row's parameters for this layer: with or without window, with or without RoPE."""
        chosen = tree.windowed if self._windowed else tree if self._rope else tree.unrotated
        assert chosen is not None
        return chosen

    def _slots(self, x: torch.Tensor) -> int:
        """The row's number of slots. With sequence parallelism, `x` has only this rank's slots."""
        return len(x) * (self._proj.group.size() if self._proj.sequence else 1)

    def _head_shape(self) -> HeadShape:
        shape = self._shape
        if not shape.offset_norms or shape.q_norm is None or shape.k_norm is None:
            return shape
        return replace(shape, q_norm=shape.q_norm.float() + 1, k_norm=shape.k_norm.float() + 1)

    def _heads(
        self, normalised: torch.Tensor, tree: TreeParams
    ) -> tuple[torch.Tensor, torch.Tensor | None, Heads]:
        """A tuple: queries, keys and values as one tensor; A x of their adapters; and the heads."""
        qkv, inner = self._qkv(normalised)
        return qkv, inner, self._split(qkv, tree)

    def _features(
        self, output: torch.Tensor, x: torch.Tensor, saved: Saved, qkv: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The input of `_proj`: the attention's output times its gates. The gates are in `qkv` if
        `qkv` is given, else in `saved`."""
        features = _flatten(output.detach(), self._slots(x))
        if not self._shape.output_gate:
            return features
        gates, qkv = saved.tensors.get("gates"), saved.tensors.get("qkv") if qkv is None else qkv
        if gates is None:
            assert qkv is not None
            _, gates = take_gates(qkv, self._shape)
        return gated(features, gates)

    def _split(self, qkv: torch.Tensor, tree: TreeParams) -> Heads:
        if self._shape.output_gate:
            qkv, _ = take_gates(qkv, self._shape)
        if self._rows is not None:
            qkv = self._rows.forward(qkv, tree)
        heads = kernels.split_heads(qkv, self._head_shape(), *tree.rotation, tree.length)
        return heads if tree.deal is None else tree.deal.gather(heads)

    def _split_backward(
        self, grad_heads: Heads, rows: torch.Tensor, tree: TreeParams
    ) -> torch.Tensor:
        """The gradient of `rows` (without gates), from the gradients of the heads that `_split`
        returned. Adds the gradients of the norms' weights to their buffers."""
        shape, qkv = self._head_shape(), rows
        if self._rows is not None:
            qkv = self._rows.forward(rows, tree)
        if self._shape.q_norm is not None and gradients.has_gradient_buffer(self._shape.q_norm):
            grad_norms = kernels.head_norm_gradients(grad_heads, qkv, self._shape, *tree.rotation)
            for weight, grad_weight in zip(
                (self._shape.q_norm, self._shape.k_norm), grad_norms, strict=True
            ):
                gradients.add(weight, grad_weight)
        grad_qkv = kernels.split_heads_backward(grad_heads, qkv, shape, *tree.rotation)
        return grad_qkv if self._rows is None else self._rows.backward(grad_qkv, rows, tree)


class MlpSublayer(Sublayer):
    """`x + W_down swiglu(W_gate_up norm(x))`."""

    def __init__(
        self,
        norm: Any,
        gate_up: LoraLinear,
        down: LoraLinear,
        *,
        activation: str = "silu",
        post_norm: Any = None,
    ) -> None:
        super().__init__(norm, post_norm)
        self._gate_up, self._down = gate_up, down
        self._activate = kernels.swiglu if activation == "silu" else kernels.geglu
        self._activate_backward = (
            kernels.swiglu_backward if activation == "silu" else kernels.geglu_backward
        )

    def forward(
        self, x: torch.Tensor, _tree: TreeParams, level: SaveLevel | None
    ) -> tuple[torch.Tensor, Saved]:
        """See `AttentionSublayer.forward`."""
        y, tensors = self.add_mlp(x, self._normalise(x), level)
        return y, Saved(x if level is not None and level >= SaveLevel.ATTENTION else None, tensors)

    def add_mlp(
        self, x: torch.Tensor, normalised: torch.Tensor, level: SaveLevel | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """x plus the MLP's output for `normalised`, both [S, hidden]; and the tensors to save."""
        gate_up, inner = self._gate_up(normalised)
        y, down_inner = self._add_output(self._down, self._activate(gate_up), x)
        tensors = entry("down_inner", down_inner)
        if level is SaveLevel.ALL:
            tensors |= {"gate_up": gate_up} | entry("inner", inner)
        return y, tensors

    def backward(self, gradient: torch.Tensor, saved: Saved, _tree: TreeParams) -> torch.Tensor:
        """See `AttentionSublayer.backward`."""
        assert saved.x is not None
        grad_normalised = self.input_gradient(gradient, self._normalise(saved.x), saved.tensors)
        return self._input_gradient(grad_normalised, saved.x, gradient)

    def input_gradient(
        self, gradient: torch.Tensor, normalised: torch.Tensor, saved: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """The gradient of `normalised`. Adds the parameters' gradients to their buffers.

        Args:
            gradient: the gradient of `add_mlp`'s output, [S, hidden].
            normalised: the input of `add_mlp`, [S, hidden].
            saved: the tensors that `add_mlp` returned; they can't be used again.
        """
        if "gate_up" in saved:
            gate_up, inner = saved.pop("gate_up"), saved.pop("inner", None)
        else:
            gate_up, inner = self._gate_up(normalised)
        grad_projected = gradient
        if self._post_norm is not None:
            grad_projected = self._post_norm_backward(gradient, self._down, self._activate(gate_up))
        grad_activated, grad_inner = self._down.input_gradient(grad_projected)
        grad_gate_up, activated = self._activate_backward(grad_activated, gate_up)
        self._down.add_gradients(
            grad_projected, grad_inner, activated, saved.pop("down_inner", None)
        )
        del grad_activated, activated, gate_up
        grad_normalised, grad_inner = self._gate_up.input_gradient(grad_gate_up)
        self._gate_up.add_gradients(grad_gate_up, grad_inner, normalised, inner)
        return grad_normalised


class _HeadsGraph:
    """Autograd's graph of the attention alone, from queries, keys and values to its output."""

    @contextmanager
    def record(self, heads: Heads, *, forget: bool) -> Iterator[Heads]:
        """Yields tensors equal to `heads`, and records the graph of the `with` block. `forget`: the
        graph does not store `heads`, so `restore` must be called before `gradients`."""
        place = {tensor.data_ptr(): index for index, tensor in enumerate(heads)}
        self._heads: Heads | None = None

        def pack(tensor: torch.Tensor) -> Any:
            index = place.get(tensor.data_ptr()) if forget else None
            # The tensor is detached, because a saved output would keep the graph alive.
            return tensor.detach() if index is None else (index, tensor.size(), tensor.stride())

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            assert self._heads is not None
            index, size, stride = packed
            return self._heads[index].as_strided(size, stride)

        with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
            graph_heads = _Enter.apply(torch.empty((), requires_grad=True), *heads)
            # Edges are stored instead of tensors, because an edge does not keep its tensor alive.
            self._edges = [get_gradient_edge(tensor) for tensor in graph_heads]
            yield graph_heads

    def restore(self, heads: Heads) -> None:
        self._heads = heads

    def gradients(self, output: torch.Tensor, gradient: torch.Tensor) -> Heads:
        """The gradients of queries, keys and values. Frees the graph."""
        q, k, v = torch.autograd.grad(output, self._edges, gradient)
        self._heads = None
        return q, k, v


class _Enter(torch.autograd.Function):
    """Returns the heads as outputs of a graph node, because a graph keeps leaf tensors alive."""

    @staticmethod
    def forward(_ctx: Any, _leaf: torch.Tensor, *heads: torch.Tensor) -> Any:
        return heads

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return None, *gradients


def _flatten(output: torch.Tensor, slots: int) -> torch.Tensor:
    """The attention's output [length, heads, size] without its padding, [slots, heads * size]."""
    return output[:slots].flatten(1)


def entry(name: str, tensor: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """A dict of the name and the tensor, for `Saved.tensors`; empty if there is no tensor."""
    return {} if tensor is None else {name: tensor}
