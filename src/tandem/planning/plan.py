"""Plans topologies: finds the topologies that fit a model on a number of GPUs, estimates the speed
of each, and chooses one. The module imports no torch.

The estimated time of a step is the time of the model's operations plus the time to exchange bytes.
The rates of the operations were measured on one H200 (bench/results/train.json). The bandwidth is
assumed. The estimated speed is multiplied by `SHARES`: the fraction of the estimate that two ranks
reached in a measurement (bench/results/topologies.json).
"""

import math
from dataclasses import dataclass

from tandem.config import Settings
from tandem.errors import InvalidInput
from tandem.families.adapter import adapts_experts, default_targets
from tandem.families.arch import EXPERT_TARGETS, Arch
from tandem.families.decoder import attention_features
from tandem.families.registry import read_arch
from tandem.planning.checks import refusal
from tandem.planning.memory import GIB, Memory, Workload, fullest, stages
from tandem.spool.schema import LoraShape
from tandem.topology.sizes import Sizes, all_sizes

DENSE_RATE = 567e12
"""Operations per second of linear layers, including norms and RoPE. Measured with Qwen3-8B's shape,
one row of 8192 slots, and layers that keep everything. Attention takes 34 % of 0.663 s
(docs/performance.md)."""
ATTENTION_RATE = 307e12
"""Operations per second of the attention, measured in the same step as DENSE_RATE."""
WIDE_HEADS_RATE = 137e12
"""Operations per second of attention with heads of more than 128 features, measured with heads of
256 in a step of Qwen3.5-9B's shape (`bench/results/families.json`)."""
DELTA_RATE = 5.1e9
"""Slots times value features per second that a delta net computes between its input and output
projections, forward and backward, measured in the same step as WIDE_HEADS_RATE."""
EXPERTS_RATE = 361e12
"""Operations per second of a mixture's linear layers with LoRA on attention. Measured with
30B-A3B's shape; attention takes 51 % of the time."""
ADAPTED_EXPERTS_RATE = 260e12
"""Operations per second of a mixture's linear layers with LoRA on all experts."""
EXCHANGE_RATE = 300e9
"""Bytes per second that a GPU exchanges with other GPUs in a collective operation. The number is an
assumption: two thirds of NVLink 4's 450 GB/s per direction. Computation is assumed not to overlap
with collective operations."""
SHARES = {
    "tensor": 0.95,
    "sequence": 0.82,
    "pipeline": 0.82,
    "expert": 0.80,
    "expert_tensor": 0.80,
    "context": 1.0,
}
"""For each dimension: the speed measured with two ranks, divided by the speed estimated from
operations and bytes. `context` was measured together with DP=2 (bench/results/topologies-4.json).
`expert_tensor` was not measured. Ranks of ETP exchange as many bytes as ranks of EP, and their
products are smaller."""
MIXTURES_SEQUENCE_SHARE = 0.60
"""The quotient of measured and estimated speed for a mixture of experts with sequence parallelism:
the products of the mixture's experts get half the rows."""
ADAM_RATE = 200e9
"""Bytes of its Adam state (`Memory.optimizer`) that a rank updates per second if all weights are
trained. The time includes the norm of the gradient. In a step of 8B, the update takes 0.43 s on one
GPU and 0.18 s on two GPUs (bench/results/train-full.json, topologies.json)."""
LAUNCH_SECONDS = 3.5e-3
"""The shortest time in seconds of a layer's forward and backward pass, even for the shortest row:
the time of Python and of launching the layer's kernels. Measured with Qwen3-0.6B's shape and rows
of 2048 slots on an H100's host (bench/results/small-jobs.json)."""
UNMEASURED = 0.9
"""The factor by which the estimated speed of a topology that was not measured is multiplied, when
the topology is compared with a measured topology."""
ROW = 8192
"""Slots of the rows for which `TANDEM_TOPOLOGY=auto` plans."""
_BF16 = 2


