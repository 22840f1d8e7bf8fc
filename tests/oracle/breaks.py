"""Small mistakes in Tandem that the oracle must find. For each mistake the module has the function
that the mistake replaces, and the cases that can reveal the mistake.

`cut_rank.BREAKS` has further mistakes, in the code for ranks that each train a part of an adapter.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import cut_rank
from oracle.cases import LATENTS, MIXTURES, Case
from tandem.families.arch import EXPERT_TARGETS
from tandem.model import delta_rule, logprobs, parallel
from tandem.model import policy as policy_module
from tandem.model.layer import (
    gated_delta_net,
    head_rows,
    kernels,
    latent_attention,
    norm,
    sublayers,
)
from tandem.model.layer.decoder_layer import DecoderLayer
from tandem.model.layer.experts_beside_mlp import ExpertsBesideMlp
from tandem.model.layer.gated_mlp import GatedMlp
from tandem.model.layer.latent_attention import LatentAttentionSublayer
from tandem.model.layer.moe_sublayer import MoeSublayer
from tandem.model.lora import LoraLinear
from tandem.spool.schema import LATENT_TARGETS
from tandem.training import sharded_adam
from tandem.training.optimizer import AdapterOptimizer
from tandem.training.sharded_adam import ShardedAdam


@dataclass(frozen=True)
class Break:
    patch: tuple[Any, str, Any]
    shows: Callable[[Case], object]
    """Whether the mistake can show in a case."""


def nothing(*_: object) -> None:
    pass


def unrotated(gradients, qkv, shape, cos, sin):
    return HEAD_NORM_GRADIENTS(gradients, qkv, shape, cos, -sin)


def last_only(self, indices, values, accumulate=False):
    return INDEX_PUT(self, indices, values, accumulate=False)


def not_of_the_router(self, routing, _of_probs):
    return torch.zeros(len(routing.probs), self._shape.num_experts)


def late(self, part, *arguments):
    """In each step Adam uses the bias correction of the next step."""
    self.steps += 1
    UPDATE(self, part, *arguments)
    self.steps -= 1


def decayed(self, part, *arguments):
    UPDATE(self, replace(part, decays=True), *arguments)


def unclipped(self, part, offset, length, _scale, rate):
    UPDATE(self, part, offset, length, 1.0, rate)


def slots_as_positions(row, topology):
    row = DEAL_ROW(row, topology)
    return replace(row, positions=torch.arange(len(row.positions)))


def longer_window(ends, kernel, rotation, window=None, deal=None):
    return TREE_PARAMS(ends, kernel, rotation, None if window is None else window + 1, deal)


def entropy_without_gradient(ctx, grad_logprobs, grad_entropy):
    return STATISTICS_BACKWARD(ctx, grad_logprobs, torch.zeros_like(grad_entropy))


def not_summed(self):
    """Each rank keeps its own gradient instead of the sum over the ranks."""


def summed_twice(self):
    REDUCE(self)
    for parameter in self.parameters.values():
        parameter.grad.mul_(2)


def never_clipped(self, _norm, rate):
    STEP(self, 0.0, rate)


HEAD_ROWS = DecoderLayer._head_rows
ROTATION, ATTEND = policy_module.rotation, sublayers.attend
VALUES_PARTS = head_rows.NormalisedValues._parts
VALUES_BACKWARD, GO_BACK = head_rows.NormalisedValues.backward, DecoderLayer.go_back
DEAL_ROW, TREE_PARAMS = policy_module.deal_row, policy_module.tree_params
STATISTICS_BACKWARD, HEAD_NORM_GRADIENTS = (
    logprobs._Statistics.backward,
    kernels.head_norm_gradients,
)
REDUCE, STEP = AdapterOptimizer.reduce_gradients, AdapterOptimizer.step
IN_CHUNKS, ANCESTORS = delta_rule._in_chunks, delta_rule._ancestors
NORM, GATES = gated_delta_net._norm_and_gate, GatedMlp._gates
MAKE_HEADS, INPUTS = latent_attention.make_heads, LatentAttentionSublayer._inputs
MAKE_HEADS_BACKWARD = latent_attention.make_heads_backward
ADD_GRADIENTS = LoraLinear.add_gradients
INDEX_PUT, UPDATE = torch.Tensor.index_put_, ShardedAdam._update


def of_experts(case: Case) -> bool:
    return (
        case.family in MIXTURES
        and case.lora is not None
        and bool(set(case.lora.targets) & set(EXPERT_TARGETS))
    )


def full(*families: str) -> Callable[[Case], object]:
    return lambda case: (
        case.lora is None and case.world == 1 and (not families or case.family in families)
    )


def cut(case: Case, dimension: str) -> bool:
    return case.sizes.get(dimension, 1) > 1


def orphaned(query, key, value, g, beta, row):
    segments = [replace(segment, parent=-1) for segment in row.segments]
    return IN_CHUNKS(query, key, value, g, beta, replace(row, segments=segments))


def from_the_first(states, parents):
    return states[parents * 0]


def over_borders(_segments, length, distance):
    before = np.arange(length) - distance
    return np.where(before < 0, length, before)


def anew(segments, length, distance):
    return ANCESTORS([replace(s, parent=-1) for s in segments], length, distance)


def gate_first(read, z, norm, eps):
    gated = read * torch.nn.functional.silu(z.float()).view(read.shape)
    return NORM(gated, z * 0 + 1, norm, eps) / torch.nn.functional.silu(torch.ones(()))


def over_heads(read, z, norm, eps):
    scale = read.square().mean(-1, keepdim=True) / read.square().mean((-1, -2), keepdim=True)
    return NORM(read, z, norm, eps) * scale.clamp(min=1e-6).sqrt().flatten(1).repeat_interleave(
        read.shape[-1], 1
    )


def of_delta_nets(kind: str = "linear_attention") -> Callable[[Case], bool]:
    """Selects the cases of Qwen3.5 whose model has layers of the kind `kind`."""
    return lambda case: case.family.startswith("qwen3_5") and kind in case.config["layer_types"]


def of_gated_experts(case: Case) -> bool:
    return case.family == "qwen3_5_moe_text"


def small(*families: str) -> Callable[[Case], bool]:
    return lambda case: case.family in families


def of_each_head(self, parts):
    """The norm over all heads is computed over each single head, like the norms of Qwen3's
    heads."""
    heads = [part.unflatten(-1, (-1, self._shape.size)) for part in parts[:2]]
    inverses = [(head.square().mean(-1, keepdim=True) + self._shape.eps).rsqrt() for head in heads]
    return [one.expand_as(of).flatten(1) for one, of in zip(inverses, heads, strict=True)]


def of_this_rank(_self, parts):
    return torch.stack([part.mean(-1, keepdim=True) for part in parts])


def as_constants(self, gradient, rows, _tree):
    """The gradient ignores that the norms' divisors depend on queries and keys."""
    grads, inverses = self._parts(gradient), self._inverses(self._parts(rows))
    for index, weight in enumerate(self._weights):
        grads[index] = grads[index] * weight.float() * inverses[index]
    return self._join(grads, rows)


