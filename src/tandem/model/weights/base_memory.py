"""Allocates memory for a rank's base weights. Each of the ranks that need the same weights reads a
share from the files. After the reading, the ranks that need the same weights exchange their shares
from GPU to GPU."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from tandem.families.arch import Arch
from tandem.families.registry import weight_rules
from tandem.families.weight_rules import on_stage
from tandem.model import device, parallel
from tandem.model.device import ipc
from tandem.model.device.memory import ALIGNMENT, allocate
from tandem.planning.checks import check_sizes
from tandem.topology.sizes import Sizes

_GAP = "gap"
# Bytes. The size of the weights' allocation is a multiple of SEGMENT, so that the allocator puts no
# other tensor into the same memory segment.
SEGMENT = 2 * 2**20


@dataclass(frozen=True)
class Section:
    """A range of the weights' memory that all ranks of one group hold. The range's length is a
    multiple of the number of these ranks."""

    begin: int  # elements
    end: int
    # True: the ranks of `Topology.expert_data` hold the range. False: the ranks of `Topology.data`
    # hold the range.
    experts: bool


class BaseWeights:
    """Uninitialised memory on this process's device for a rank's base weights. `memory` is one flat
    allocation, and `sections` are its ranges. The few small fp32 parameters (`WeightRule.fp32`) are
    outside of `memory`.

    Ranks that need the same weights may share the reading. Each rank reads its share of the weights
    from the files. During the reading, each rank calls `connect`. After the reading, each rank
    calls `exchange`, which copies the other shares from the other ranks' memory (CUDA IPC).
    """

    def __init__(
        self,
        arch: Arch,
        dtype: torch.dtype,
        sizes: Sizes,
        *,
        groups: parallel.ReadingGroups | None = None,
    ) -> None:
        """Allocates the memory. Raises InvalidInput if the model can't be cut according to `sizes`.

        Args:
            groups: the ranks that share the reading; None: this rank reads all weights.
        """
        check_sizes(arch, sizes)
        stage = parallel.current().place.pipeline if sizes.pipeline > 1 else 0
        own_rules = (
            rule for rule in weight_rules(arch) if on_stage(rule.parameter, arch, sizes, stage)
        )
        rules = sorted(own_rules, key=lambda rule: rule.num_experts is not None)
        self.rules = {rule.parameter: rule for rule in rules}
        wider = dtype is not torch.float32
        own = {rule.parameter: rule.shape(sizes) for rule in rules if rule.fp32 and wider}
        shapes = {rule.parameter: rule.shape(sizes) for rule in rules if rule.parameter not in own}
        experts = {
            rule.parameter: shapes[rule.parameter] for rule in rules if rule.num_experts is not None
        }
        apart = bool(experts) and sizes.experts_apart
        # The section before the experts ends with a gap, so that its length is a multiple of the
        # number of ranks.
        if apart:
            step = ALIGNMENT // dtype.itemsize
            before = {name: shape for name, shape in shapes.items() if name not in experts}
            used = sum(-(-math.prod(shape) // step) for shape in before.values())
            shapes = before | {_GAP: (-used % sizes.world * step,)} | experts
        self._groups = groups
        # The opened memory of the other ranks; None if memory can't be shared.
        self._imports: contextlib.ExitStack | None = None
        self._copies: list[Callable[[], None]] = []  # copies from the other ranks' memory
        self.memory, self.parameters = allocate(
            shapes, dtype, device.device(), multiple=SEGMENT * sizes.world
        )
        self.parameters.pop(_GAP, None)
        # The few small fp32 parameters are not shared, because each rank reads them itself.
        self._shared = dict(self.parameters)
        self.parameters |= allocate(own, torch.float32, device.device())[1]
        first = (
            int(self.parameters[next(iter(experts))].storage_offset())
            if apart
            else len(self.memory)
        )
        self.sections = [Section(0, first, experts=False)]
        if apart:
            self.sections.append(Section(first, len(self.memory), experts=True))

    def own_share(self) -> dict[str, torch.Tensor]:
        """The parameters that this rank reads: consecutive parameters of each section. The number
        of bytes is about the same on every rank."""
        if self._groups is None:
            return self.parameters
        share = {name: part for name, part in self.parameters.items() if name not in self._shared}
        for section in self.sections:
            share |= self._shares(section)[self._readers(section).rank()]
        return share

    def connect(self) -> None:
        """Open the other ranks' memory, if the driver allows it. The call is a collective operation
        of each group of ranks that share the reading. Shares may still be read during the call."""
        if self._groups is None:
            return
        mine = ipc.exported(self.memory)
        handles: dict[int, ipc.Export | None] = {}
        for section in self.sections:
            group = self._readers(section)
            # A collective operation of all ranks is avoided, because Megatron gathers from all
            # ranks at the same time, when it creates the optimizer.
            ranks = dist.get_process_group_ranks(group)
            handles |= dict(zip(ranks, parallel.gather_objects(mine, group), strict=True))
        self._imports, self._copies = None, []
        with contextlib.ExitStack() as imports, contextlib.suppress(ipc.NotShared):
            # A mapping from ranks to their opened memory. A rank's memory is opened once, even if
            # the rank has a share of several sections.
            opened = {}
            for rank, share in self._other_shares():
                if rank not in opened:
                    opened[rank] = imports.enter_context(ipc.imported(handles[rank]))
                part = self._range(share)
                self._copies.append(
                    partial(opened[rank], part, int(part.storage_offset()) * part.element_size())
                )
            self._imports = imports.pop_all()

    def exchange(self) -> dict[str, torch.Tensor]:
        """Copy the other ranks' shares, after this rank has read its own share. Returns the
        parameters that this rank must still read. If GPUs can share memory, no parameter is left to
        read. If GPUs can't share memory, this rank must read the parameters of all other shares.
        The call is a collective operation of all ranks. Call `exchange` once for each `connect`.

        Each rank copies from the other ranks' memory, without NCCL, because connecting NCCL takes
        longer than reading 8 GB.
        """
        if self._groups is None:
            return {}
        with self._imports or contextlib.nullcontext():
            # When `gather_objects` returns, all ranks have read their shares.
            if all(parallel.gather_objects(self._imports is not None)):
                for copy in self._copies:
                    copy()
                device.synchronize()
                parallel.gather_objects(None)  # no rank frees memory while another rank copies it
                return {}
        missing = list(self._other_shares())
        self._groups = None  # from now on each rank reads all weights
        return {name: parameter for _, share in missing for name, parameter in share.items()}

    def _other_shares(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """The non-empty shares of the other ranks, for each section. Each share is paired with its
        rank's number among all ranks."""
        for section in self.sections:
            ranks = dist.get_process_group_ranks(self._readers(section))
            for rank, share in zip(ranks, self._shares(section), strict=True):
                if share and rank != dist.get_rank():
                    yield rank, share

    def _readers(self, section: Section) -> dist.ProcessGroup:
        """The ranks that share the reading of a section."""
        assert self._groups is not None
        of_all, of_experts = self._groups
        return of_experts if section.experts else of_all

    def _shares(self, section: Section) -> list[dict[str, torch.Tensor]]:
        """Each rank's share of a section. The section is divided into equal parts, one for each
        rank. A rank's share consists of the parameters whose middle is in the rank's part."""
        shares: list[dict[str, torch.Tensor]] = [{} for _ in range(self._readers(section).size())]
        begins = {name: each.storage_offset() for name, each in self._shared.items()}
        mine = {
            name: each
            for name, each in self._shared.items()
            if section.begin <= begins[name] < section.end
        }
        size = len(self._range(mine))
        for name, parameter in mine.items():
            middle = begins[name] - section.begin + parameter.numel() / 2
            shares[int(middle * len(shares) / size)][name] = parameter
        return shares

    def _range(self, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        """The flat range of the memory that the consecutive parameters `parameters` occupy."""
        tensors = list(parameters.values())
        first, last = tensors[0], tensors[-1]
        return self.memory[first.storage_offset() : last.storage_offset() + last.numel()]