@dataclass(frozen=True)
class Candidate:
    """A topology that the trainer builds, on GPUs of a given size."""

    sizes: Sizes
    # The fields `memory` and `levels` describe the fullest pipeline stage.
    memory: Memory
    levels: tuple[int, int] | None  # See `Memory.levels`; None if the topology does not fit.
    # Speed of all GPUs together, limited by the slowest pipeline stage; 0 if the topology does not
    # fit.
    tokens_per_second: float
    measured: bool  # whether the estimate needs no assumed rate or bandwidth

    @property
    def total(self) -> int:
        """Bytes that the topology takes on a rank's GPU. If the topology does not fit, the value is
        the least number of bytes that the topology needs."""
        return self.memory.total(self.levels or (0, 0))


@dataclass(frozen=True)
class Plan:
    candidates: list[Candidate]  # candidates that fit come first, sorted by descending speed
    why: str

    @property
    def recommended(self) -> Candidate:
        return self.candidates[0]


def plan(workload: Workload, gpus: int, gpu_memory: float) -> Plan:
    """All topologies that the trainer can build on the given GPUs. Raises InvalidInput if no
    topology fits.

    Args:
        gpus: the number of GPUs. Each topology uses all GPUs.
        gpu_memory: bytes of each GPU.
    """
    found = [
        _candidate(workload, sizes, gpu_memory)
        for sizes in all_sizes(gpus)
        if refusal(workload.arch, sizes) is None
    ]
    found.sort(key=_order)
    fitting = [one for one in found if one.levels is not None]
    if not fitting:
        smallest = min(found, key=lambda one: one.total)
        need = (
            f"the smallest, {describe(smallest.sizes)}, needs {smallest.total / GIB:.1f} GiB"
            " per GPU"
        )
        remedy = "use more GPUs, larger ones, or shorter rows (--sequence-length)"
        raise InvalidInput(
            f"no topology of {gpus} GPUs fits {gpu_memory / GIB:.1f} GiB: {need}; {remedy}"
        )
    return Plan(found, _why(found, fitting))


def servers_to_keep_busy(trained: float, generated: float, share: float) -> int:
    """The smallest number of inference servers that together generate tokens as fast as a trainer
    trains them.

    A prompt that trajectories share takes its slots only once, and its tokens are not generated.

    Args:
        trained: slots that the trainer trains per second.
        generated: new tokens that one server generates per second.
        share: the fraction of the slots that hold generated tokens.
    """
    return max(1, math.ceil(trained * share / generated))


def automatic(settings: Settings, gpu_memory: int) -> Plan:
    """The choice of `TANDEM_TOPOLOGY=auto` for the trainer's ranks: the first topology of the plan.
    The plan is for rows of `ROW` slots, or of fewer slots if the model has fewer positions. The
    plan's adapter has the rank `max_lora_rank`. The targets are the default targets, and with
    `expert_lora` also the experts' layers (unless `MoE.fused_adapters` is true). The argument
    `gpu_memory` is the memory in bytes of the smallest of the ranks' GPUs. Raises InvalidInput if
    `gpu_memory` is 0 or no topology fits."""
    if gpu_memory == 0:
        problem = (
            "auto plans the memory of GPUs, and the trainer has none whose memory is known; leave"
            " it out"
        )
        raise InvalidInput(problem, field="TANDEM_TOPOLOGY")
    arch = read_arch(settings.model_path())
    expert_targets = (
        EXPERT_TARGETS if settings.expert_lora and arch.moe and not arch.moe.fused_adapters else ()
    )
    targets = (*default_targets(arch), *expert_targets)
    lora = LoraShape.model_validate({"rank": settings.max_lora_rank, "targets": targets})
    return plan(
        Workload(arch, lora, min(ROW, arch.max_positions)), settings.trainer_ranks, gpu_memory
    )


def describe(sizes: Sizes) -> str:
    """The parallel dimensions that have several ranks, as a text such as `TP=2+SP EP=4`."""
    names = {
        "TP": sizes.tensor,
        "CP": sizes.context,
        "PP": sizes.pipeline,
        "EP": sizes.expert,
        "ETP": sizes.expert_tensor,
        "DP": sizes.data,
    }
    parts = [
        f"{name}={size}" + "+SP" * (name == "TP" and sizes.sequence)
        for name, size in names.items()
        if size > 1
    ]
    return " ".join(parts) or "1 GPU"


