"""Process groups: how ranks connect, and which ranks share a model or its gradients."""

import os
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.rendezvous import rendezvous

from tandem.errors import InvalidInput
from tandem.model import device
from tandem.model.mcore import parallel_state


@dataclass(frozen=True)
class Topology:
    """Sizes of the parallel dimensions, and this rank's place in them."""

    world_size: int
    rank: int
    tp: int
    tp_rank: int
    dp: int
    dp_rank: int
    pp: int = 1

    def sizes(self) -> dict[str, int]:
        """What a checkpoint's manifest records."""
        return {key: value for key, value in asdict(self).items() if not key.endswith("rank")}


def connect(store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Join torch's default process group; a collective that waits longer than `timeout` fails."""
    if world_size == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else Gloo looks up this host's name
    # Beside a GPU, Gloo carries the tensors in host memory. With NCCL alone the first such collective of each group
    # would create an NCCL communicator, which takes time once and device memory for as long as the process lives.
    backend = "cpu:gloo,cuda:nccl" if device.is_cuda() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def init_parallel(tensor_parallel: int = 1, *, timeout_seconds: float = 600.0) -> Topology:
    """Join the process groups, after `device.activate`.

    Under torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) with all its ranks, else alone. A
    collective that waits longer than `timeout_seconds` fails. Neighbouring ranks form a tensor-parallel group; ranks at
    the same place in theirs form a data-parallel group.

    Raises:
        InvalidInput: the number of ranks is not a multiple of `tensor_parallel`.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if not dist.is_initialized():
        if "RANK" in os.environ:
            store, rank, world_size = next(rendezvous("env://", timeout=timeout))
            connect(store, rank, world_size, timeout)
        else:
            connect(HashStore(), 0, 1, timeout)
    world_size = dist.get_world_size()
    if world_size % tensor_parallel:
        raise InvalidInput(f"{world_size} ranks don't divide into groups of {tensor_parallel}", field="tensor_parallel")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        distributed_timeout_minutes=timeout_seconds / 60,
        create_gloo_process_groups=False,
    )
    return Topology(
        world_size=world_size,
        rank=dist.get_rank(),
        tp=tensor_parallel,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
    )


def data_parallel_group() -> dist.ProcessGroup:
    """The group that Megatron sums gradients over. Megatron has other groups of the same ranks, but each group in use
    makes a communicator of its own, which takes time and half a gigabyte of device memory."""
    return parallel_state.get_data_parallel_group(
        with_context_parallel=True, with_gtp_remat=False, partial_data_parallel=True
    )


def model_parallel_group() -> dist.ProcessGroup:
    """The ranks that a copy of the model is cut over: without pipeline stages, the tensor-parallel ones."""
    return parallel_state.get_tensor_model_parallel_group()


def reading_group() -> dist.ProcessGroup | None:
    """The ranks that read the base weights together (`BaseWeights`); None if each rank reads all of them.

    They read together if several ranks need the same weights and their GPUs reach one another's memory, because the
    host's memory bounds how fast ranks read at once. All ranks get the same answer. Ranks of several hosts don't read
    together, because no GPU reaches another host's memory.
    """
    group, world = data_parallel_group(), range(dist.get_world_size())
    if group.size() == 1 or not device.is_cuda() or os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return None
    reach = all(torch.cuda.can_device_access_peer(one, other) for one in world for other in world if one != other)
    return group if reach else None


def all_reduce(
    tensor: torch.Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> None:
    """`dist.all_reduce`, skipped in a group of one rank, where NCCL would make a communicator in vain: that takes time,
    and device memory for as long as the process lives."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)


def gather_objects[T](value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's `value`, by rank; pickled, through host memory. A collective of the group (default: all ranks)."""
    values = [value] * dist.get_world_size(group)
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def destroy() -> None:
    """Destroy all process groups, after all ranks have come here (R3)."""
    if dist.is_initialized():
        device.synchronize()
        gather_objects(None)  # a barrier that makes no communicator
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