def scaled_again(positions, frequencies, dtype, factor=1.0):
    """The RoPE of every layer has YaRN's factor, also the RoPE of layers with a window."""
    return ROTATION(positions, frequencies, dtype, 0.1 * math.log(4.0) + 1)


def of_gemma4(case: Case) -> bool:
    return case.family == "gemma4_text"


def of_gemma4_experts(case: Case) -> bool:
    # In a model of one layer with adapters only on v, these adapters get no gradient from the
    # experts.
    return "num_experts" in case.config


def capped(case: Case) -> bool:
    return of_gemma4(case) and case.config["final_logit_softcapping"] == 3.0


def keys_alone(self, gradient, rows, tree):
    shape = self._shape
    grouped = gradient.view(len(gradient), shape.groups, shape.queries + 2, shape.size).clone()
    grouped[:, :, -1] = 0
    return VALUES_BACKWARD(self, grouped.flatten(1), rows, tree)


def of_other_keys(self, rows):
    queries, keys, values = VALUES_PARTS(self, rows)
    return [queries, keys, values.roll(1, 0)]


class ValuesOfNormalisedKeys(head_rows.NormalisedValues):
    weight: torch.Tensor

    def _parts(self, rows):
        queries, keys, values = VALUES_PARTS(self, rows)
        return [queries, keys, values * self.weight.to(rows.dtype)]


