"""The blocks of a decoder layer, each with its residual connection: attention, and a dense MLP (or
`moe_block.py`).

Each computes its own backward pass, from what its forward kept. So what is kept is a choice
(`Keep`), not autograd's, and what was not kept is computed again, to the same bits.
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
from tandem.model.layer.heads import Heads, HeadShape
from tandem.model.layer.norm import multiplier
from tandem.model.lora import LoraLinear


class Keep(IntEnum):
    """What a layer keeps for its backward pass, from little to much. Each level keeps what those
    before it keep."""

    INPUT = 0  # the layer's input and the attention's output
    ATTENTION = 1  # the MLP's input, and what the attention block computes
    ALL = 2  # gate and up


@dataclass
class Kept:
    """What a block's forward keeps for its backward: the block's input, and tensors by name."""

    x: torch.Tensor | None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    graph: "_HeadsGraph | None" = None


class Block:
    """What all blocks do: they normalise their input, and add it to their output."""

    def __init__(self, norm: Any, post_norm: Any = None) -> None:
        """`post_norm`: of the output before it is added; or None."""
        self._norm, self._post_norm = norm, post_norm

    def _normalised(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(x, multiplier(self._norm), self._norm.eps)

    def _added(
        self, linear: LoraLinear, features: torch.Tensor, x: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """x plus the block's last linear layer of `features`; and the layer's A x."""
        if self._post_norm is None:
            return linear(features, x)
        output, inner = linear(features)
        return x + kernels.rms_norm(output, multiplier(self._post_norm), self._post_norm.eps), inner

    def _unnormalised(
        self, gradient: torch.Tensor, linear: LoraLinear, features: torch.Tensor
    ) -> torch.Tensor:
        """From the gradient of `_added`, that of the linear layer's output, which is computed again
        if needed."""
        if self._post_norm is None:
            return gradient
        output, _inner = linear(features)
        _add_norm_gradient(self._post_norm, gradient, output)
        zero = torch.zeros_like(output)
        return kernels.rms_norm_backward(
            gradient, output, multiplier(self._post_norm), self._post_norm.eps, zero
        )

    def _input_gradient(
        self, of_normalised: torch.Tensor, x: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor:
        """`gradient`: of the block's output, and so of the input that was added to it."""
        _add_norm_gradient(self._norm, of_normalised, x)
        return kernels.rms_norm_backward(
            of_normalised, x, multiplier(self._norm), self._norm.eps, gradient
        )


