"""Mistakes that the oracle must see: what each replaces, and which cases can show it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import cut_rank
from oracle.cases import MIXTURES, Case
from tandem.families.arch import EXPERT_TARGETS
from tandem.model import experts, gradients, logprobs
from tandem.model import policy as policy_module
from tandem.model.layer import blocks, kernels
from tandem.model.layer.blocks import Block
from tandem.model.layer.moe_block import MoeBlock
from tandem.model.lora import LoraLinear
from tandem.training.optimizer import AdapterOptimizer
from tandem.training.sharded_adam import ShardedAdam


@dataclass(frozen=True)
class Break:
    patch: tuple[Any, str, Any]
    shows: Callable[[Case], object]
    """Whether a case can show it."""


def nothing(*_: object) -> None:
    pass


def unrotated(gradients, qkv, shape, cos, sin):
    return HEAD_NORM_GRADIENTS(gradients, qkv, shape, cos, -sin)


def swapped(*arguments):
    return HEAD_NORM_GRADIENTS(*arguments)[::-1]


def last_only(self, indices, values, accumulate=False):
    return INDEX_PUT(self, indices, values, accumulate=False)


def matrices_only(parameter) -> bool:
    return WANTED(parameter) and parameter.ndim > 1


def not_of_the_vocabulary(parameter, left, right):
    if len(parameter) != 260:
        ADD_PRODUCT(parameter, left, right)


def not_of_the_router(self, routing, _of_probs):
    return torch.zeros(len(routing.probs), self._shape.num_experts)


def late(self, part, *arguments):
    """Adam's bias correction is that of the next step."""
    self.steps += 1
    UPDATE(self, part, *arguments)
    self.steps -= 1


def decayed(self, part, *arguments):
    UPDATE(self, replace(part, decays=True), *arguments)


def unclipped(self, part, offset, length, _scale, rate):
    UPDATE(self, part, offset, length, 1.0, rate)


def first_expert_only(left, right, ends):
    outer = GROUPED_OUTER(left, right, ends)
    return torch.cat([outer[:1], torch.zeros_like(outer[1:])])


def slots_as_positions(row, topology):
    row = DEALT(row, topology)
    return replace(row, positions=torch.arange(len(row.positions)))


def siblings_are_seen(ends, *arguments, **options):
    return TREE_PARAMS(torch.full_like(ends, len(ends)), *arguments, **options)


def longer_window(ends, kernel, rotation, window=None, deal=None):
    return TREE_PARAMS(ends, kernel, rotation, None if window is None else window + 1, deal)


def without_temperature(*arguments, **options):
    return ITEM_LOGPROBS(*arguments, **{**options, "temperature": 1.0})


def first_vocabulary(*arguments, **options):
    return ITEM_LOGPROBS(*arguments, **{**options, "vocab_start": 0})


def entropy_without_gradient(ctx, of_logprobs, of_entropy):
    return STATISTICS_BACKWARD(ctx, of_logprobs, torch.zeros_like(of_entropy))


def other_scale(q, k, v, row, scale, *rest):
    return ATTEND(q, k, v, row, 1.1 * scale, *rest)


def without_sinks(q, k, v, row, scale, _sinks):
    return ATTEND(q, k, v, row, scale, None)


def without_embedding_scale(gpt, tokens, arch, topology):
    return EMBEDDED(gpt, tokens, replace(arch, embedding_scale=None), topology)


def without_rope_factor(positions, frequencies, dtype, _factor):
    return ROTATION(positions, frequencies, dtype, 1.0)


def twice(self, dtype):
    return 2 * B(self, dtype)


def other_epsilon(x, weight, _eps):
    return RMS_NORM(x, weight, 1e-2)


def not_summed(self):
    """Each rank keeps its own."""


def summed_twice(self):
    REDUCE(self)
    for parameter in self.parameters.values():
        parameter.grad.mul_(2)


def never_clipped(self, _norm, rate):
    STEP(self, 0.0, rate)


def slower(self, norm, rate):
    STEP(self, norm, 0.99 * rate)


DEALT, TREE_PARAMS, ITEM_LOGPROBS = policy_module.dealt, policy_module.tree_params, policy_module.item_logprobs
EMBEDDED, ROTATION, ATTEND, B = policy_module.embedded, policy_module.rotation, blocks.attend, LoraLinear._b
STATISTICS_BACKWARD, RMS_NORM = logprobs._Statistics.backward, kernels.rms_norm
REDUCE, STEP = AdapterOptimizer.reduce_gradients, AdapterOptimizer.step
HEAD_NORM_GRADIENTS, WANTED, ADD_PRODUCT = kernels.head_norm_gradients, gradients.wanted, gradients.add_product
INDEX_PUT, UPDATE, GROUPED_OUTER = torch.Tensor.index_put_, ShardedAdam._update, experts.grouped_outer


def of_experts(case: Case) -> bool:
    return case.family in MIXTURES and case.lora is not None and bool(set(case.lora.targets) & set(EXPERT_TARGETS))


def full(*families: str) -> Callable[[Case], object]:
    return lambda case: case.lora is None and case.world == 1 and (not families or case.family in families)


def cut(case: Case, dimension: str) -> bool:
    return case.sizes.get(dimension, 1) > 1


