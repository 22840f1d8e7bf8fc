"""Measures memory on this process's device, allocates memory, and frees unused memory that
allocators keep. All sizes are in bytes."""

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from tandem.model.device import device, wait_until_started

ALIGNMENT = 512  # bytes; each tensor starts at a multiple of 512, like an allocation of its own
COUNTS = {"alloc_retries": "num_alloc_retries", "ooms": "num_ooms"}
"""Name of a count in `stats` -> the count's name in torch.cuda.memory_stats."""


def allocate(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    where: torch.device,
    *,
    multiple: int = ALIGNMENT,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Pack many uninitialised tensors into one allocation, because each call of the driver blocks
    the other threads.

    Returns `(whole, parts)`: `whole` is a flat tensor; `parts` are views of it with the given
    shapes, in the order of `shapes`.

    Args:
        shapes: each tensor's shape by name.
        where: the device of the memory.
        multiple: the size of `whole` in bytes is a multiple of this number.
    """
    begins, end, step = {}, 0, ALIGNMENT // dtype.itemsize
    for name, shape in shapes.items():
        begins[name] = end
        end += -(-math.prod(shape) // step) * step
    length = -(-end * dtype.itemsize // multiple) * multiple // dtype.itemsize
    whole = torch.empty(length, dtype=dtype, device=where)
    return whole, {
        name: whole[at : at + math.prod(shapes[name])].view(shapes[name])
        for name, at in begins.items()
    }


def copy_to(tensor: torch.Tensor, where: torch.device) -> torch.Tensor:
    """A CPU tensor, copied to the device `where`. The host does not wait for the GPU's running
    work."""
    if where.type != "cuda":
        return tensor.to(where)
    # torch keeps the pinned copy until the transfer to the GPU has finished.
    return tensor.pin_memory().to(where, non_blocking=True)


def stats() -> dict[str, int]:
    """Counters of this process's allocator. The function doesn't wait for the GPU's queued work.

    The counters `allocated`, `reserved`, `inactive_split`, `requested` (see
    torch.cuda.memory_stats) and `host_pinned` are in bytes. `<name>_peak` is the peak of one of the
    first four counters since `reset_peaks`. The counters in COUNTS count events since the process's
    start. On the CPU there are only `allocated`, `reserved` and their peaks; both counters are the
    resident set size.
    """
    if wait_until_started() == "cpu":
        lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
        sizes = {line[0]: int(line[1]) * 1024 for line in lines if line[0] in ("VmRSS:", "VmHWM:")}
        now, peak = sizes["VmRSS:"], sizes.get("VmHWM:", sizes["VmRSS:"])
        return {"allocated": now, "reserved": now, "allocated_peak": peak, "reserved_peak": peak}
    torch_stats = torch.cuda.memory_stats()
    values: dict[str, int] = {}
    for name in ("allocated", "reserved", "inactive_split", "requested"):
        values[name] = torch_stats.get(f"{name}_bytes.all.current", 0)
        values[f"{name}_peak"] = torch_stats.get(f"{name}_bytes.all.peak", 0)
    values["host_pinned"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    return values | {name: torch_stats.get(key, 0) for name, key in COUNTS.items()}


def reset_peaks() -> None:
    """Reset the peaks of `stats` to the memory in use now."""
    if wait_until_started() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        # If resetting the peaks is forbidden, the peaks count from the process's start.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def used() -> int:
    """Bytes in use on the whole device, by all processes."""
    if wait_until_started() == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total - free
    return (os.sysconf("SC_PHYS_PAGES") - os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def obtainable() -> int:
    """Bytes of GPU memory that this process can obtain, including the bytes that it already has."""
    total = torch.cuda.get_device_properties(device()).total_memory
    return min(
        torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved(),
        int(total * torch.cuda.get_per_process_memory_fraction()),
    )


def release_cached() -> None:
    """Free the memory that allocators keep for reuse: unused device memory and unused pinned host
    memory."""
    if wait_until_started() == "cuda":
        release_workspaces()
        torch.cuda.empty_cache()
        # In newer versions of torch, torch.accelerator.empty_host_cache calls `_host_emptyCache`.
        torch._C._host_emptyCache()


def release_workspaces() -> None:
    """Return cuBLAS's workspaces to the allocator. The next matrix product creates a new
    workspace."""
    if wait_until_started() == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
