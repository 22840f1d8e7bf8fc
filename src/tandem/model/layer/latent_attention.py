"""The sublayer of multi-head latent attention (`Arch.mla`).

Latents are expanded to a key and a value per head. So attention over trees is the same as in other
families, but values may have another size than keys. Each tensor-parallel rank has a part of the
heads, and the latents of its part of the tokens. All families with latent attention are mixtures of
experts. With mixtures of experts, tensor parallelism requires sequence parallelism.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from tandem.families.arch import LatentAttention
from tandem.model import parallel
from tandem.model.attention import TreeParams
from tandem.model.layer.heads import Heads, HeadShape
from tandem.model.layer.norm import norm_backward, normalise
from tandem.model.layer.sublayers import AttentionSublayer
from tandem.model.lora import LoraLinear


@dataclass(frozen=True)
class LatentLinears:
    """The layers that turn a hidden state into heads: `down` computes the latents, and the other
    layers compute heads from the latents."""

    down: LoraLinear
    q_up: LoraLinear  # its input is the queries' latent or, without such a latent, the hidden state
    kv_up: LoraLinear
    q_norm: Any
    kv_norm: Any


class LatentAttentionSublayer(AttentionSublayer):
    """`x + W_o attention(heads(W_q_up norm(c_q), W_kv_up norm(c_kv), k))`. The latent c_q is for
    queries, and the latent c_kv is for keys and values. All heads share the key features k. `W_down
    norm(x)` is the concatenation of c_q, c_kv and k.

    Args:
        norm: the norm of the input.
        proj: the layer with the weight W_o.
        shape: the layout of this rank's queries and keys.
        scale: the factor on q k^T; None: 1 / sqrt(size), with the size of a head.
    """

    def __init__(
        self,
        norm: Any,
        linears: LatentLinears,
        proj: LoraLinear,
        mla: LatentAttention,
        shape: HeadShape,
        *,
        scale: float | None,
    ) -> None:
        super().__init__(norm, linears.down, proj, shape, scale=scale)
        self._linears, self._mla = linears, mla

    def _heads(
        self, normalised: torch.Tensor, tree: TreeParams
    ) -> tuple[torch.Tensor, torch.Tensor | None, Heads]:
        """A tuple: the latents as one tensor; the product `A x` of the adapters of `down`, None
        without adapters; and the heads."""
        linears = self._linears
        latents, inner = linears.down(normalised)
        q_in, kv_in, shared = self._inputs(latents, normalised)
        queries, _inner = linears.q_up(q_in)
        keys_values, _inner = linears.kv_up(kv_in)
        shared = parallel.gather(shared, linears.kv_up.group)
        parts = (
            queries.view(len(queries), self._shape.groups, -1),
            keys_values.view(len(queries), self._shape.groups, -1),
            shared,
        )
        return latents, inner, make_heads(parts, self._mla, *tree.rotation, tree.length)

    def _heads_backward(
        self,
        grad_heads: Heads,
        qkv: torch.Tensor,
        _grad_gates: torch.Tensor | None,
        normalised: torch.Tensor,
        inner: torch.Tensor | None,
        tree: TreeParams,
    ) -> torch.Tensor:
        """Like `AttentionSublayer._heads_backward`, but the argument `qkv` contains the latents.
        The products A x of the adapters of `q_up` and `kv_up` are recomputed."""
        linears, mla = self._linears, self._mla
        slots = len(tree.rotation[0])
        grad_queries, grad_keys_values, grad_shared = make_heads_backward(
            (grad_heads[0][:slots], grad_heads[1][:slots], grad_heads[2][:slots]),
            mla,
            *tree.rotation,
        )
        q_in, kv_in, _shared = self._inputs(qkv, normalised)
        grad_q_in = _linear_backward(linears.q_up, grad_queries.flatten(1), q_in)
        grad_kv_in = _linear_backward(linears.kv_up, grad_keys_values.flatten(1), kv_in)
        # Each rank has the gradient from its own heads only, so the ranks' gradients are summed.
        grad_shared = parallel.scatter_sum(grad_shared, linears.kv_up.group)
        *q_latent, kv_latent, _shared = self._split_latents(qkv)
        grads = [
            norm_backward(linears.kv_norm, grad_kv_in, kv_latent, torch.zeros_like(kv_latent)),
            grad_shared.to(qkv.dtype),
        ]
        if q_latent:
            zero = torch.zeros_like(q_latent[0])
            grads.insert(0, norm_backward(linears.q_norm, grad_q_in, q_latent[0], zero))
        grad_latents = torch.cat(grads, 1)
        grad_normalised, grad_inner = linears.down.input_gradient(grad_latents)
        linears.down.add_gradients(grad_latents, grad_inner, normalised, inner)
        return grad_normalised if q_latent else grad_normalised + grad_q_in

    def _split_latents(self, latents: torch.Tensor) -> list[torch.Tensor]:
        """The parts of the latents: the queries' latent, if there is one; the latent of keys and
        values; the key features that all heads share."""
        mla = self._mla
        sizes = [mla.kv_rank, mla.rope_size]
        if mla.q_rank is not None:
            sizes.insert(0, mla.q_rank)
        return [part.contiguous() for part in latents.split(sizes, 1)]

    def _inputs(
        self, latents: torch.Tensor, normalised: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The inputs of `q_up` and `kv_up`, and the key features that all heads share."""
        *q_latent, kv_latent, shared = self._split_latents(latents)
        q_in = normalise(self._linears.q_norm, q_latent[0]) if q_latent else normalised
        return q_in, normalise(self._linears.kv_norm, kv_latent), shared


