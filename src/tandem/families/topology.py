"""How a model is cut over ranks: the sizes of the parallel dimensions, and each rank's place in
them. No torch."""

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product

from tandem.config import Settings
from tandem.errors import InvalidInput
from tandem.families.arch import Arch

_CHOSEN = ("tensor", "sequence", "context", "pipeline", "expert", "expert_tensor")
"""Fields of `Sizes` that settings choose; the number of ranks gives `data`."""


@dataclass(frozen=True)
class Place:
    """One rank's number in each dimension of its `Sizes`, from 0."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


@dataclass(frozen=True)
class Sizes:
    """Numbers of ranks in each parallel dimension.

    Ranks count through the tensor dimension first, then context, data and pipeline. In the experts
    of a mixture, the ranks of one pipeline stage count through expert_tensor first, then expert and
    expert_data. Both are Megatron-core's order (`parallel_state.initialize_model_parallel`).
    """

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1
    expert_tensor: int = 1
    expert: int = 1
    sequence: bool = False
    """Tensor-parallel ranks divide the tokens of what is not cut by features (sequence
    parallelism)."""

    @classmethod
    def of(cls, settings: Settings) -> "Sizes":
        """Those of the trainer's ranks."""
        sizes = cls(**{name: getattr(settings, f"{name}_parallel") for name in _CHOSEN})
        return replace(sizes, data=settings.trainer_ranks // sizes.world)

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def world(self) -> int:
        return self.stage * self.pipeline

    @property
    def experts(self) -> int:
        """Ranks that a mixture's experts are cut over. They are consecutive, and gather their
        tokens."""
        return self.expert_tensor * self.expert

    @property
    def experts_apart(self) -> bool:
        """Whether other ranks than those of the data dimension hold the same part of the same
        experts."""
        return self.experts > 1 or self.tensor > 1

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same part of the same experts."""
        return self.stage // self.experts

    @property
    def layers_shared(self) -> bool:
        """Whether a rank computes its layers together with others, which wait for it in
        collectives."""
        return self.world > self.data or self.experts > 1

    def place(self, rank: int) -> Place:
        in_stage = rank % self.stage
        rest = in_stage // self.tensor
        expert_rest = in_stage // self.expert_tensor
        return Place(
            tensor=in_stage % self.tensor,
            context=rest % self.context,
            data=rest // self.context,
            pipeline=rank // self.stage,
            expert_tensor=in_stage % self.expert_tensor,
            expert=expert_rest % self.expert,
            expert_data=expert_rest // self.expert,
        )

    def layers(self, count: int, stage: int) -> range:
        """Which of `count` layers a pipeline stage has. Where they don't divide evenly the last
        stage, which has the output layer too, has the fewest."""
        return range(-(-count * stage // self.pipeline), -(-count * (stage + 1) // self.pipeline))

    def manifest(self) -> dict[str, int]:
        """What a checkpoint's manifest records."""
        return {"world_size": self.world} | {name: int(size) for name, size in asdict(self).items()}

    def fields(self) -> dict[str, int]:
        """The fields of `Settings` that choose these sizes for a known number of ranks."""
        return {f"{name}_parallel": getattr(self, name) for name in _CHOSEN}

    def variables(self) -> dict[str, str]:
        """`fields` as environment variables."""
        return {f"TANDEM_{name.upper()}": str(int(size)) for name, size in self.fields().items()}

    def settings(self) -> str:
        """`variables` in a line."""
        return " ".join(f"{name}={size}" for name, size in self.variables().items())


def on_stage(parameter: str, arch: Arch, sizes: Sizes, stage: int) -> bool:
    """Whether a pipeline stage has the parameter of a `WeightRule`. A tied table is on the first
    stage and the last."""
    if layer := re.search(r"layers\.(\d+)\.", parameter):
        return int(layer[1]) in sizes.layers(arch.num_layers, stage)
    first, last = stage == 0, stage == sizes.pipeline - 1
    return (first or (last and arch.tie_embeddings)) if parameter.startswith("embedding.") else last


def check(arch: Arch, sizes: Sizes) -> None:
    """Raise InvalidInput if the trainer can't cut the model so; it names the reason and the nearest
    sizes that work."""
    if found := problem(arch, sizes):
        field, reason = found
        # Data parallelism always.
        works = [other for other in of_world(sizes.world) if problem(arch, other) is None]
        nearest = min(works, key=lambda other: _distance(sizes, other)).settings()
        raise InvalidInput(
            f"{reason}. The nearest that works on {sizes.world} ranks: {nearest}", field=field
        )


def problem(arch: Arch, sizes: Sizes) -> tuple[str, str] | None:
    """Why the trainer can't cut the model so: the setting, and the reason; None: it can."""
    ranks, moe = f"{sizes.tensor} tensor-parallel ranks", arch.moe
    for parts, size in (
        ("key/value heads", arch.num_kv_heads),
        ("MLP features", arch.ffn_hidden_size if moe is None or moe.dense_layers else 0),
        ("features of the shared expert", moe.shared_size if moe else 0),
        ("vocabulary entries", arch.vocab_size),
    ):
        if size % sizes.tensor:
            return "tensor_parallel", f"{size} {parts} don't divide over {ranks}"
    if sizes.pipeline > arch.num_layers:
        return (
            "pipeline_parallel",
            f"{arch.num_layers} layers don't divide over {sizes.pipeline} pipeline stages",
        )
    if sizes.sequence and sizes.tensor == 1:
        return (
            "sequence_parallel",
            "sequence parallelism divides tokens over tensor-parallel ranks, and there is 1",
        )
    if moe is None:
        dense = f"{arch.model_type} has no experts that {sizes.experts} ranks could divide"
        return ("expert_parallel", dense) if sizes.experts > 1 else None
    if sizes.stage % sizes.experts:
        return (
            "expert_parallel",
            f"{sizes.stage} ranks don't divide into groups of {sizes.experts} for the experts",
        )
    if moe.num_experts % sizes.expert:
        return (
            "expert_parallel",
            f"{moe.num_experts} experts don't divide over {sizes.expert} expert-parallel ranks",
        )
    if moe.ffn_hidden_size % sizes.expert_tensor:
        reason = (
            f"{moe.ffn_hidden_size} features of an expert don't divide over {sizes.expert_tensor}"
            " ranks"
        )
        return "expert_tensor_parallel", reason
    if sizes.tensor > 1 and not sizes.sequence:
        return (
            "sequence_parallel",
            f"a mixture of experts on {ranks} needs TANDEM_SEQUENCE_PARALLEL=1",
        )
    return None


def of_world(world: int) -> Iterator[Sizes]:
    """All sizes of so many ranks."""
    divisors = [number for number in range(1, world + 1) if world % number == 0]
    for tensor, context, pipeline, expert_tensor, expert in product(divisors, repeat=5):
        data, rest = divmod(world, tensor * context * pipeline)
        if rest == 0 and (tensor * context * data) % (expert_tensor * expert) == 0:
            for sequence in {False, tensor > 1}:
                yield Sizes(tensor, context, data, pipeline, expert_tensor, expert, sequence)


def _distance(one: Sizes, other: Sizes) -> float:
    """How many halvings and doublings lie between them; a changed number of model copies weighs
    less, sequence parallelism least."""
    ratios = {
        name: abs(math.log2(size / getattr(other, name)))
        for name, size in asdict(one).items()
        if name != "sequence"
    }
    return sum(ratios.values()) - 0.5 * ratios["data"] + 0.1 * (one.sequence != other.sequence)
