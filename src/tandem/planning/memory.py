"""Computes the GPU memory of a rank, part by part, from the model's shape and the trainer's
`Sizes`. The module imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import NamedTuple

from tandem.families.adapter import adapts_experts, check_targets, in_targets, sums_experts_apart
from tandem.families.arch import Arch, GatedDeltaNet
from tandem.families.registry import weight_rules
from tandem.families.weight_rules import WeightRule, on_stage
from tandem.spool.schema import LoraShape
from tandem.topology.sizes import Sizes

GIB = 2**30
HEADROOM = 0.04
"""The fraction of the GPU's memory that stays free, because the allocator can't use every gap."""
CHUNK_ELEMENTS = 2**27
"""The number of elements of one chunk of logits on a rank: 256 MiB in bf16, and a few times as much
in fp32 on the CPU."""
CONTEXT = 760 * 2**20
"""Bytes of CUDA's context and loaded kernels: the only memory that a `resident` rank keeps between
jobs (docs/performance.md)."""
FIRST_CHANNEL = 832 * 2**20
"""Bytes of NCCL's memory for the first of a rank's `_channels`: the additional memory that was
measured on a rank of DP=2 (bench/results/topologies-groups.json)."""
FURTHER_CHANNEL = GIB // 2
"""Bytes of NCCL's memory for each further channel."""
TIED_TABLE = 3 * FURTHER_CHANNEL
"""Bytes of NCCL's memory for the group of the pipeline's first and last stage. The two stages sum
the gradient of a trained tied table and exchange the table's values. Measured: 1.59 GiB on the
first stage, with Qwen3-0.6B's shape."""
CLAMPED_SWIGLU, GEGLU = 25, 18
"""Extra bf16 elements per activated feature in the backward pass of GPT-OSS's and Gemma's
activations, because several kernels compute them in fp32 (`model/layer/kernels.py`)."""

DELTA_CHUNK = 64
"""Tokens of a chunk of the delta rule."""

_BF16, _INT16, _FP32 = 2, 2, 4


@dataclass(frozen=True)
class Workload:
    """Describes the training for which a topology is planned: the trained weights, and the rows.
    `lora` is the adapter's shape, or None if all weights are trained."""

    arch: Arch
    lora: LoraShape | None
    sequence_length: int
    rows: int = 8
    """The number of rows of one optimizer step, over all data-parallel ranks."""


class SavedBytes(NamedTuple):
    """For each `SaveLevel` of `model/layer/sublayers.py`, the bytes of a row that a layer keeps for
    its backward pass."""

    input: int
    attention: int
    all: int