def after_their_norm(self, heads, q_norm, k_norm):
    made = HEAD_ROWS(self, heads, q_norm, k_norm)
    if self._arch.keys_are_values:
        made = ValuesOfNormalisedKeys(heads, keys_are_values=True)
        made.weight = k_norm
    return made


def scaled_by_heads(query, key, value, tree, _scale, sinks=None):
    return ATTEND(query, key, value, tree, query.shape[-1] ** -0.5, sinks)


def wholly(positions, frequencies, dtype, factor=1.0):
    return ROTATION(positions, torch.where(frequencies == 0, 0.1, frequencies), dtype, factor)


def number_forward_only(self, gradient, saved, tree):
    return GO_BACK(self, gradient / self.scalar, saved, tree)


def always_open(_self, normalised):
    return torch.ones(len(normalised), 1)


def of_latents(shows: Callable[[Case], object] = lambda _: True) -> Callable[[Case], object]:
    return lambda case: case.seed >= LATENTS and shows(case)


def rope_first(parts, mla, cos, sin, length):
    """RoPE turns the first features of queries instead of the last features."""
    queries, *others = parts
    rolled = queries.roll(mla.rope_size, -1)
    made, keys, values = MAKE_HEADS((rolled, *others), mla, cos, sin, length)
    return made.roll(-mla.rope_size, -1), keys, values


def values_first(parts, mla, *rest):
    queries, keys_values, shared = parts
    return MAKE_HEADS((queries, keys_values.roll(mla.nope_size, -1), shared), mla, *rest)


def values_widened(parts, mla, *rest):
    """Values are read one feature off, so the values of a head contain a feature of another
    head."""
    q, k, v = MAKE_HEADS(parts, mla, *rest)
    return q, k, v.flatten(1).roll(1, -1).view(v.shape)