def _candidate(workload: Workload, sizes: Sizes, gpu_memory: float) -> Candidate:
    found = [(stage, stage.levels(gpu_memory)) for stage in stages(workload, sizes)]
    fitting = [(stage, levels) for stage, levels in found if levels is not None]
    if len(fitting) < len(found):
        needs, levels, speed = fullest(stage for stage, _ in found), None, 0.0
    else:
        needs, levels = max(fitting, key=lambda stage: stage[0].total(stage[1]))
        slowest = max(_step_seconds(workload, sizes, *stage) for stage in fitting)
        speed = _share(workload, sizes) * workload.sequence_length * workload.rows / slowest
    data_only = sizes == Sizes(data=sizes.data) and workload.lora is not None
    data_only = data_only and workload.arch.gdn is None and workload.arch.mla is None
    return Candidate(sizes, needs, levels, speed, measured=data_only)


def _share(workload: Workload, sizes: Sizes) -> float:
    share = 1.0
    for dimension, share_of_two in SHARES.items():
        if dimension == "sequence" and workload.arch.moe is not None:
            share_of_two = MIXTURES_SEQUENCE_SHARE
        share *= (
            share_of_two
            if getattr(sizes, dimension) > 1 or (dimension == "sequence" and sizes.sequence)
            else 1.0
        )
    return share