class AttentionBlock(Block):
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
    ) -> None:
        """`windowed`: attention reaches only the row's sliding window back. `scale`: see
        `Arch.attention_scale`. `sinks`: frozen [heads], see `Arch.sinks`."""
        super().__init__(norm, post_norm)
        self._windowed, self._sinks = windowed, sinks
        self._qkv, self._proj, self._shape = qkv, proj, shape
        self._scale = shape.size**-0.5 if scale is None else scale

    def forward(
        self, x: torch.Tensor, row: TreeParams, keep: Keep | None
    ) -> tuple[torch.Tensor, Kept]:
        """x [S, hidden] -> the same shape. `keep`: None where there is no backward pass."""
        kept, row = Kept(x), self._seen(row)
        qkv, inner, heads = self._heads(self._normalised(x), row)
        if keep is None:
            output = attend(*heads, row, self._scale, self._sinks)
        else:
            kept.graph = _HeadsGraph()
            with kept.graph.holding(
                heads, forget=keep < Keep.ATTENTION or row.deal is not None
            ) as entered:
                output = attend(*entered, row, self._scale, self._sinks)
            kept.tensors = {"output": output}
            if keep >= Keep.ATTENTION:
                kept.tensors |= {"qkv": qkv} | named("qkv_inner", inner)
        y, inner = self._added(self._proj, _flat(output.detach(), self._slots(x)), x)
        if keep is not None:
            kept.tensors |= named("proj_inner", inner)
        return y, kept

    def output_again(self, kept: Kept) -> torch.Tensor:
        """What `forward` returned."""
        assert kept.x is not None
        return self._added(
            self._proj, _flat(kept.tensors["output"].detach(), self._slots(kept.x)), kept.x
        )[0]

    def backward(self, gradient: torch.Tensor, kept: Kept, row: TreeParams) -> torch.Tensor:
        """From the gradient of the output that of x; adds those of parameters to theirs. Uses up
        `kept`."""
        x, graph, output, row = kept.x, kept.graph, kept.tensors.pop("output"), self._seen(row)
        assert x is not None
        assert graph is not None
        of_added = self._unnormalised(gradient, self._proj, _flat(output.detach(), self._slots(x)))
        of_output, of_inner = self._proj.input_gradient(of_added)
        inner = kept.tensors.pop("proj_inner", None)
        self._proj.add_gradients(of_added, of_inner, _flat(output.detach(), self._slots(x)), inner)
        normalised = self._normalised(x)
        if "qkv" in kept.tensors:
            qkv, inner = kept.tensors.pop("qkv"), kept.tensors.pop("qkv_inner", None)
            if row.deal is not None:
                graph.again(self._split(qkv, row))
        else:
            qkv, inner, heads = self._heads(normalised, row)
            graph.again(heads)
        of_output = of_output.view(self._slots(x), *output.shape[1:])
        if missing := len(output) - len(of_output):
            of_output = pad(of_output, (0, 0, 0, 0, 0, missing))
        of_heads = graph.gradients(output, of_output)
        if row.deal is not None:
            of_heads = row.deal.scatter(of_heads)
        if self._shape.q_norm is not None and gradients.wanted(self._shape.q_norm):
            of_norms = kernels.head_norm_gradients(of_heads, qkv, self._shape, *row.rotation)
            for weight, of_weight in zip(
                (self._shape.q_norm, self._shape.k_norm), of_norms, strict=True
            ):
                gradients.add(weight, of_weight)
        of_qkv = kernels.split_heads_backward(of_heads, qkv, self._head_shape(), *row.rotation)
        of_normalised, of_inner = self._qkv.input_gradient(of_qkv)
        self._qkv.add_gradients(of_qkv, of_inner, normalised, inner)
        del of_qkv, normalised
        return self._input_gradient(of_normalised, x, gradient)

    def _seen(self, row: TreeParams) -> TreeParams:
        """What this layer needs to know of the row."""
        seen = row.windowed if self._windowed else row
        assert seen is not None
        return seen

    def _slots(self, x: torch.Tensor) -> int:
        """Of the row, of which `x` has this rank's part."""
        return len(x) * (self._proj.group.size() if self._proj.sequence else 1)

    def _head_shape(self) -> HeadShape:
        shape = self._shape
        if not shape.offset_norms or shape.q_norm is None or shape.k_norm is None:
            return shape
        return replace(shape, q_norm=shape.q_norm.float() + 1, k_norm=shape.k_norm.float() + 1)

    def _heads(
        self, normalised: torch.Tensor, row: TreeParams
    ) -> tuple[torch.Tensor, torch.Tensor | None, Heads]:
        """q, k and v as one tensor, A x of their adapters, and the three as the attention takes
        them."""
        qkv, inner = self._qkv(normalised)
        return qkv, inner, self._split(qkv, row)

    def _split(self, qkv: torch.Tensor, row: TreeParams) -> Heads:
        heads = kernels.split_heads(qkv, self._head_shape(), *row.rotation, row.length)
        return heads if row.deal is None else row.deal.gather(heads)