def make_heads(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mla: LatentAttention,
    cos: torch.Tensor,
    sin: torch.Tensor,
    length: int,
) -> Heads:
    """The heads: rotated queries and keys [length, heads, nope + rope], and values [length, heads,
    value].

    Args:
        parts: query heads [S, heads, nope + rope], keys' own features with values [S, heads, nope +
            value], and the key features that all heads share [S, rope].
        mla: the sizes.
        cos, sin: the cosines and sines of RoPE, [S, rope / 2].
        length: the number of slots of the result, at least S; slots from S on are zero.
    """
    queries, keys_values, shared = parts
    own, values = keys_values.split([mla.nope_size, mla.value_size], 2)
    fixed, turned = queries.split([mla.nope_size, mla.rope_size], 2)
    queries = torch.cat([fixed, rotate_pairs(turned, cos, sin)], 2)
    shared = rotate_pairs(shared[:, None], cos, sin)
    keys = torch.cat([own, shared.expand(-1, own.shape[1], -1)], 2)
    q, k, v = (
        pad(heads, (0, 0, 0, 0, 0, length - len(heads))) for heads in (queries, keys, values)
    )
    return q, k, v.contiguous()


def make_heads_backward(
    gradients: Heads, mla: LatentAttention, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `make_heads`' `parts`, in the same shapes. The gradient of the shared
    features is fp32.

    Args:
        gradients: the gradients of `make_heads`' results without the padding, [S, ...].
        mla: the sizes.
        cos, sin: the cosines and sines of RoPE, [S, rope / 2].
    """
    grad_queries, grad_keys, grad_values = gradients
    fixed, turned = grad_queries.split([mla.nope_size, mla.rope_size], 2)
    own, shared = grad_keys.split([mla.nope_size, mla.rope_size], 2)
    return (
        torch.cat([fixed, rotate_pairs_backward(turned, cos, sin)], 2),
        torch.cat([own, grad_values], 2),
        rotate_pairs_backward(shared.float().sum(1, keepdim=True), cos, sin)[:, 0],
    )


def rotate_pairs(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on pairs of adjacent features. The result has the shape and dtype of `heads`. In the
    result, the first features of all pairs come before the second features of all pairs. Rotated
    queries and rotated keys have the same order of features.

    Args:
        heads: the heads, [S, heads, size].
        cos, sin: the cosines and sines of RoPE, [S, size / 2].
    """
    first, second = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(heads.dtype)


def rotate_pairs_backward(
    gradient: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """The gradient of `rotate_pairs`' first argument, of the shape and dtype of `gradient`.

    Args:
        gradient: the gradient of the result, [S, heads, size].
        cos, sin: the cosines and sines of RoPE, [S, size / 2].
    """
    first, second = gradient.float().chunk(2, -1)
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    pairs = torch.stack((first * cos + second * sin, second * cos - first * sin), -1)
    return pairs.flatten(-2).to(gradient.dtype)


def _linear_backward(
    linear: LoraLinear, gradient: torch.Tensor, inputs: torch.Tensor
) -> torch.Tensor:
    """The gradient of `inputs`. Also adds the parameters' gradients to their buffers."""
    grad_inputs, grad_inner = linear.input_gradient(gradient)
    linear.add_gradients(gradient, grad_inner, inputs, linear.inner(inputs))
    return grad_inputs
