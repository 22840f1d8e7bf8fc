"""Memory for a rank's base weights, and the exchange of what data-parallel ranks have read, from GPU to GPU."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from tandem.families.arch import Arch
from tandem.families.registry import weight_rules
from tandem.families.topology import Sizes, check, on_stage
from tandem.model import device, parallel
from tandem.model.device.allocation import ALIGNMENT, allocate
from tandem.model.transfer import ipc

_GAP = "gap"
SEGMENT = 2 * 2**20  # bytes; the allocation is a multiple of it, so that the allocator puts nothing else beside it


@dataclass(frozen=True)
class Section:
    """A range of the memory that the same ranks hold; its length divides by the number of all ranks."""

    begin: int  # elements
    end: int
    experts: bool  # held by the ranks of `Topology.expert_data`, otherwise by those of `Topology.data`


class BaseWeights:
    """Uninitialised memory on this process's device for a rank's base weights, in one allocation: `memory`, flat, and
    its `sections`.

    Ranks of a `group` need the same weights: each reads a share of them from the files, calls `connect` meanwhile, and
    then `exchange`, which copies the other shares from the other ranks' memory (CUDA IPC).
    """

    def __init__(self, arch: Arch, dtype: torch.dtype, sizes: Sizes, *, group: dist.ProcessGroup | None = None) -> None:
        """`group`: the ranks that share the reading; None: this rank reads all weights.

        Raises InvalidInput if the model can't be cut so.
        """
        check(arch, sizes)
        stage = parallel.current().place.pipeline if sizes.pipeline > 1 else 0
        own_rules = (rule for rule in weight_rules(arch) if on_stage(rule.parameter, arch, sizes, stage))
        rules = sorted(own_rules, key=lambda rule: rule.experts is not None)
        self.rules = {rule.parameter: rule for rule in rules}
        shapes = {rule.parameter: rule.shape(sizes) for rule in rules}
        own = [rule.parameter for rule in rules if rule.fp32]
        shapes |= {name: (shapes[name][0] * torch.float32.itemsize // dtype.itemsize,) for name in own}
        experts = {rule.parameter: shapes[rule.parameter] for rule in rules if rule.experts is not None}
        apart = bool(experts) and sizes.experts_apart
        if apart:  # what comes before the experts divides by the number of ranks too
            step = ALIGNMENT // dtype.itemsize
            before = {name: shape for name, shape in shapes.items() if name not in experts}
            used = sum(-(-math.prod(shape) // step) for shape in before.values())
            shapes = before | {_GAP: (-used % sizes.world * step,)} | experts
        self.group = group
        self._imports: contextlib.ExitStack | None = None  # the other ranks' memory; None if it can't be shared
        self._copies: list[Callable[[], None]] = []  # from there
        self.memory, self.parameters = allocate(shapes, dtype, device.device(), multiple=SEGMENT * sizes.world)
        self.parameters |= {name: self.parameters[name].view(torch.float32) for name in own}
        self.parameters.pop(_GAP, None)
        first = int(self.parameters[next(iter(experts))].storage_offset()) if apart else len(self.memory)
        self.sections = [Section(0, first, experts=False)]
        if apart:
            self.sections.append(Section(first, len(self.memory), experts=True))

    def own_share(self) -> dict[str, torch.Tensor]:
        """The parameters that this rank reads: consecutive ones, of about as many bytes as each other rank's."""
        return self.parameters if self.group is None else self._shares()[self.group.rank()]

    def connect(self) -> None:
        """Open the other ranks' memory, if the driver allows it. A collective of the group's ranks; shares may still be
        read meanwhile."""
        if self.group is None:
            return
        exports = parallel.gather_objects(ipc.exported(self.memory), self.group)
        self._imports, self._copies = None, []
        with contextlib.ExitStack() as imports, contextlib.suppress(ipc.NotShared):
            for rank, share in self._other_shares().items():
                copy, part = imports.enter_context(ipc.imported(exports[rank])), self._range(share)
                self._copies.append(partial(copy, part, int(part.storage_offset()) * part.element_size()))
            self._imports = imports.pop_all()

    def exchange(self) -> dict[str, torch.Tensor]:
        """Get the other ranks' shares, after this rank has read its own; returns the parameters still to be read: none,
        or, if GPUs can't share memory, all other shares. A collective of the group's ranks; once for each `connect`.

        Each rank copies by itself, because connecting NCCL takes longer than reading half of 16 GB.
        """
        if self.group is None:
            return {}
        with self._imports or contextlib.nullcontext():
            if all(parallel.gather_objects(self._imports is not None, self.group)):  # all ranks have read their shares
                for copy in self._copies:
                    copy()
                device.synchronize()
                parallel.gather_objects(None, self.group)  # no rank frees memory that others still copy
                return {}
        missing = self._other_shares()
        self.group = None  # from now on each rank reads all weights
        return {name: parameter for share in missing.values() for name, parameter in share.items()}

    def _other_shares(self) -> dict[int, dict[str, torch.Tensor]]:
        """The other ranks' shares, by rank, without empty ones."""
        assert self.group is not None
        return {rank: share for rank, share in enumerate(self._shares()) if share and rank != self.group.rank()}

    def _shares(self) -> list[dict[str, torch.Tensor]]:
        """Each rank's share: the parameters whose middle lies in the rank's equal part of the memory."""
        assert self.group is not None
        shares: list[dict[str, torch.Tensor]] = [{} for _ in range(self.group.size())]
        size = len(self._range(self.parameters))
        for name, parameter in self.parameters.items():
            middle = (parameter.storage_offset() + parameter.numel() / 2) * self._ratio(parameter)
            shares[int(middle * len(shares) / size)][name] = parameter
        return shares

    def _range(self, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        """The flat range of the memory that these consecutive parameters occupy."""
        tensors = list(parameters.values())
        first, last = tensors[0], tensors[-1]
        end = (last.storage_offset() + last.numel()) * self._ratio(last)
        return self.memory[first.storage_offset() * self._ratio(first) : end]

    def _ratio(self, parameter: torch.Tensor) -> int:
        """Elements of the memory in one of the parameter."""
        return parameter.element_size() // self.memory.element_size()