def _step_seconds(
    workload: Workload, sizes: Sizes, needs: Memory, levels: tuple[int, int]
) -> float:
    """Seconds of one optimizer step. With LoRA, the estimate leaves out the 2 ms of Adam's
    update."""
    arch, slots, hidden, moe = (
        workload.arch,
        workload.sequence_length,
        workload.arch.hidden_size,
        workload.arch.moe,
    )
    # The number of weights of a layer that each token uses.
    mlp = (
        arch.ffn_hidden_size
        if moe is None
        else moe.ffn_hidden_size * moe.experts_per_token + moe.shared_size
    )
    qkv, proj = _attention_weights(arch)
    gate_up, down = 2 * hidden * mlp, hidden * mlp
    layer = qkv + proj + gate_up + down
    router = 0 if moe is None else hidden * moe.num_experts
    # Operations of a row's forward pass (`bench/train.py`).
    linear = 2.0 * (layer + router) * arch.num_layers * slots
    head = 2.0 * hidden * arch.vocab_size * slots
    # The attention is causal: it computes half of all products of queries with keys, and half of
    # all products with values.
    attention = slots**2 * _features_that_see_all(arch, slots)
    # Passes over the weights: the forward pass, the gradients of activations and, if all weights
    # are trained, the gradients of weights.
    passes = 3 if workload.lora is None else 2
    rate = DENSE_RATE
    if moe is not None:
        rate = (
            ADAPTED_EXPERTS_RATE
            if workload.lora is None or adapts_experts(workload.lora)
            else EXPERTS_RATE
        )
    everything, some = levels
    least = needs.layers - everything - some
    # The recomputation as a fraction of a forward pass. Layers that keep only their input recompute
    # everything except the down projection.
    recomputed = (least * (qkv + proj + gate_up) + some * gate_up) / (layer * needs.layers)
    attention_rate = WIDE_HEADS_RATE if arch.head_dim > 128 else ATTENTION_RATE
    seconds = (
        linear * (passes + recomputed) + head * passes
    ) / rate + 3.5 * attention / attention_rate
    if (gdn := arch.gdn) is not None:
        seconds += slots * gdn.value_size * sum(gdn.layers) / DELTA_RATE
    seconds = (
        seconds / (sizes.tensor * sizes.context * sizes.pipeline)
        + _exchange_bytes(workload, sizes) / EXCHANGE_RATE
    )
    seconds = max(seconds, LAUNCH_SECONDS * needs.layers)
    rows = -(-workload.rows // sizes.data)
    # The pipeline is not full at the beginning and the end of a step.
    step = seconds * (rows + sizes.pipeline - 1)
    if workload.lora is None:
        step += needs.optimizer / ADAM_RATE
        if sizes.data * sizes.context > 1:
            # The ranks sum the gradients, and gather the updated weights.
            step += (needs.gradients + needs.weights) / EXCHANGE_RATE
    return step


def _attention_weights(arch: Arch) -> tuple[float, float]:
    """The numbers of weights in the products before and after the attention (or the delta net),
    averaged over layers. The delta rule itself is not counted."""
    kinds = arch.kinds
    features = sum(sum(attention_features(kind).values()) for kind in kinds) / len(kinds)
    before = arch.hidden_size * features
    after = arch.hidden_size * sum(kind.output_size for kind in kinds) / len(kinds)
    if (mla := arch.mla) is not None:
        up = (mla.q_rank or arch.hidden_size) * arch.query_size
        up += mla.kv_rank * arch.num_heads * mla.key_value_size
        return arch.hidden_size * sum(mla.down.values()) + up, after
    if (gdn := arch.gdn) is None:
        return before, after
    share = sum(gdn.layers) / arch.num_layers
    of_nets = sum(gdn.sections) + gdn.value_size + 2 * gdn.value_heads
    return (
        share * arch.hidden_size * of_nets + (1 - share) * before,
        share * arch.hidden_size * gdn.value_size + (1 - share) * after,
    )


def _features_that_see_all(arch: Arch, slots: int) -> float:
    """The number of features of queries and of attention outputs, summed over all layers. The
    features of a layer with a window are multiplied by the fraction of query-key pairs that the
    window leaves. The fraction assumes that each row is one sequence."""
    if arch.gdn is not None:
        return (arch.query_size + arch.output_size) * arch.gdn.layers.count(False)
    seen = 1.0
    if arch.window is not None:
        seen -= max(0.0, 1 - arch.window.tokens / slots) ** 2
    layers = [arch.of_layer(layer) for layer in range(arch.num_layers)]
    windowed = arch.window.layers if arch.window is not None else [False] * len(layers)
    return sum(
        (layer.query_size + layer.output_size) * (seen if narrow else 1.0)
        for layer, narrow in zip(layers, windowed, strict=True)
    )


def _exchange_bytes(workload: Workload, sizes: Sizes) -> float:
    """The bytes that a rank exchanges for a row, in the forward and the backward pass together."""
    arch, slots = workload.arch, workload.sequence_length / sizes.context
    layers = arch.num_layers / sizes.pipeline

    def gathered(group: int, elements: float) -> float:
        return elements * (group - 1) / group * _BF16

    # The residual stream is summed twice in the forward and twice in the backward pass. Each sum is
    # a reduce-scatter and an all-gather.
    layer = 8 * gathered(sizes.tensor, slots * arch.hidden_size)
    # Keys and values are gathered in the forward pass and again in the backward pass, and their
    # gradients are exchanged.
    layer += 3 * gathered(sizes.context, workload.sequence_length * 2 * arch.kv_size / sizes.tensor)
    if arch.moe is not None:
        # Expert-parallel ranks gather tokens and scatter sums, in the forward and in the backward
        # pass.
        rank_slots = slots / (sizes.tensor if sizes.sequence else 1)
        expert_ranks = sizes.expert_ranks
        layer += 4 * gathered(expert_ranks, rank_slots * expert_ranks * arch.hidden_size)
    between = 2 * slots * arch.hidden_size * _BF16 if sizes.pipeline > 1 else 0
    return layers * layer + between


def _order(one: Candidate) -> tuple[float, int, int]:
    """The sort key of candidates. The fastest candidate comes first. If a topology was not
    measured, its speed counts a tenth less. Equally fast candidates are sorted by the number of
    parts of each expert, the smallest first, because larger parts have larger matrix products. The
    last criterion is the memory, the smallest first."""
    worth = one.tokens_per_second * (1 if one.measured else UNMEASURED)
    return -round(worth), one.sizes.expert_tensor, one.total


def _why(found: list[Candidate], fitting: list[Candidate]) -> str:
    best = fitting[0]
    name, full_layers = (
        describe(best.sizes),
        f"{best.levels[0] if best.levels else 0} of {best.memory.layers}",
    )
    if len(found) == 1:
        return (
            f"{name} is the only topology that the trainer builds for this model on so many GPUs."
        )
    also = f"its layers keep everything for the backward pass in {full_layers}"
    if len(fitting) == 1:
        return f"{name} is the only one of {len(found)} topologies that fits; {also}."
    if best.tokens_per_second < max(one.tokens_per_second for one in fitting):
        near = (
            "its speed was measured, and no other of the {} that fit is expected to be much faster"
        )
        return f"{name} is recommended because {near.format(len(fitting))}; {also}."
    return (
        f"{name} is expected to be the fastest of the {len(fitting)} topologies that fit; {also}."
    )