def choose_levels(saved: SavedBytes, layers: int, budget: float) -> tuple[int, int]:
    """Two counts: the number of layers that keep everything, and the number of other layers that
    keep their attention block. The remaining layers keep only their inputs. The kept tensors fit
    into the budget. As many layers as possible keep everything. Keeping everything saves more time
    per byte than keeping the attention block alone.

    Args:
        saved: bytes of one layer at each level.
        layers: the number of layers.
        budget: bytes for the kept tensors of all layers together.
    """
    left = budget - layers * saved.input
    counts: list[int] = []
    for size in (saved.all, saved.attention):
        cost = size - saved.input
        counts.append(max(0, min(layers - sum(counts), int(left // cost) if cost > 0 else layers)))
        left -= counts[-1] * cost
    return counts[0], counts[1]


@dataclass(frozen=True)
class Memory:
    """GPU memory of one rank, in bytes. The rank has `layers` layers, which keep the activations
    of `in_flight` rows at the same time."""

    weights: int
    adapter: int
    gradients: int
    optimizer: int
    saved: SavedBytes
    layers: int
    in_flight: int
    logits: int  # The result of `logprobs.working_bytes`.
    # Extra memory of the backward pass of a layer that keeps everything, without the kept tensors.
    layer: int
    layer_recomputing: int  # As `layer`, but for a layer that keeps only its input.
    context: int  # Memory of CUDA and NCCL, outside of torch's allocator.
    # The value of `Sizes.layers_shared`. If `layers_shared` is true, `recompute=auto` leaves memory
    # for the pass of one more layer.
    shared: bool = False

    @property
    def states(self) -> int:
        return self.weights + self.adapter + self.gradients + self.optimizer

    def activations(self, levels: tuple[int, int]) -> int:
        """Bytes of the kept activations. The argument `levels` has the number of layers that keep
        everything, and the number of other layers that keep their attention block."""
        everything, attention = levels
        least = self.layers - everything - attention
        saved = (
            everything * self.saved.all
            + attention * self.saved.attention
            + least * self.saved.input
        )
        return saved * self.in_flight

    def working(self, levels: tuple[int, int]) -> int:
        """Bytes of the logits or of a layer's pass: the larger of both, because they do not exist
        at the same time."""
        return max(self.logits, self.layer if levels[0] == self.layers else self.layer_recomputing)

    def total(self, levels: tuple[int, int]) -> int:
        return self.states + self.activations(levels) + self.working(levels) + self.context

    def levels(self, gpu: float) -> tuple[int, int] | None:
        """The levels (as in `activations`) that `recompute=auto` chooses on a GPU with `gpu` bytes.
        Returns None if not even the layers' inputs fit."""
        budget = (
            (1 - HEADROOM) * (gpu - self.context)
            - self.states
            - max(self.logits, self.layer_recomputing)
        )
        budget -= self.layer_recomputing if self.shared else 0
        if budget < self.activations((0, 0)):
            return None
        return choose_levels(
            SavedBytes(*(self.in_flight * size for size in self.saved)), self.layers, budget
        )


def stages(workload: Workload, sizes: Sizes) -> list[Memory]:
    """The memory of each pipeline stage. Raises the errors of `check_targets`."""
    if workload.lora is not None:
        check_targets(workload.arch, workload.lora)
    return [_stage_memory(workload, sizes, stage) for stage in range(sizes.pipeline)]


def fullest(found: Iterable[Memory]) -> Memory:
    """The pipeline stage that needs the most memory if layers keep only their inputs."""
    return max(found, key=lambda stage: stage.total((0, 0)))


def rank_memory(workload: Workload, sizes: Sizes) -> Memory:
    """The memory of the `fullest` pipeline stage. Raises the errors of `check_targets`."""
    return fullest(stages(workload, sizes))


def _stage_memory(workload: Workload, sizes: Sizes, stage: int) -> Memory:
    arch = workload.arch
    layers = sizes.layers(arch.num_layers, stage)
    first, last = stage == 0, stage == sizes.pipeline - 1
    rules = [rule for rule in weight_rules(arch) if on_stage(rule.parameter, arch, sizes, stage)]
    dense = sum(prod(rule.shape(sizes)) for rule in rules if rule.num_experts is None)
    experts = sum(prod(rule.shape(sizes)) for rule in rules if rule.num_experts is not None)
    weights = (dense + experts) * _BF16
    if workload.lora is None:
        # As in `training/sharded_adam.py`: each rank has the fp32 gradient of its bfloat16 weights.
        # The int16 remainders of the master values and Adam's two fp32 moments are divided over the
        # ranks that hold the same weight.
        shares = dense / (sizes.data * sizes.context) + experts / sizes.expert_data
        adapter, gradients, optimizer = (
            0,
            (dense + experts) * _FP32,
            int(shares * (2 * _FP32 + _INT16)),
        )
    else:
        # As in `training/optimizer.py`: fp32 adapters are themselves the master weights. Gradients
        # and Adam's state are not divided over ranks.
        adapter = _adapter(rules, workload.lora, sizes) * _FP32
        gradients, optimizer = adapter, 2 * adapter
        adapter += _cast(rules, workload.lora, sizes) * _BF16
    saved, working, recomputing = _layers(workload, sizes, layers)
    # A stage keeps the activations of one row, and of one more row for each later stage.
    in_flight = min(sizes.pipeline - stage, max(1, workload.rows // sizes.data))
    slots = -(-workload.sequence_length // sizes.context)
    chunk = min(slots * arch.vocab_size // sizes.tensor, CHUNK_ELEMENTS)
    logits = (chunk + 4 * slots * arch.hidden_size) * _BF16  # assumes that every slot has a loss
    channels = _channels(workload, sizes)
    communicators = FIRST_CHANNEL + (channels - 1) * FURTHER_CHANNEL if channels else 0
    # A tied embedding's table is on the first and the last pipeline stage.
    if workload.lora is None and arch.tie_embeddings and first != last:
        communicators += TIED_TABLE
    return Memory(
        weights,
        adapter,
        gradients,
        optimizer,
        saved=saved,
        layers=len(layers),
        in_flight=in_flight,
        logits=logits if last else 0,
        layer=working,
        layer_recomputing=recomputing,
        context=CONTEXT + communicators,
        shared=sizes.layers_shared,
    )


def _channels(workload: Workload, sizes: Sizes) -> int:
    """The number of NCCL's memory allocations on a rank: one for each of the rank's process groups
    with several ranks (`parallel.Topology`). A group that also gathers or scatters tensors counts
    twice. A pipeline counts three times, as a measurement showed."""
    data = sizes.data * sizes.context
    channels = [sizes.tensor, sizes.context, sizes.context, data, *3 * [sizes.pipeline]]
    if sizes.sequence:
        channels.append(sizes.tensor)
    if workload.arch.moe is not None:
        channels += 2 * [sizes.expert_ranks]
        if sums_experts_apart(workload.arch, workload.lora, sizes):
            channels.append(sizes.expert_data)
        if workload.lora is not None and adapts_experts(workload.lora):
            channels.append(sizes.expert_tensor)
    return sum(size > 1 for size in channels)


def _adapter(rules: Iterable[WeightRule], lora: LoraShape, sizes: Sizes) -> int:
    """The number of elements of this rank's adapters. Either A or B of an adapter is cut over the
    tensor-parallel ranks (`model/lora.py`)."""
    total = 0
    for rule in rules:
        experts, cut = rule.num_experts or 1, rule.num_parts(sizes)
        a, b = (cut, 1) if rule.cut == "columns" else (1, cut)
        # All experts have equal shapes, so the sources of the first expert are enough.
        for name, shape in islice(rule.sources.items(), len(rule.sources) // experts):
            if in_targets(name, lora.targets):
                elements = lora.rank * (shape[1] // a + shape[0] // b)
                total += (
                    elements if rule.num_experts is None else experts * (elements // sizes.expert)
                )
    return total


def _cast(rules: Iterable[WeightRule], lora: LoraShape, sizes: Sizes) -> int:
    """The number of elements of the tensors that `Adapters.cast` returns on this rank, without the
    adapters of experts."""
    total = 0
    for rule in rules:
        if rule.num_experts is None and (
            targets := sum(in_targets(name, lora.targets) for name in rule.sources)
        ):
            total += targets * lora.rank * sum(rule.shape(sizes))
    return total


def _layers(workload: Workload, sizes: Sizes, layers: Iterable[int]) -> tuple[SavedBytes, int, int]:
    """Like `_layer`, but for a model that may also have layers with a delta net. The memory of kept
    tensors is averaged over layers. The memory of a pass is the maximum over layers."""
    saved, working, recomputing = _layer(workload, sizes)
    gdn, kinds = workload.arch.gdn, list(layers)
    share = sum(gdn.layers[index] for index in kinds) / len(kinds) if gdn else 0.0
    if gdn is None or share == 0:
        return saved, working, recomputing
    own, graph, passes = _delta_net(workload, gdn, sizes, saved)
    mixed = (int(share * a + (1 - share) * b) for a, b in zip(own, saved, strict=True))
    mlp = saved.all - saved.attention  # the MLP's backward pass frees these tensors before `passes`
    again = graph + passes + own.attention - own.input
    return SavedBytes(*mixed), max(working, passes - mlp), max(recomputing, again)


def _delta_net(
    workload: Workload, gdn: GatedDeltaNet, sizes: Sizes, others: SavedBytes
) -> tuple[SavedBytes, int, int]:
    """Memory in bytes of a layer with a delta net (`DeltaNetSublayer`, with
    flash-linear-attention). Returns `saved`, `graph` and `passes`. `saved` counts the tensors
    that the layer keeps. `graph` is the part of `saved` between the input and output projections.
    `passes` is the backward pass's extra memory between the projections. The sizes agree with
    measurements of Qwen3.5-9B's shape on an H200. `others`: bytes of a layer with attention."""
    slots, parts, hidden = workload.sequence_length, sizes.tensor, workload.arch.hidden_size
    own = -(-slots // parts) if sizes.sequence else slots  # number of slots in the residual stream
    features, value, heads = sum(gdn.sections) // parts, gdn.value_size // parts, gdn.value_heads
    heads //= parts
    targets = () if workload.lora is None else workload.lora.targets
    rank = 0 if workload.lora is None else workload.lora.rank
    wide = _FP32 // _BF16
    ranks_in = rank * sum(name.startswith("in_proj") for name in targets)
    down = rank * ("down_proj" in targets) * _mlp_rows(workload, sizes, slots, own)
    least = own * hidden + slots * (value + rank * ("out_proj" in targets)) + down
    attention = least + own * hidden + slots * (features + value + 2 * heads + ranks_in)
    # The terms of `graph` are: queries, keys and values; the triangular systems of chunks; the
    # heads' outputs; the heads' decays, rates and norms in fp32.
    fp32 = wide * (3 * heads + 2 * gdn.key_heads // parts)
    graph = slots * (features + DELTA_CHUNK * heads + value + fp32)
    # The terms of `passes` are: the states of all chunks, and the states' gradients; tensors with a
    # key or a value for each value head.
    states = gdn.key_head_dim * gdn.value_head_dim * heads // DELTA_CHUNK
    passes = slots * (2 * states + 6 * gdn.key_head_dim * heads + 7 * value)
    everything = attention + graph + (others.all - others.attention) // _BF16
    saved = SavedBytes(*(level * _BF16 for level in (least, attention, everything)))
    return saved, graph * _BF16, passes * _BF16


def _mlp_rows(workload: Workload, sizes: Sizes, slots: int, residual_slots: int) -> int:
    """The number of rows in the MLP's matrix products. For a mixture's experts, the number assumes
    that all experts get equally many rows. The ranks over which experts are cut gather each other's
    slots. Each rank computes the fraction 1 / `expert` of the rows of all gathered slots."""
    moe = workload.arch.moe
    return slots if moe is None else residual_slots * sizes.expert_tensor * moe.experts_per_token


def _layer(workload: Workload, sizes: Sizes) -> tuple[SavedBytes, int, int]:
    """Memory in bytes of a layer for one row. The first result is the tensors that the layer keeps
    (`AttentionSublayer`, `MlpSublayer` and `MoeSublayer` in `model/layer/`). The second result is
    the extra memory of the backward pass if the layer keeps everything. The third result is the
    extra memory of the backward pass if the layer keeps only its input."""
    arch, moe, hidden = workload.arch, workload.arch.moe, workload.arch.hidden_size

    def adapted(*targets: str) -> int:
        """The number of features of A x, summed over the adapters on `targets`."""
        return (
            0
            if workload.lora is None
            else workload.lora.rank * sum(target in workload.lora.targets for target in targets)
        )

    # The number of slots in this rank's attention and MLP.
    slots = -(-workload.sequence_length // sizes.context)
    # The number of slots whose residual stream is on this rank.
    residual_slots = -(-slots // sizes.tensor) if sizes.sequence else slots
    rows = _mlp_rows(workload, sizes, slots, residual_slots)
    features = (
        arch.ffn_hidden_size // sizes.tensor
        if moe is None
        else moe.ffn_hidden_size // sizes.expert_tensor
    )

    # Level INPUT keeps the layer's input, the attention's output with its fp32 log-sum-exp per
    # head, and the products `A x` of LoRA in o_proj and down_proj.
    kinds = arch.kinds
    query = sum(kind.output_size for kind in kinds) // len(kinds) // sizes.tensor
    sent = sum(kind.query_size + kind.kv_size + kind.value_size for kind in kinds)
    qkv = sent // len(kinds) // sizes.tensor
    gates = query if arch.output_gate else 0  # the gate is kept with the output or in qkv's rows
    least = (
        residual_slots * hidden
        + slots * (query + gates + adapted("o_proj"))
        + rows * adapted("down_proj")
    )
    # A layer with an MLP beside its experts also keeps two sums: of the experts' outputs, and of
    # the experts' and the MLP's outputs.
    if moe is not None and moe.beside_mlp:
        least += 2 * residual_slots * hidden
    # FlexAttention's own output is kept besides the output that includes the sinks.
    if arch.sinks:
        least += slots * query
    # Level ATTENTION also keeps the MLP's input, the fused qkv, A x of q, k and v, and the heads q,
    # k and v. Context-parallel ranks compute and gather the heads again instead of keeping them.
    made = 1 if sizes.context > 1 else 2
    attention = least + residual_slots * hidden
    if arch.mla is None:
        attention += slots * (made * qkv + adapted("q_proj", "k_proj", "v_proj"))
    else:  # MLA keeps the latents, A x of the latents' adapters, and the heads q, k and v
        latents = sum(arch.mla.down.values()) + adapted(*arch.mla.down)
        attention += residual_slots * latents + slots * qkv
    # Level ALL also keeps gate, up, and A x of the adapters on gate and up.
    everything = attention + rows * (2 * features + adapted("gate_proj", "up_proj"))
    log_sums = slots * arch.num_heads // sizes.tensor * _FP32
    saved = SavedBytes(*(level * _BF16 + log_sums for level in (least, attention, everything)))

    # The MLP's backward pass needs the activated features and their gradient, the gradient of the
    # MLP's output, and the normalised input. In a mixture, the output's gradient and the normalised
    # input exist once for each assignment of a token to an expert.
    working = 2 * rows * features + 2 * slots * hidden
    clamped = moe is not None and moe.biases
    working += (
        (CLAMPED_SWIGLU if clamped else GEGLU if arch.activation == "gelu_tanh" else 0)
        * rows
        * features
    )
    if moe is not None:
        working += 2 * rows * hidden
        if workload.lora is not None and adapts_experts(workload.lora):
            # The result of `Adapters.cast` for gate and up of all experts.
            adapters = adapted("gate_proj", "up_proj") * (hidden + 2 * features)
            working += moe.num_experts // sizes.expert * adapters
    # The backward pass of a layer that keeps only its input also needs gate, up, and the MLP's
    # input.
    recomputing = working + 2 * rows * features + 2 * slots * hidden
    if arch.mla is not None:
        # MLA's backward pass needs the gradients of the heads and of the heads' inputs. If the
        # layer keeps only its input, the pass also needs the heads and the heads' inputs. The sizes
        # are computed, not measured.
        gradients = slots * 2 * qkv + 2 * slots * hidden
        working, recomputing = max(working, gradients), max(recomputing, 2 * gradients)
    return saved, working * _BF16, recomputing * _BF16
