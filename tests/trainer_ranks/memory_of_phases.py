"""One rank that runs a job and writes down what is allocated, and for what, wherever its memory is told:

    memory_of_phases.py <spool> <job> <file>

The file gets a list of rows: `at` (begin or end of a phase, or a step's floor), `stats` (`memory.stats`), `held`
(what policy and optimizer hold, by kind), `visible` (bytes of all tensors that Python can reach on the device), and for
an end `phase` and `told`, what the job's own report says.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from tandem.model import device
from tandem.model.device import memory
from tandem.model.policy import Policy
from tandem.trainer.rank import checkpoint, model_loader, worker
from tandem.training.optimizer import AdapterOptimizer
from tandem.training.phases import MemoryWatch

KINDS = ("base", "other", "lora", "gradients", "moments", "read")

rows: list[dict[str, Any]] = []
beside: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
made: list[tuple[Policy, AdapterOptimizer]] = []
read: list[weakref.ref[torch.Tensor]] = []  # of the checkpoint, to be copied into those


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address -> bytes of what is allocated on the device for `tensors`; views share."""
    found = {}
    for tensor in tensors:
        if tensor.device.type == device.device().type and (size := tensor.untyped_storage().nbytes()):
            found[tensor.untyped_storage().data_ptr()] = size
    return found


def held() -> dict[str, list[int]]:
    """Kind -> size of each of its allocations."""
    kinds: dict[str, dict[int, int]] = {kind: {} for kind in KINDS}
    kinds["read"] = storages(tensor for each in read if (tensor := each()) is not None)
    for policy, optimizer in made:
        lora = list(policy.lora_parameters().values())
        kinds["lora"] = storages(lora)
        parameters, everything = storages(policy.parameters()), list(policy.buffers())
        for module in policy.modules():
            everything += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        kinds["base"] = {at: size for at, size in parameters.items() if at not in kinds["lora"]}
        kinds["other"] = {at: size for at, size in storages(everything).items() if at not in parameters}
        kinds["gradients"] = storages(
            grad for p in lora for grad in (getattr(p, "main_grad", None), p.grad) if grad is not None
        )
        adam = optimizer.state()
        kinds["moments"] = storages([*adam.exp_avg.values(), *adam.exp_avg_sq.values()])
    return {kind: sorted(found.values()) for kind, found in kinds.items()}


class Followed(ThreadPoolExecutor):
    """Of what goes on beside the rank's own work, through memory that it soon gives back."""

    def submit(self, *arguments: Any, **options: Any) -> Future[Any]:
        future = super().submit(*arguments, **options)
        beside.add(future)
        return future


def measure(at: str, phase: str | None = None, told: dict[str, int] | None = None) -> None:
    device.synchronize()
    gc.collect()
    if device.device().type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each thread that multiplies, made anew when needed
        torch.empty(1, device=device.device())  # lets the allocator take back what other streams have done with
    reachable: dict[int, int] = {}
    if (
        device.device().type == "cpu"
    ):  # a GPU's allocator is asked; and there the compiler's own tensors have no storage
        reachable = storages(o for o in gc.get_objects() if issubclass(type(o), torch.Tensor))
    row = {"at": at, "phase": phase, "told": told, "stats": memory.stats(), "held": held()}
    rows.append(row | {"visible": sum(reachable.values())})


def watch() -> None:
    """Measure wherever the rank's own report does; its numbers are taken first."""
    begin, end, floor, build = (
        MemoryWatch.begin_phase,
        MemoryWatch.end_phase,
        MemoryWatch.begin_step,
        AdapterOptimizer.__init__,
    )
    read_state = checkpoint.read

    def measured_begin(self: MemoryWatch) -> None:
        measure("begin")
        begin(self)

    def measured_end(self: MemoryWatch, phase: str) -> dict[str, int]:
        assert not wait(list(beside), timeout=60).not_done
        told = end(self, phase)
        measure("end", phase, told)
        return told

    def measured_floor(self: MemoryWatch) -> None:
        floor(self)
        measure("floor")

    def noted(self: AdapterOptimizer, policy: Policy, *more: Any, **options: Any) -> None:
        build(self, policy, *more, **options)
        made[:] = [(policy, self)]

    def noted_read(checked: checkpoint.CheckedCheckpoint) -> checkpoint.CheckpointState:
        found = read_state(checked)
        read.extend(map(weakref.ref, [*found.adapter.values(), *(found.optimizer or {}).values()]))
        return found

    model_loader.ThreadPoolExecutor, checkpoint.read = Followed, noted_read
    MemoryWatch.begin_phase, MemoryWatch.end_phase, MemoryWatch.begin_step = (
        measured_begin,
        measured_end,
        measured_floor,
    )
    AdapterOptimizer.__init__ = noted


if __name__ == "__main__":
    watch()
    status = worker.main(Path(sys.argv[1]), sys.argv[2], 1)
    Path(sys.argv[3]).write_text(json.dumps(rows))
    sys.exit(status)
