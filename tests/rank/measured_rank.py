"""One rank that runs a job. The rank records its allocations when a phase begins or ends, and when
a step begins:

    measured_rank.py <spool> <job> <file>

The file gets a list of rows. A row's `at` is "begin" or "end" of a phase, or "step". A row's
`stats` are the result of `memory.stats`. A row's `sizes` are the bytes of each allocation of policy
and optimizer, by kind. On the CPU a row's `visible` is the bytes of all tensors that Python can
reach. The row of a phase's end also has the phase's name as `phase`, and the rank's own report as
`reported`.
"""

import gc
import json
import sys
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from tandem.config import Settings
from tandem.model import device
from tandem.model.device import memory
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.trainer.launch import RankSettings
from tandem.trainer.rank import entry, model_loader
from tandem.training import phases
from tandem.training.optimizer import AdapterOptimizer

rows: list[dict[str, Any]] = []
tasks: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
optimizers: list[Any] = []


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address -> bytes of each allocation on the device that `tensors` use. A tensor and its views
    use the same allocation."""
    return {
        tensor.untyped_storage().data_ptr(): size
        for tensor in tensors
        if tensor.device.type == device.device().type
        and (size := tensor.untyped_storage().nbytes())
    }


def sizes() -> dict[str, list[int]]:
    """Kind of tensor -> bytes of each allocation of this kind."""
    kinds: dict[str, dict[int, int]] = {
        kind: {} for kind in ("base", "other", "lora", "gradients", "moments", "graphs")
    }
    for optimizer in optimizers:
        policy, moments = optimizer.policy, optimizer.moments().values()
        lora, others = list(policy.lora_parameters().values()), list(policy.buffers())
        for module in policy.modules():
            others += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        parameters, kinds["lora"] = storages(policy.parameters()), storages(lora)
        kinds["base"] = {at: size for at, size in parameters.items() if at not in kinds["lora"]}
        kinds["other"] = {at: size for at, size in storages(others).items() if at not in parameters}
        kinds["gradients"] = storages(parameter.grad for parameter in lora)
        if policy.layer_graphs is not None:  # The inputs and outputs of the CUDA graphs of layers.
            graphs = vars(policy.layer_graphs)
            kinds["graphs"] = storages(
                value
                for value in [*graphs.values(), *graphs["_inputs"]]
                if isinstance(value, torch.Tensor)
            )
        kinds["moments"] = storages(tensor for tensors in moments for tensor in tensors.values())
    return {kind: sorted(found.values()) for kind, found in kinds.items()}


def measure(at: str, phase: str | None = None, reported: dict[str, int] | None = None) -> None:
    device.synchronize()
    gc.collect()
    visible = 0
    if device.is_cuda():
        # Each thread that multiplies matrices has a workspace of 32 MiB.
        memory.release_workspaces()
        # This `torch.empty` makes the allocator take back memory that other streams no longer use.
        torch.empty(1, device=device.device())
    else:
        visible = sum(
            storages(o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)).values()
        )
    row = {
        "at": at,
        "phase": phase,
        "reported": reported,
        "stats": memory.stats(),
        "sizes": sizes(),
    }
    rows.append(row | {"visible": visible})


class FollowedPool(ThreadPoolExecutor):
    """A thread pool that records its tasks. The tasks use memory only while they run, so a phase is
    measured after its tasks are done."""

    def submit(self, *arguments: Any, **options: Any) -> Future[Any]:
        future = super().submit(*arguments, **options)
        tasks.add(future)
        return future


class MeasuredWatch(phases.MemoryWatch):
    """Measures the allocations right after the rank has taken the numbers for its own report."""

    def begin_phase(self) -> None:
        measure("begin")
        super().begin_phase()

    def end_phase(self, name: str) -> dict[str, int]:
        assert not wait(list(tasks), timeout=60).not_done
        reported = super().end_phase(name)
        measure("end", name, reported)
        return reported

    def begin_step(self) -> None:
        super().begin_step()
        measure("step")


class NotedOptimizer(AdapterOptimizer):
    def __init__(self, policy: Any, settings: Any) -> None:
        super().__init__(policy, settings)
        self.policy = policy
        optimizers[:] = [self]


if __name__ == "__main__":
    from tandem.trainer.rank import session

    model_loader.ThreadPoolExecutor, model_loader.AdapterOptimizer = FollowedPool, NotedOptimizer
    session.MemoryWatch = MeasuredWatch
    status = entry.main(Attempt(Spool(sys.argv[1]), sys.argv[2], 1), RankSettings.of(Settings()))
    Path(sys.argv[3]).write_text(json.dumps(rows))
    sys.exit(status)