def halves(heads, cos, sin):
    first, second = heads.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def normed_together(self, latents, normalised):
    """The norm of the latent covers the whole output of kv_a, also the shared features."""
    q_in, kv_in, shared = INPUTS(self, latents, normalised)
    *_, latent, _ = self._split_latents(latents)
    alone, whole = (
        (part.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        for part in (latent, torch.cat([latent, shared], -1))
    )
    return q_in, kv_in * alone / whole, shared


def normed_shared(self, latents, normalised):
    q_in, kv_in, shared = INPUTS(self, latents, normalised)
    return q_in, kv_in, shared / (shared.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def of_one_head(gradients, mla, cos, sin):
    queries, keys, values = gradients
    *others, _ = MAKE_HEADS_BACKWARD(gradients, mla, cos, sin)
    first = queries[:, :1], keys[:, :1], values[:, :1]
    return *others, MAKE_HEADS_BACKWARD(first, mla, cos, sin)[2]


def scaled_by(size: Callable[..., int]) -> Callable[..., torch.Tensor]:
    def attend(query, key, value, tree, _scale, sinks):
        return ATTEND(query, key, value, tree, size(query, value) ** -0.5, sinks)

    return attend


def of_own_heads(tensor, group):
    return tensor.chunk(group.size())[group.rank()]


def of_own_tokens(self, *arguments):
    summed, self._own_tokens = self._own_tokens, self.sequence
    ADD_GRADIENTS(self, *arguments)
    self._own_tokens = summed


BREAKS = {
    "positions count slots, not the path": Break(
        (policy_module, "deal_row", slots_as_positions),
        lambda c: not cut(c, "context"),
    ),
    "a window is a token longer": Break(
        (policy_module, "tree_params", longer_window),
        lambda c: c.config.get("sliding_window") and c.family == "mistral",
    ),
    "the entropy has no gradient": Break(
        (logprobs._Statistics, "backward", staticmethod(entropy_without_gradient)),
        lambda _: True,
    ),
    "data ranks' gradients are not summed": Break(
        (AdapterOptimizer, "reduce_gradients", not_summed),
        lambda c: c.lora and cut(c, "data"),
    ),
    "gradients count twice": Break(
        (AdapterOptimizer, "reduce_gradients", summed_twice), lambda c: c.lora
    ),
    "adapters' gradients are not clipped": Break(
        (AdapterOptimizer, "step", never_clipped), lambda c: c.lora
    ),
    # The following mistakes show only in cases that train all weights.
    "norms have no gradient": Break((norm, "add_norm_gradient", nothing), full()),
    "heads' norms: RoPE is not undone": Break(
        (kernels, "head_norm_gradients", unrotated), full("qwen3")
    ),
    "embedding: a token counts once": Break((torch.Tensor, "index_put_", last_only), full()),
    "router has no gradient": Break(
        (MoeSublayer, "_logits_gradient", not_of_the_router), full("qwen3_moe")
    ),
    "Adam: bias correction of the next step": Break((ShardedAdam, "_update", late), full()),
    "Adam: vectors decay": Break((ShardedAdam, "_update", decayed), full()),
    "Adam: gradients are not clipped": Break((ShardedAdam, "_update", unclipped), full()),
    "Adam: steps are not counted": Break(
        (ShardedAdam, "steps", property(lambda _: 1, nothing)), full()
    ),
    "sp: norms' gradients of the ranks' tokens are not summed": Break(
        (ShardedAdam, "_sum_over_tensor_ranks", nothing),
        lambda c: c.lora is None and c.sizes["sequence"],
    ),
    "tp: heads' norms' gradients are not summed": Break(
        (ShardedAdam, "_sum_over_tensor_ranks", nothing),
        lambda c: (
            c.lora is None and c.family == "qwen3" and cut(c, "tensor") and not c.sizes["sequence"]
        ),
    ),
    "data ranks' gradients of weights are not summed": Break(
        (ShardedAdam, "reduce_gradients", ShardedAdam._sum_over_tensor_ranks),
        lambda c: c.lora is None and cut(c, "data"),
    ),
    "weights are not sent around": Break(
        (ShardedAdam, "_gather", nothing), lambda c: c.lora is None and cut(c, "data")
    ),
    "pp: the gradients of a tied table are not summed": Break(
        (ShardedAdam, "_sum_over_stages", nothing),
        lambda c: c.lora is None and cut(c, "pipeline") and c.config["tie_word_embeddings"],
    ),
    # Mistakes in Qwen3.5.
    "delta net: children start without a state": Break(
        (delta_rule, "_in_chunks", orphaned), of_delta_nets()
    ),
    "delta net: children start from the first of the parents": Break(
        (delta_rule, "_of_parents", from_the_first), of_delta_nets()
    ),
    "delta net: children give their parent's state no gradient": Break(
        (delta_rule, "_of_parents", lambda states, parents: states.detach()[parents]),
        of_delta_nets(),
    ),
    "delta net: the convolution reaches over borders": Break(
        (delta_rule, "_ancestors", over_borders), of_delta_nets()
    ),
    "delta net: the convolution begins anew at branches": Break(
        (delta_rule, "_ancestors", anew), of_delta_nets()
    ),
    "delta net: no gate": Break(
        (gated_delta_net, "_norm_and_gate", lambda read, z, *norm: NORM(read, z * 0 + 1, *norm)),
        of_delta_nets(),
    ),
    "delta net: the gate comes before the norm": Break(
        (gated_delta_net, "_norm_and_gate", gate_first), of_delta_nets()
    ),
    "delta net: the norm is over all heads": Break(
        (gated_delta_net, "_norm_and_gate", over_heads), of_delta_nets()
    ),
    "delta net: the attention has no output gate": Break(
        (sublayers, "gated", lambda output, _gates: output), of_delta_nets("full_attention")
    ),
    "delta net, tp: heads' vectors' gradients are not summed": Break(
        (sharded_adam, "_OF_HEADS", ()),
        lambda c: (
            of_delta_nets()(c) and c.lora is None and cut(c, "tensor") and not c.sizes["sequence"]
        ),
    ),
    "gated expert: always open": Break((GatedMlp, "_gates", always_open), of_gated_experts),
    "gated expert: a token's gate gives no gradient": Break(
        (GatedMlp, "_logits_gradient", staticmethod(lambda _gradient, _output, gates: gates * 0)),
        of_gated_experts,
    ),
    "gated expert: the gate of another token": Break(
        (GatedMlp, "_gates", lambda self, normalised: GATES(self, normalised.roll(1, 0))),
        of_gated_experts,
    ),
    # Mistakes in `SMALL_FAMILIES`.
    "wide norm: over each head": Break(
        (head_rows.WideNorm, "_inverses", of_each_head), small("olmo3")
    ),
    "wide norm, tp: over this rank's features": Break(
        (head_rows.WideNorm, "_means", of_this_rank),
        lambda c: c.family == "olmo3" and cut(c, "tensor"),
    ),
    "wide norm: the window's RoPE is scaled": Break(
        (policy_module, "rotation", scaled_again),
        lambda c: c.family == "olmo3" and "sliding_attention" in c.config["layer_types"],
    ),
    "wide norm: no sum in its gradient": Break(
        (head_rows.WideNorm, "backward", as_constants), small("olmo3")
    ),
    "no rope: all layers have it": Break(
        (policy_module, "without_rotation", lambda tree: tree),
        lambda c: c.family == "smollm3" and 0 in c.config["no_rope_layers"],
    ),
    "growing queries: they do not": Break(
        (head_rows.GrowingQueries, "forward", lambda _self, rows, _tree: rows),
        small("ministral3", "mistral3"),
    ),
    "growing queries: their gradient does not": Break(
        (head_rows.GrowingQueries, "backward", lambda _self, gradient, *_: gradient),
        small("ministral3", "mistral3"),
    ),
    # Mistakes in Gemma 4.
    "gemma4: values give keys no gradient": Break(
        (head_rows.NormalisedValues, "backward", keys_alone),
        lambda c: of_gemma4(c) and c.config["attention_k_eq_v"] and c.lora is None,
    ),
    "gemma4: values are the keys of another slot": Break(
        (head_rows.NormalisedValues, "_parts", of_other_keys),
        lambda c: of_gemma4(c) and c.config["attention_k_eq_v"],
    ),
    "gemma4: values are the keys after their norm": Break(
        (DecoderLayer, "_head_rows", after_their_norm),
        lambda c: of_gemma4(c) and c.config["attention_k_eq_v"],
    ),
    "gemma4: values have no norm": Break(
        (head_rows, "_normalised", lambda x, _eps: (x, torch.ones(()))), of_gemma4
    ),
    "gemma4: the attention's scale is that of its heads": Break(
        (sublayers, "attend", scaled_by_heads), of_gemma4
    ),
    "gemma4: RoPE is on whole heads": Break((policy_module, "rotation", wholly), of_gemma4),
    "gemma4: a window in all layers": Break(
        (sublayers.AttentionSublayer, "_layer_tree", lambda _self, tree: tree.windowed or tree),
        lambda c: of_gemma4(c) and "sliding_attention" in c.config["layer_types"][:-1],
    ),
    "gemma4: layers have no number": Break(
        (DecoderLayer, "_scaled", lambda _self, x: x),
        # The norm after the last layer hides the last layer's `layer_scalar`.
        lambda c: of_gemma4(c) and c.config["num_hidden_layers"] > 1,
    ),
    "gemma4: its number is not in the gradient": Break(
        (DecoderLayer, "go_back", number_forward_only), of_gemma4
    ),
    "gemma4: logits are not capped": Break((logprobs, "_capped", lambda x, _: x), capped),
    "gemma4: the cap has no slope": Break((torch.Tensor, "square_", torch.Tensor.zero_), capped),
    "gemma4: the router gets the experts' input": Break(
        (ExpertsBesideMlp, "_router_rows", lambda self, x: self._normalise(x)), of_gemma4_experts
    ),
    "gemma4: the experts get the MLP's input": Break(
        (ExpertsBesideMlp, "_normalise", lambda self, x: self._mlp._normalise(x)),
        of_gemma4_experts,
    ),
    "gemma4: experts have no factors": Break(
        (ExpertsBesideMlp, "_weights", lambda _self, probs, _: probs), of_gemma4_experts
    ),
    "gemma4: the router's input has no gradient": Break(
        (ExpertsBesideMlp, "_router_rows_backward", lambda _self, _gradient, _x, plus: plus),
        of_gemma4_experts,
    ),
    # Mistakes in latent attention.
    "latents: RoPE turns the first features": Break(
        (latent_attention, "make_heads", rope_first), of_latents()
    ),
    "latents: RoPE turns halves, not neighbours": Break(
        (latent_attention, "rotate_pairs", halves), of_latents()
    ),
    "latents: values come before keys": Break(
        (latent_attention, "make_heads", values_first), of_latents()
    ),
    "latents: values are read a feature off": Break(
        (latent_attention, "make_heads", values_widened), of_latents()
    ),
    "latents: the norm is over the shared features too": Break(
        (LatentAttentionSublayer, "_inputs", normed_together), of_latents()
    ),
    "latents: the shared features are normalised": Break(
        (LatentAttentionSublayer, "_inputs", normed_shared), of_latents()
    ),
    "latents: the scale is that of values": Break(
        (sublayers, "attend", scaled_by(lambda _query, value: value.shape[-1])),
        of_latents(
            lambda c: (
                c.config["v_head_dim"]
                != c.config["qk_nope_head_dim"] + c.config["qk_rope_head_dim"]
            )
        ),
    ),
    "latents: the scale is without YaRN's": Break(
        (sublayers, "attend", scaled_by(lambda query, _value: query.shape[-1])),
        of_latents(lambda c: "mscale" in c.config.get("rope_parameters", ())),
    ),
    "latents: the shared features have one head's gradient": Break(
        (latent_attention, "make_heads_backward", of_one_head), of_latents()
    ),
    "latents, tp: the shared features have a rank's gradient": Break(
        (
            latent_attention,
            "parallel",
            SimpleNamespace(gather=parallel.gather, scatter_sum=of_own_heads),
        ),
        of_latents(lambda c: cut(c, "tensor")),
    ),
    "latents, sp: adapters have the gradient of a rank's tokens": Break(
        (LoraLinear, "add_gradients", of_own_tokens),
        of_latents(
            lambda c: (
                cut(c, "tensor")
                and c.lora
                and set(c.lora.targets) & {"q_a_proj", LATENT_TARGETS[2]}
            )
        ),
    ),
    "latents, sp: norms' gradients of the ranks' tokens are not summed": Break(
        (ShardedAdam, "_sum_over_tensor_ranks", nothing),
        of_latents(lambda c: cut(c, "tensor") and c.lora is None),
    ),
    "experts are summed over the wrong ranks": Break(
        (ShardedAdam, "_group", lambda self, _: self._topology.data),
        lambda c: c.lora is None and cut(c, "expert"),
    ),
}


def _shows(name: str) -> Callable[[Case], object]:
    """Selects the cases in which the mistake `name` of `cut_rank.BREAKS` can show. All these cases
    train adapters."""
    first = name.partition(":")[0]
    if name.startswith("bias"):
        return lambda c: c.family == "gpt_oss" and cut(c, "tensor")
    if name == "the norm counts copies" or first == "etp" or name.startswith("ep: experts"):
        dimension = "expert_tensor" if first == "etp" else "expert"
        return lambda c: of_experts(c) and cut(c, dimension)
    if first == "ep" or name.startswith("the residual"):
        return lambda c: c.lora and cut(c, "expert")
    if first == "shared expert":
        return lambda c: (
            c.family == "glm4_moe" and c.sizes["sequence"] and "q_proj" in c.lora.targets
        )
    if first in ("cp", "pp"):
        dimension = {"cp": "context", "pp": "pipeline"}[first]
        return lambda c: c.lora and cut(c, dimension)
    return lambda c: c.lora and c.sizes["sequence"]


BREAKS |= {name: Break(patch, _shows(name)) for name, patch in cut_rank.BREAKS.items()}
