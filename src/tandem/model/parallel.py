"""Process groups: connects the ranks, and records which ranks share a model or its gradients."""

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.rendezvous import rendezvous

from tandem.errors import InvalidInput
from tandem.model import device
from tandem.model.mcore import parallel_state
from tandem.topology.sizes import Place, Sizes

# torch 2.13 has new names for the functions `all_gather` and `reduce_scatter`, and warns about the
# old names.
_COLLECTIVES: Any = dist
all_gather = getattr(_COLLECTIVES, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(_COLLECTIVES, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Topology:
    """The division of the work among ranks, this rank's place in the division, and this rank's
    process groups."""

    sizes: Sizes
    rank: int
    place: Place
    tensor: dist.ProcessGroup
    context: dist.ProcessGroup
    data: dist.ProcessGroup
    """The ranks over which gradients are summed: data-parallel and context-parallel ranks together.
    Megatron's other groups with the same ranks are not used, because each group in use creates its
    own communicator. A communicator takes time and half a gigabyte of device memory."""
    pipeline: dist.ProcessGroup
    expert_tensor: dist.ProcessGroup
    expert: dist.ProcessGroup
    expert_group: dist.ProcessGroup
    """The ranks over which the experts are cut, in the order of their ranks: the ranks of
    `expert_tensor` and `expert` together."""
    expert_data: dist.ProcessGroup
    forward: dist.ProcessGroup
    """The pipeline's ranks, for sending hidden states. With a single stage, `forward`, `backward`
    and `ends` are the group `pipeline`."""
    backward: dist.ProcessGroup
    """The pipeline's ranks, for sending the gradients of hidden states."""
    ends: dist.ProcessGroup
    """The pipeline's first and last rank. The first and the last rank hold a tied table, which is
    the weight of the embedding and of the output layer."""


type ReadingGroups = tuple[dist.ProcessGroup, dist.ProcessGroup]
"""Two groups. The ranks of the first group share the reading of a model's weights. If several ranks
hold the same experts, the ranks of the second group share the reading of the experts' weights."""

_current: Topology | None = None


def current() -> Topology:
    """This process's topology, set by `init_parallel`."""
    assert _current is not None, "init_parallel was not called"
    return _current


def connect(store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Join torch's default process group.

    Args:
        store: the store in which the ranks find one another.
        rank: this process's number, from 0.
        timeout: a collective operation that waits longer fails.
    """
    if world_size == 1:
        # Without the variable GLOO_SOCKET_IFNAME, Gloo would look up this host's name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # On a GPU machine, Gloo is used for tensors in host memory. With NCCL alone, the first
    # collective operation on host tensors in each group would create an NCCL communicator. Creating
    # a communicator takes time, and the communicator takes device memory until the process ends.
    backend = "cpu:gloo,cuda:nccl" if device.is_cuda() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def init_parallel(sizes: Sizes | None = None, *, timeout_seconds: float = 600.0) -> Topology:
    """Join the process groups. Call this function after `device.activate`.

    If torchrun's environment is set (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), this process is
    one of torchrun's ranks. Without torchrun's environment, this process is the only rank. A
    collective operation that waits longer than `timeout_seconds` fails. `sizes.data` is ignored,
    because it follows from the number of ranks and the other sizes.

    Raises:
        InvalidInput: the number of ranks is not a multiple of the other sizes.
    """
    global _current
    sizes = sizes or Sizes()
    timeout = timedelta(seconds=timeout_seconds)
    if not dist.is_initialized():
        if "RANK" in os.environ:
            store, rank, world_size = next(rendezvous("env://", timeout=timeout))
            connect(store, rank, world_size, timeout)
        else:
            connect(HashStore(), 0, 1, timeout)
    world_size = dist.get_world_size()
    sizes = replace(sizes, data=1)
    if world_size % sizes.world:
        raise InvalidInput(
            f"{world_size} ranks don't divide into groups of {sizes.world}", field="tensor_parallel"
        )
    sizes = replace(sizes, data=world_size // sizes.world)
    if sizes.stage % sizes.expert_ranks:
        problem = (
            f"{sizes.stage} ranks don't divide into groups of {sizes.expert_ranks} for the experts"
        )
        raise InvalidInput(problem, field="expert_parallel")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        distributed_timeout_minutes=timeout_seconds / 60,
        create_gloo_process_groups=False,
    )
    state = parallel_state
    pipelines = [list(range(first, world_size, sizes.stage)) for first in range(sizes.stage)]
    _current = Topology(
        sizes=sizes,
        rank=dist.get_rank(),
        place=sizes.place(dist.get_rank()),
        tensor=state.get_tensor_model_parallel_group(),
        context=state.get_context_parallel_group(),
        data=state.get_data_parallel_group(
            with_context_parallel=True, with_gtp_remat=False, partial_data_parallel=True
        ),
        pipeline=state.get_pipeline_model_parallel_group(),
        expert_tensor=state.get_expert_tensor_parallel_group(),
        expert=state.get_expert_model_parallel_group(),
        expert_group=state.get_expert_tensor_and_model_parallel_group(),
        expert_data=state.get_expert_data_parallel_group(),
        forward=_new_group(pipelines, timeout),
        backward=_new_group(pipelines, timeout),
        ends=_new_group([[ranks[0], ranks[-1]] for ranks in pipelines], timeout),
    )
    return _current


def _new_group(groups: list[list[int]], timeout: timedelta) -> dist.ProcessGroup:
    """Creates the process groups `groups`, and returns the group that has this rank. Returns the
    pipeline's group if the pipeline has one rank, or if none of the groups has this rank."""
    group_of_rank: dist.ProcessGroup = parallel_state.get_pipeline_model_parallel_group()
    if group_of_rank.size() > 1:
        for ranks in groups:
            group = dist.new_group(ranks, timeout=timeout)
            group_of_rank = group if dist.get_rank() in ranks else group_of_rank
    return group_of_rank


def reading_groups() -> ReadingGroups | None:
    """The ranks that read the base weights together (`BaseWeights`); None if each rank reads
    everything.

    Ranks read together if they need the same weights and their GPUs can access one another's
    memory. Reading together saves time, because the host's memory limits how fast several ranks
    read. Either all ranks get groups, or all ranks get None. Ranks of different hosts don't read
    together, because a GPU can't access the memory of a GPU of another host.
    """
    groups, world = (current().data, current().expert_data), range(dist.get_world_size())
    alone = all(group.size() == 1 for group in groups)
    if alone or not device.is_cuda() or os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return None
    reach = all(
        torch.cuda.can_device_access_peer(one, other)
        for one in world
        for other in world
        if one != other
    )
    return groups if reach else None


def connect_gradients(*, experts: bool) -> None:
    """Make NCCL connect the groups over which gradients are summed. The call allocates NCCL's
    memory, so that later measurements of memory count it. NCCL can't allocate memory after torch's
    allocator has taken all memory. The call is a collective operation of all ranks. `experts`:
    whether the gradients of experts are summed over a group of their own."""
    for group in (current().data, current().expert_data) if experts else (current().data,):
        all_reduce(torch.zeros(1, device=device.device()), group=group)


def all_reduce(
    tensor: torch.Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> None:
    """`dist.all_reduce`, but does nothing in a group of one rank. In a group of one rank, NCCL
    would create a communicator. A communicator takes time to create, and takes device memory until
    the process ends.

    Args:
        tensor: this rank's summand; overwritten by the result.
        group: the ranks whose tensors are summed; None: all ranks.
    """
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)


def gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensors [n, ...] of all ranks, concatenated in the order of ranks. The tensors must have
    the same shape on all ranks."""
    if group.size() == 1:
        return tensor
    whole = tensor.new_empty(group.size() * len(tensor), *tensor.shape[1:])
    all_gather(whole, tensor.contiguous(), group=group)
    return whole


def scatter_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sums the tensors [ranks * n, ...] of all ranks, and returns this rank's n rows of the sum.
    The order of summation is fixed, so two runs give the same bits."""
    if group.size() == 1:
        return tensor
    parts = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    dist.all_to_all_single(parts, tensor.contiguous(), group=group)
    return parts.view(group.size(), -1, *tensor.shape[1:]).sum(0)


def gather_objects[T](value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's `value`, in the order of ranks, exchanged as pickles through host memory. The
    call is a collective operation of the group (default: all ranks)."""
    values = [value] * dist.get_world_size(group)
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def destroy() -> None:
    """Destroy all process groups, after all ranks have reached this call."""
    if dist.is_initialized():
        device.synchronize()
        gather_objects(None)  # a barrier that creates no communicator
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
