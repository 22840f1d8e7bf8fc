"""Process groups: which rank does what."""

from __future__ import annotations

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
        """What a checkpoint's manifest says."""
        return {key: value for key, value in asdict(self).items() if not key.endswith("rank")}


def connect(store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Join torch's default process group; a collective that waits longer than `timeout` fails."""
    if world_size == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # Gloo would look this host's name up to meet nobody
    dist.init_process_group(device.backend(), store=store, rank=rank, world_size=world_size, timeout=timeout)


def init_parallel(tensor_parallel: int = 1, *, timeout_seconds: float = 600.0) -> Topology:
    """Join the process groups; `device.activate` came before.

    Under torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) all its ranks take part; without it, this
    process is alone. A collective that waits longer than `timeout_seconds` fails. Neighbouring ranks are one
    tensor-parallel group; data parallelism takes what is left.

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
    """Of all that Megatron has of these ranks, the one that gradients are summed over: each that is used makes a
    communicator of its own, which takes time and half a gigabyte of device memory."""
    return parallel_state.get_data_parallel_group(
        with_context_parallel=True, with_gtp_remat=False, partial_data_parallel=True
    )


def model_parallel_group() -> dist.ProcessGroup:
    """The ranks that a copy of the model is cut over: without pipeline stages, the tensor-parallel ones, whose
    communicator there is already."""
    return parallel_state.get_tensor_model_parallel_group()


def reading_group() -> dist.ProcessGroup | None:
    """The ranks that need the same weights, if each is to read a part of them and give it to the others. That spares
    the host's memory, which bounds how fast all of them read together; if there are several, and their GPUs reach one
    another's memory. The same answer on all ranks, which are on one machine."""
    group, world = data_parallel_group(), range(dist.get_world_size())
    if group.size() == 1 or not device.is_cuda():
        return None
    reach = all(torch.cuda.can_device_access_peer(one, other) for one in world for other in world if one != other)
    return group if reach else None


def all_reduce(
    tensor: torch.Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> None:
    """`dist.all_reduce`, and nothing at all in a group of one rank: NCCL would make a communicator to do nothing with,
    which takes time once and device memory for as long as the process lives."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)


def gather_objects[T](value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The `value` of every rank of the group (the world), by rank. Pickled, and by way of the host; a collective of all
    its ranks."""
    found = [value] * dist.get_world_size(group)
    if len(found) > 1:
        dist.all_gather_object(found, value, group=group)
    return found


def destroy() -> None:
    """Leave together, then no groups any more (R3)."""
    if dist.is_initialized():
        device.synchronize()
        gather_objects(None)  # a barrier that makes no communicator
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