class MlpBlock(Block):
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
        self, x: torch.Tensor, _row: TreeParams, keep: Keep | None
    ) -> tuple[torch.Tensor, Kept]:
        """x [S, hidden] -> the same shape. `keep`: None where there is no backward pass."""
        y, tensors = self.added_to(x, self._normalised(x), keep)
        return y, Kept(x if keep is not None and keep >= Keep.ATTENTION else None, tensors)

    def added_to(
        self, x: torch.Tensor, normalised: torch.Tensor, keep: Keep | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """x plus the MLP of `normalised`, both [S, hidden]; and what to keep."""
        gate_up, inner = self._gate_up(normalised)
        y, down_inner = self._added(self._down, self._activate(gate_up), x)
        tensors = named("down_inner", down_inner)
        if keep is Keep.ALL:
            tensors |= {"gate_up": gate_up} | named("inner", inner)
        return y, tensors

    def backward(self, gradient: torch.Tensor, kept: Kept, _row: TreeParams) -> torch.Tensor:
        """From the gradient of the output that of x; adds those of parameters to theirs. Uses up
        `kept`."""
        assert kept.x is not None
        of_normalised = self.input_gradient(gradient, self._normalised(kept.x), kept.tensors)
        return self._input_gradient(of_normalised, kept.x, gradient)

    def input_gradient(
        self, gradient: torch.Tensor, normalised: torch.Tensor, kept: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """From the gradient of what `added_to` returned that of `normalised`; adds those of
        parameters to theirs. Uses up `kept`, what that forward kept."""
        if "gate_up" in kept:
            gate_up, inner = kept.pop("gate_up"), kept.pop("inner", None)
        else:
            gate_up, inner = self._gate_up(normalised)
        of_added = gradient
        if self._post_norm is not None:
            of_added = self._unnormalised(gradient, self._down, self._activate(gate_up))
        of_activated, of_inner = self._down.input_gradient(of_added)
        of_gate_up, activated = self._activate_backward(of_activated, gate_up)
        self._down.add_gradients(of_added, of_inner, activated, kept.pop("down_inner", None))
        del of_activated, activated, gate_up
        of_normalised, of_inner = self._gate_up.input_gradient(of_gate_up)
        self._gate_up.add_gradients(of_gate_up, of_inner, normalised, inner)
        return of_normalised


class _HeadsGraph:
    """Autograd's graph of the attention alone, from queries, keys and values to its output."""

    @contextmanager
    def holding(self, heads: Heads, *, forget: bool) -> Iterator[Heads]:
        """Within it the graph is recorded, of tensors equal to `heads`. `forget`: it does not keep
        them, so `again` must be called before `gradients`."""
        place = {tensor.data_ptr(): index for index, tensor in enumerate(heads)}
        self._heads: Heads | None = None

        def pack(tensor: torch.Tensor) -> Any:
            index = place.get(tensor.data_ptr()) if forget else None
            # Detached: an output that its own graph saves would keep that graph alive until
            # `gradients` uses it up.
            return tensor.detach() if index is None else (index, tensor.size(), tensor.stride())

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            assert self._heads is not None
            index, size, stride = packed
            return self._heads[index].as_strided(size, stride)

        with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
            entered = _Enter.apply(torch.empty((), requires_grad=True), *heads)
            # An edge does not keep its tensor.
            self._edges = [get_gradient_edge(tensor) for tensor in entered]
            yield entered

    def again(self, heads: Heads) -> None:
        self._heads = heads

    def gradients(self, output: torch.Tensor, gradient: torch.Tensor) -> Heads:
        """Of queries, keys and values, from that of the attention's output. Uses up the graph."""
        q, k, v = torch.autograd.grad(output, self._edges, gradient)
        self._heads = None
        return q, k, v


class _Enter(torch.autograd.Function):
    """Gives tensors a place in a graph, without being leaves, which would be kept."""

    @staticmethod
    def forward(_ctx: Any, _leaf: torch.Tensor, *heads: torch.Tensor) -> Any:
        return heads

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return None, *gradients


def _add_norm_gradient(norm: Any, gradient: torch.Tensor, x: torch.Tensor) -> None:
    """Where its weight is trained. `gradient`: of the norm's output; `x`: its input."""
    if gradients.wanted(norm.weight):
        gradients.add(norm.weight, kernels.norm_weight_gradient(gradient, x, norm.eps))


def _flat(output: torch.Tensor, slots: int) -> torch.Tensor:
    """The attention's output [length, heads, size] without its padding: [slots, heads * size]."""
    return output[:slots].flatten(1)


def named(name: str, tensor: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """For `Kept.tensors`."""
    return {} if tensor is None else {name: tensor}
