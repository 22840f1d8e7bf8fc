"""The sizes of the parallel dimensions, and each rank's place in them. The module imports no
torch."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product

from tandem.config import Settings

_CHOSEN = ("tensor", "sequence", "context", "pipeline", "expert", "expert_tensor")
"""The fields of `Sizes` that settings choose. The field `data` follows from these fields and the
number of ranks."""


@dataclass(frozen=True)
class Place:
    """One rank's index, from 0, in each parallel dimension."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


@dataclass(frozen=True)
class Sizes:
    """The number of ranks in each parallel dimension.

    Rank numbers increase along the tensor dimension first, then along context, data and pipeline.
    For a mixture's experts, the rank numbers of one pipeline stage increase along expert_tensor
    first, then along expert and expert_data. Megatron-core numbers ranks in the same way
    (`parallel_state.initialize_model_parallel`).
    """

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1
    expert_tensor: int = 1
    expert: int = 1
    sequence: bool = False
    """Sequence parallelism: for layers that are not split along their features, the tokens are
    split among the tensor-parallel ranks."""

    @classmethod
    def of(cls, settings: Settings) -> "Sizes":
        """The sizes that `settings` choose for the trainer's ranks."""
        sizes = cls(**{name: getattr(settings, f"{name}_parallel") for name in _CHOSEN})
        return replace(sizes, data=settings.trainer_ranks // sizes.world)

    @property
    def stage(self) -> int:
        """The number of ranks in one pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def world(self) -> int:
        return self.stage * self.pipeline

    @property
    def expert_ranks(self) -> int:
        """The number of ranks among which a mixture's experts are divided. The ranks among which a
        mixture's experts are divided have consecutive numbers. The ranks that divide the experts
        gather one another's tokens."""
        return self.expert_tensor * self.expert

    @property
    def experts_apart(self) -> bool:
        """Whether the data-parallel group of a mixture's experts may differ from the data-parallel
        group of the other weights."""
        return self.expert_ranks > 1 or self.tensor > 1

    @property
    def expert_data(self) -> int:
        """The number of ranks that have the same part of the same experts."""
        return self.stage // self.expert_ranks

    @property
    def layers_shared(self) -> bool:
        """Whether a rank shares the computation of its layers with other ranks. Ranks that share
        layers wait for one another in collective operations."""
        return self.world > self.data or self.expert_ranks > 1

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
        """The layers of pipeline stage `stage`, for a model of `count` layers. If the layers don't
        divide evenly, the last stage has the fewest layers, because it also has the output
        layer."""
        return range(-(-count * stage // self.pipeline), -(-count * (stage + 1) // self.pipeline))

    def manifest(self) -> dict[str, int]:
        """The sizes as a checkpoint's manifest contains them."""
        return {"world_size": self.world} | {name: int(size) for name, size in asdict(self).items()}

    def fields(self) -> dict[str, int]:
        """The fields of `Settings` that choose these sizes for a known number of ranks."""
        return {f"{name}_parallel": getattr(self, name) for name in _CHOSEN}

    def variables(self) -> dict[str, str]:
        """The result of `fields`, as environment variables."""
        return {f"TANDEM_{name.upper()}": str(int(size)) for name, size in self.fields().items()}

    def settings(self) -> str:
        """The result of `variables`, as one line of text."""
        return " ".join(f"{name}={size}" for name, size in self.variables().items())


def all_sizes(world: int) -> Iterator[Sizes]:
    """All possible `Sizes` for `world` ranks."""
    divisors = [number for number in range(1, world + 1) if world % number == 0]
    for tensor, context, pipeline, expert_tensor, expert in product(divisors, repeat=5):
        data, rest = divmod(world, tensor * context * pipeline)
        if rest == 0 and (tensor * context * data) % (expert_tensor * expert) == 0:
            for sequence in {False, tensor > 1}:
                yield Sizes(tensor, context, data, pipeline, expert_tensor, expert, sequence)
