"""AdamW on all weights (Loshchilov and Hutter, 2019, arXiv:1711.05101), divided over the ranks that
hold the same weights.

Each of the ranks that hold the same weights owns an equal range of the weights' memory. A rank gets
the summed gradient of its range, and holds Adam's state for the range. The rank updates the range's
weights and sends them to the other ranks (ZeRO, Rajbhandari et al., 2020, arXiv:1910.02054, stage
1). A bfloat16 weight is the rounded upper half of an fp32 master value. The int16 `remainder`
contains the difference that the rounding made. A weight and its master value together take 4 bytes
instead of 6.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.model import parallel
from tandem.model.device.offload import Offload
from tandem.model.policy import TABLE, Policy
from tandem.model.weights.base_memory import BaseWeights, Section
from tandem.spool.schema import OptimizerSettings
from tandem.training.optimizer import MOMENTS, norm_over_ranks

REMAINDER = "remainder"
_OF_HEADS = (
    "q_layernorm.weight",
    "k_layernorm.weight",
    "linear_attention.norm.weight",
    "linear_attention.A_log",
    "linear_attention.dt_bias",
)
CHUNK = 2**24
"""Number of elements that are updated at a time. An update temporarily takes five times the fp32
size of these elements."""


@dataclass(frozen=True)
class _Shard:
    """This rank's part of one section of the weights' memory."""

    group: dist.ProcessGroup  # the ranks that hold the section; each of them owns an equal part
    section: slice  # the section, as a slice of the weights' memory
    memory: slice
    state: slice  # the part's place in each of `ShardedAdam.tensors`


@dataclass(frozen=True)
class _Range:
    """The part of one weight that this rank owns."""

    name: str
    begin: int  # the range's first index in the weights' memory
    at: int  # the range's first index in this rank's state
    length: int
    decays: bool
    counts: bool
    """Whether this rank counts the range in the gradient's norm. If several tensor-parallel ranks
    hold the whole weight, only the first of them counts it."""


class ShardedAdam:
    """The fp32 gradients of all weights, and Adam's state for the weights that this rank owns.

    Gradients are accumulated over micro steps and summed over data-parallel ranks. Weight decay is
    not applied to vectors (norms and biases), as in transformers' Trainer. A tied table is the
    weight of both the embedding and the output layer. The pipeline's first and last stage have the
    tied table. The first stage owns the table: it updates the table and sends it to the last stage.
    The last stage's own gradient and state for the table are meaningless. If both stages updated
    the table, the two copies would diverge, because the order in which ranks sum a gradient depends
    on the owner.

    Args:
        policy: the policy, whose backward passes add the gradients of the base weights to the
            buffers of this `ShardedAdam`.
        base: this rank's weights, all bfloat16 or all fp32. Optimizer steps write into the memory
            of `base`.
    """

    def __init__(self, policy: Policy, base: BaseWeights, settings: OptimizerSettings) -> None:
        # Parameters outside of `base.memory` would have no gradient buffer.
        assert not (
            apart := [n for n, p in base.parameters.items() if p.dtype != base.memory.dtype]
        ), f"{apart[0]} is fp32 beside others"
        self.settings, self.steps = settings, 0
        self._policy, self._base, self._topology = policy, base, parallel.current()
        self._two_tables = policy.arch.tie_embeddings and policy.stage.first != policy.stage.last
        self._gradients = torch.zeros(
            len(base.memory), dtype=torch.float32, device=base.memory.device
        )
        policy.train_base(self._views(self._gradients))
        self._shards = list(self._shards_of_rank())
        self._ranges = list(self._ranges_of_rank())
        length = self._shards[-1].state.stop
        self.tensors = {name: torch.zeros_like(self._gradients[:length]) for name in MOMENTS}
        if base.memory.dtype is not torch.float32:
            assert base.memory.dtype is torch.bfloat16
            self.tensors[REMAINDER] = torch.zeros(
                length, dtype=torch.int16, device=base.memory.device
            )
        self._gradient_memory, self._state_memory = Offload(contents=False), Offload(contents=True)

    def reset(self) -> None:
        """Forget Adam's state, as if no step had been taken. The master values become equal to the
        weights."""
        self.steps = 0
        for tensor in self.tensors.values():
            tensor.zero_()

    def offload(self) -> int:
        """Free the device memory of gradients and Adam's state. Returns the number of bytes freed.
        Gradients are freed too, because publishing weights needs only the weights."""
        return self._gradient_memory.park([self._gradients]) + self._state_memory.park(
            self.tensors.values()
        )

    def restore(self) -> None:
        """The inverse of `offload`: Adam's state is restored, and gradients are zero."""
        self._gradient_memory.restore()
        self._state_memory.restore()
        self.zero_grad()

    def zero_grad(self) -> None:
        self._gradients.zero_()

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sum the gradients over the ranks. Each rank gets the sums for the weights that it owns. A
        rank's gradients of other weights become undefined."""
        self._sum_over_tensor_ranks()
        self._sum_over_stages()
        for shard in self._shards:
            if shard.group.size() == 1:
                continue
            whole, part = self._gradients[shard.section], self._gradients[shard.memory]
            if whole.is_cuda:
                parallel.reduce_scatter(part, whole, group=shard.group)
            else:
                part.copy_(parallel.scatter_sum(whole, shard.group))

    def gradient_norm(self) -> float:
        """L2 norm of the whole gradient. A collective operation; all ranks get the same value. The
        result is NaN or infinite if any gradient is NaN or infinite."""
        squares = [
            torch.linalg.vector_norm(self._gradient(part), dtype=torch.float64).square()
            for part in self._ranges
            if part.counts
        ]
        return norm_over_ranks(squares)

    def non_finite(self) -> list[str]:
        """Names of this rank's weights whose summed gradients contain NaN or infinity."""
        return [part.name for part in self._ranges if not self._gradient(part).isfinite().all()]

    @torch.no_grad()
    def step(self, norm: float, learning_rate: float) -> None:
        """Take an Adam step, and exchange the updated weights. The gradient is first scaled down to
        the norm `max_grad_norm` if the gradient's `norm` is larger."""
        self.steps += 1
        scale = min(1.0, self.settings.max_grad_norm / norm) if norm > 0 else 1.0
        for part in self._ranges:
            for offset in range(0, part.length, CHUNK):
                self._update(part, offset, min(CHUNK, part.length - offset), scale, learning_rate)
        self._gather(self._base.memory)
        if self._two_tables:
            dist.broadcast(self._base.parameters[TABLE], group=self._topology.ends, group_src=0)

    @torch.no_grad()
    def whole(self, name: str) -> dict[str, Tensor]:
        """The values of the state `name` for all of this rank's weights, in the weights' shapes.
        The values are gathered from their owners into the gradients' memory. A collective operation
        of all ranks."""
        memory = self._like_weights(self.tensors[name].dtype)
        for shard in self._shards:
            memory[shard.memory] = self.tensors[name][shard.state]
        self._gather(memory)
        return self._views(memory)

    @torch.no_grad()
    def load(self, name: str, fill: Callable[[dict[str, Tensor]], None]) -> None:
        """The inverse of `whole`. `fill` gets tensors of the weights' shapes and fills them. This
        rank keeps only the part of each tensor that this rank owns."""
        memory = self._like_weights(self.tensors[name].dtype)
        fill(self._views(memory))
        for shard in self._shards:
            self.tensors[name][shard.state] = memory[shard.memory]

    def _update(self, part: _Range, offset: int, length: int, scale: float, rate: float) -> None:
        settings, at, begin = self.settings, part.at + offset, part.begin + offset
        mean, square = (self.tensors[name][at : at + length] for name in MOMENTS)
        gradient = self._gradients[begin : begin + length] * scale
        mean.lerp_(gradient, 1 - settings.beta1)
        square.mul_(settings.beta2).addcmul_(gradient, gradient, value=1 - settings.beta2)
        divisor = square.sqrt().div_(math.sqrt(1 - settings.beta2**self.steps)).add_(settings.eps)
        weights = self._base.memory[begin : begin + length]
        remainder = self.tensors[REMAINDER][at : at + length] if REMAINDER in self.tensors else None
        master = weights if remainder is None else join_master(weights, remainder)
        if part.decays:
            master.mul_(1 - rate * settings.weight_decay)
        master.addcdiv_(mean, divisor, value=-rate / (1 - settings.beta1**self.steps))
        if remainder is not None:
            split_master(master, weights, remainder)

    def _sum_over_tensor_ranks(self) -> None:
        """Sums the gradients of weights that every tensor-parallel rank holds whole. Each rank has
        only the part of the gradient that comes from its heads or, with sequence parallelism, from
        its tokens."""
        topology = self._topology
        if topology.sizes.tensor == 1:
            return
        partial = [
            gradient
            for name, gradient in self._views(self._gradients).items()
            if self._base.rules[name].cut == "whole"
            and (topology.sizes.sequence or name.endswith(_OF_HEADS))
        ]
        if partial:
            together = torch.cat([gradient.flatten() for gradient in partial])
            parallel.all_reduce(together, group=topology.tensor)
            for gradient, total in zip(
                partial, together.split([g.numel() for g in partial]), strict=True
            ):
                gradient.copy_(total.view_as(gradient))

    def _sum_over_stages(self) -> None:
        """Sums the gradients of a tied table. The first stage has the gradient of the embedding,
        and the last stage has the gradient of the output layer."""
        if self._two_tables:
            parallel.all_reduce(self._views(self._gradients)[TABLE], group=self._topology.ends)

    def _gather(self, memory: Tensor) -> None:
        """Gathers the weights that other ranks own into `memory`."""
        if memory.dtype is torch.int16:
            # The memory is viewed as bfloat16, because NCCL has no 16-bit integers.
            memory = memory.view(torch.bfloat16)
        for shard in self._shards:
            if shard.group.size() > 1:
                part = memory[shard.memory]
                part = part if memory.is_cuda else part.clone()
                parallel.all_gather(memory[shard.section], part, group=shard.group)

    def _group(self, section: Section) -> dist.ProcessGroup:
        return self._topology.expert_data if section.experts else self._topology.data

    def _shards_of_rank(self) -> Iterator[_Shard]:
        at = 0
        for section in self._base.sections:
            group = self._group(section)
            length = (section.end - section.begin) // group.size()
            begin = section.begin + group.rank() * length
            whole, part = slice(section.begin, section.end), slice(begin, begin + length)
            yield _Shard(group, whole, part, slice(at, at + length))
            at += length

    def _ranges_of_rank(self) -> Iterator[_Range]:
        for shard in self._shards:
            begin, end = shard.memory.start, shard.memory.stop
            for name, weight in self._base.parameters.items():
                first = int(weight.storage_offset())
                start, stop = max(first, begin), min(first + weight.numel(), end)
                if start < stop and (name != TABLE or self._policy.stage.first):
                    counts = (
                        self._base.rules[name].cut != "whole" or self._topology.place.tensor == 0
                    )
                    decays = len(next(iter(self._base.rules[name].sources.values()))) > 1
                    at = shard.state.start + start - begin
                    yield _Range(name, start, at, stop - start, decays, counts)

    def _gradient(self, part: _Range) -> Tensor:
        return self._gradients[part.begin : part.begin + part.length]

    def _like_weights(self, dtype: torch.dtype) -> Tensor:
        """The beginning of the gradients' memory, viewed in another dtype, with one element for
        each weight. A weight has the same index as in the weights' memory."""
        return self._gradients.view(dtype)[: len(self._gradients)]

    def _views(self, memory: Tensor) -> dict[str, Tensor]:
        return {
            name: (
                memory[weight.storage_offset() : weight.storage_offset() + weight.numel()].view(
                    weight.shape
                )
            )
            for name, weight in self._base.parameters.items()
        }


def join_master(weights: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master values, computed from bfloat16 weights and their int16 remainders. Both
    arguments and the result have the same shape."""
    bits = weights.view(torch.int16).int().bitwise_left_shift_(16).add_(remainder)
    return bits.view(torch.float32)


def split_master(master: Tensor, weights: Tensor, remainder: Tensor) -> None:
    """Write master values as bfloat16 weights (rounded to nearest, ties away from zero) and int16
    remainders. All three tensors have the same shape.

    Args:
        master: fp32; unchanged.
        weights: bfloat16; overwritten.
        remainder: int16; overwritten.
    """
    bits = master.view(torch.int32)
    upper = (bits + 2**15).bitwise_right_shift_(16)
    weights.view(torch.int16).copy_(upper)
    remainder.copy_(bits - upper.bitwise_left_shift(16))
