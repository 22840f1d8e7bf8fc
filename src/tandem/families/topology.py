"""How a model is cut over ranks: the sizes of the parallel dimensions, and each rank's place in them. No torch."""

from dataclasses import dataclass


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

    Ranks count through the tensor dimension first, then context, data and pipeline. In the experts of a mixture, the
    ranks of one pipeline stage count through expert_tensor first, then expert and expert_data. Both are Megatron-core's
    order (`parallel_state.initialize_model_parallel`).
    """

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1
    expert_tensor: int = 1
    expert: int = 1
    sequence: bool = False
    """Tensor-parallel ranks divide the tokens of what is not cut by features (sequence parallelism)."""

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def world(self) -> int:
        return self.stage * self.pipeline

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same part of the same experts."""
        return self.stage // (self.expert_tensor * self.expert)

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
