"""The sublayer of a gated delta net, which takes the place of attention (Qwen3.5)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Parameter
from torch.nn.functional import silu, softplus

from tandem.families.arch import GatedDeltaNet
from tandem.model import gradients
from tandem.model.attention import TreeParams
from tandem.model.delta_rule import Recurrence, convolve, delta_rule
from tandem.model.layer.sublayers import Saved, SaveLevel, Sublayer, entry
from tandem.model.lora import LoraLinear


@dataclass(frozen=True)
class DeltaNetWeights:
    """The weights for this rank's heads. Only `a_log` and `dt_bias` contain the values of all
    heads; they are fp32."""

    conv: Parameter  # [features, 1, tokens]
    a_log: Parameter  # [value heads]
    dt_bias: Parameter  # [value heads]
    norm: Parameter  # [value size]

    def all(self) -> tuple[Parameter, ...]:
        return self.conv, self.a_log, self.dt_bias, self.norm


@dataclass
class SavedDeltaNet(Saved):
    """`leaves`: the inputs of the autograd graph of `tensors["output"]`."""

    leaves: list[torch.Tensor] = field(default_factory=list)


class DeltaNetSublayer(Sublayer):
    """`x + W_out norm_gated(delta_rule(conv(W_in norm(x))))`.

    Autograd computes the gradients of all operations between W_in and W_out. Below `SaveLevel.ALL`,
    the backward pass computes the operations between W_in and W_out again.

    Args:
        norm: the norm of the input.
        weights: the other weights; see `DeltaNetWeights`.
        eps: the epsilon of the gated norm.
        parts: the number of equal shares into which the value heads are divided.
        part: the number of this rank's share, from 0.
    """

    def __init__(
        self,
        norm: Any,
        in_proj: LoraLinear,
        out_proj: LoraLinear,
        weights: DeltaNetWeights,
        gdn: GatedDeltaNet,
        *,
        eps: float,
        part: int,
        parts: int,
    ) -> None:
        super().__init__(norm)
        self._in, self._out, self._weights, self._gdn = in_proj, out_proj, weights, gdn
        self._eps, self._parts = eps, parts
        count = gdn.value_heads // parts
        self._heads = slice(part * count, (part + 1) * count)

    def forward(
        self, x: torch.Tensor, tree: TreeParams, level: SaveLevel | None
    ) -> tuple[torch.Tensor, Saved]:
        """The sublayer's output for x, both [S, hidden], and the tensors that `backward` needs.

        Args:
            level: which tensors are saved; None if there is no backward pass.
        """
        saved = SavedDeltaNet(x)
        projected, inner = self._in(self._normalise(x))
        if level is SaveLevel.ALL:
            output = self._record(projected, saved, tree)
        else:
            output = self._attend(projected, self._weights.all(), tree)
        if level is SaveLevel.ATTENTION:
            saved.tensors = {"projected": projected}
        if level is not None and level >= SaveLevel.ATTENTION:
            saved.tensors |= entry("in_inner", inner)
        y, inner = self._add_output(self._out, output.detach(), x)
        if level is not None:
            saved.tensors |= {"output": output} | entry("out_inner", inner)
        return y, saved

    def recompute_output(self, saved: Saved) -> torch.Tensor:
        """`forward`'s output, computed again."""
        assert saved.x is not None
        return self._add_output(self._out, saved.tensors["output"].detach(), saved.x)[0]

    def backward(self, gradient: torch.Tensor, saved: Saved, tree: TreeParams) -> torch.Tensor:
        """The gradient of x, [S, hidden]. Also adds the parameters' gradients to their buffers.

        Args:
            gradient: the gradient of the output, [S, hidden].
            saved: the second result of `forward`; it can't be used again.
            tree: the argument `tree` of `forward`.
        """
        assert isinstance(saved, SavedDeltaNet)
        assert saved.x is not None
        output = saved.tensors.pop("output")
        grad_output, grad_inner = self._out.input_gradient(gradient)
        inner = saved.tensors.pop("out_inner", None)
        self._out.add_gradients(gradient, grad_inner, output.detach(), inner)
        normalised = self._normalise(saved.x)
        inner, projected = saved.tensors.pop("in_inner", None), saved.tensors.pop("projected", None)
        if not saved.leaves:
            del output
            if projected is None:
                projected, inner = self._in(normalised)
            output = self._record(projected, saved, tree)
            del projected
        grad_projected, *others = torch.autograd.grad(output, saved.leaves, grad_output)
        del output
        saved.leaves = []
        trained = [each for each in self._weights.all() if gradients.has_gradient_buffer(each)]
        for weight, grad in zip(trained, others, strict=True):
            gradients.add(weight, grad)
        grad_normalised, grad_inner = self._in.input_gradient(grad_projected)
        self._in.add_gradients(grad_projected, grad_inner, normalised, inner)
        return self._input_gradient(grad_normalised, saved.x, gradient)

    def _record(
        self, projected: torch.Tensor, saved: SavedDeltaNet, tree: TreeParams
    ) -> torch.Tensor:
        """The result of `_attend`, with an autograd graph whose inputs are `saved.leaves`."""
        leaf = projected.detach().requires_grad_()
        weights = [each.detach() for each in self._weights.all()]
        trained = [
            own.requires_grad_()
            for own, each in zip(weights, self._weights.all(), strict=True)
            if gradients.has_gradient_buffer(each)
        ]
        saved.leaves = [leaf, *trained]
        with torch.enable_grad():
            return self._attend(leaf, weights, tree)

    def _attend(
        self,
        projected: torch.Tensor,
        weights: Sequence[torch.Tensor],
        tree: TreeParams,
    ) -> torch.Tensor:
        """All operations between the products with W_in and W_out, from [S, features of in_proj] to
        [S, features of out_proj]. Everything except matrix products is computed in fp32. `weights`:
        the fields of `DeltaNetWeights`."""
        conv, a_log, dt_bias, norm = weights
        row, gdn = tree.recurrence, self._gdn
        assert row is not None
        sections = [size // self._parts for size in gdn.sections]
        heads = gdn.value_heads // self._parts
        qkv, z, b, a = projected.split([sum(sections), sections[2], heads, heads], 1)
        q, k, v = _convolve(qkv, conv.flatten(1), row, sections)
        decay = -a_log[self._heads].exp() * softplus(a.float() + dt_bias[self._heads])
        read = delta_rule(
            q.unflatten(1, (-1, gdn.key_head_dim)),
            k.unflatten(1, (-1, gdn.key_head_dim)),
            v.unflatten(1, (-1, gdn.value_head_dim)),
            decay,
            b.float().sigmoid(),
            row,
        )
        return _norm_and_gate(read, z, norm, self._eps)


def _convolve(
    qkv: torch.Tensor, weight: torch.Tensor, row: Recurrence, sections: list[int]
) -> tuple[torch.Tensor, ...]:
    """Applies the convolution and silu to `qkv` [S, features], and cuts the result into `sections`.
    The results have the dtype of `qkv`.

    Args:
        weight: the convolution's weight, [features, tokens].
        sections: the numbers of features of the results.
    """
    if qkv.is_cuda:
        from tandem.model.layer import triton_delta_net  # CPU builds of torch come without Triton

        return triton_delta_net.convolve_and_activate(qkv, weight, row, sections)
    return silu(convolve(qkv, weight, row)).to(qkv.dtype).split(sections, 1)


def _norm_and_gate(
    read: torch.Tensor, z: torch.Tensor, norm: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm of each head's output `read` [S, heads, size], times the gate silu(z), with z [S,
    heads * size]. The result is [S, heads * size], in the dtype of `z`."""
    if read.is_cuda:
        from tandem.model.layer import triton_delta_net

        return triton_delta_net.norm_and_gate(read, z, norm, eps)
    read = read.float()
    inverse = (read.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (read * inverse * norm * silu(z.float()).view(read.shape)).flatten(1).to(z.dtype)