ANY = {
    "positions count slots, not the path": Break(
        (policy_module, "dealt", slots_as_positions), lambda c: not cut(c, "context"),
    ),
    "siblings are seen": Break((policy_module, "tree_params", siblings_are_seen), lambda _: True),
    "a window is a token longer": Break(
        (policy_module, "tree_params", longer_window),
        lambda c: c.config.get("sliding_window") and c.family == "mistral",
    ),
    "the temperature is ignored": Break(
        (policy_module, "item_logprobs", without_temperature), lambda c: c.temperature != 1,
    ),
    "each rank's vocabulary begins at 0": Break(
        (policy_module, "item_logprobs", first_vocabulary), lambda c: cut(c, "tensor"),
    ),
    "the entropy has no gradient": Break(
        (logprobs._Statistics, "backward", staticmethod(entropy_without_gradient)), lambda _: True,
    ),
    "attention is scaled otherwise": Break((blocks, "attend", other_scale), lambda _: True),
    "sinks are left out": Break((blocks, "attend", without_sinks), lambda c: c.family == "gpt_oss"),
    "embeddings are not scaled": Break(
        (policy_module, "embedded", without_embedding_scale), lambda c: c.family == "gemma3_text",
    ),
    "YaRN's factor is left out": Break(
        (policy_module, "rotation", without_rope_factor), lambda c: c.family == "gpt_oss",
    ),
    "norms have another epsilon": Break((kernels, "rms_norm", other_epsilon), lambda _: True),
    "the adapter counts twice": Break((LoraLinear, "_b", twice), lambda c: c.lora and "q_proj" in c.lora.targets),
    "data ranks' gradients are not summed": Break(
        (AdapterOptimizer, "reduce_gradients", not_summed), lambda c: c.lora and cut(c, "data"),
    ),
    "gradients count twice": Break((AdapterOptimizer, "reduce_gradients", summed_twice), lambda c: c.lora),
    "adapters' gradients are not clipped": Break((AdapterOptimizer, "step", never_clipped), lambda c: c.lora),
    "the learning rate is 1 % lower": Break((AdapterOptimizer, "step", slower), lambda c: c.lora),
}  # fmt: skip
"""Wherever the model runs."""
FULL = {
    "norms have no gradient": Break((blocks, "_add_norm_gradient", nothing), full()),
    "norms after a block are passed over": Break(
        (Block, "_unnormalised", lambda _self, gradient, *_: gradient), full("gemma3_text")
    ),
    "biases have no gradient": Break((gradients, "wanted", matrices_only), full("qwen2")),
    "heads' norms: RoPE is not undone": Break((kernels, "head_norm_gradients", unrotated), full("qwen3")),
    "heads' norms: those of queries and keys are swapped": Break(
        (kernels, "head_norm_gradients", swapped), full("qwen3")
    ),
    "embedding: a token counts once": Break((torch.Tensor, "index_put_", last_only), full()),
    "output layer has no gradient": Break((gradients, "add_product", not_of_the_vocabulary), full()),
    "tied output layer has no gradient": Break(
        (gradients, "add_product", not_of_the_vocabulary),
        lambda c: full()(c) and c.config["tie_word_embeddings"],
    ),
    "experts: only the first has a gradient": Break((experts, "grouped_outer", first_expert_only), full("qwen3_moe")),
    "router has no gradient": Break((MoeBlock, "_logits_gradient", not_of_the_router), full("qwen3_moe")),
    "Adam: bias correction of the next step": Break((ShardedAdam, "_update", late), full()),
    "Adam: vectors decay": Break((ShardedAdam, "_update", decayed), full()),
    "Adam: gradients are not clipped": Break((ShardedAdam, "_update", unclipped), full()),
    "Adam: steps are not counted": Break((ShardedAdam, "steps", property(lambda _: 1, nothing)), full()),
    "sp: norms' gradients of the ranks' tokens are not summed": Break(
        (ShardedAdam, "_sum_over_tensor_ranks", nothing), lambda c: c.lora is None and c.sizes["sequence"]
    ),
    "tp: heads' norms' gradients are not summed": Break(
        (ShardedAdam, "_sum_over_tensor_ranks", nothing),
        lambda c: c.lora is None and c.family == "qwen3" and cut(c, "tensor") and not c.sizes["sequence"],
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
    "experts are summed over the wrong ranks": Break(
        (ShardedAdam, "_group", lambda self, _: self._topology.data), lambda c: c.lora is None and cut(c, "expert")
    ),
}
"""Where all weights are trained."""


def _shows(name: str) -> Callable[[Case], object]:
    """Which cases show a break of `cut_rank.BREAKS`; all of them train adapters."""
    first = name.partition(":")[0]
    if name.startswith("bias"):
        dimension = "expert_tensor" if "experts" in name else "tensor"
        return lambda c: c.family == "gpt_oss" and cut(c, dimension)
    if name == "the norm counts copies" or first == "etp" or name.startswith("ep: experts"):
        dimension = "expert_tensor" if first == "etp" else "expert"
        return lambda c: of_experts(c) and cut(c, dimension)
    if first == "ep" or name.startswith("the residual"):
        return lambda c: c.lora and cut(c, "expert")
    if first == "shared expert":
        return lambda c: c.family == "glm4_moe" and c.sizes["sequence"] and "q_proj" in c.lora.targets
    if first in ("cp", "pp"):
        dimension = {"cp": "context", "pp": "pipeline"}[first]
        return lambda c: c.lora and cut(c, dimension)
    return lambda c: c.lora and c.sizes["sequence"]


TOPOLOGIES = {name: Break(patch, _shows(name)) for name, patch in cut_rank.BREAKS.items()}
BREAKS = {**ANY, **FULL, **TOPOLOGIES}
