"""Measures memory on this process's device, allocates, and frees memory that allocators keep
unused. All sizes are in bytes."""

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from tandem.model.device import device, wait_until_started

ALIGNMENT = 512  # bytes; each tensor starts at a multiple of it, as in an allocation of its own
COUNTS = {"alloc_retries": "num_alloc_retries", "ooms": "num_ooms"}
"""Count in `stats` -> its name in torch.cuda.memory_stats."""


def allocate(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    where: torch.device,
    *,
    multiple: int = ALIGNMENT,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Pack many uninitialised tensors into one allocation, because each driver call blocks the
    other threads.

    Returns `(whole, parts)`: a flat tensor whose size in bytes is a multiple of `multiple`, and a
    view of it of each shape, in the order of `shapes`.
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
    # torch keeps the pinned copy until the GPU has it.
    return tensor.pin_memory().to(where, non_blocking=True)


def stats() -> dict[str, int]:
    """Counters of this process's allocator. Doesn't wait for queued work.

    `allocated`, `reserved`, `inactive_split`, `requested` (see torch.cuda.memory_stats) in
    bytes now, and as `<name>_peak` the largest since `reset_peaks`; bytes of `host_pinned` memory;
    and COUNTS since the process began. The CPU has `allocated` and `reserved` alone: both are the
    resident set.
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
        # If this is forbidden, the peaks still count from the process's beginning.
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
    """Bytes that this process can have of its GPU, including the bytes that it has already."""
    total = torch.cuda.get_device_properties(device()).total_memory
    return min(
        torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved(),
        int(total * torch.cuda.get_per_process_memory_fraction()),
    )


def release_cached() -> None:
    """Free the memory that allocators keep for later: unused device memory and unused pinned host
    memory."""
    if wait_until_started() == "cuda":
        release_workspaces()
        torch.cuda.empty_cache()
        # torch.accelerator.empty_host_cache of newer versions calls it.
        torch._C._host_emptyCache()


def release_workspaces() -> None:
    """Return cuBLAS's workspaces to the allocator. The next matrix product creates a new one."""
    if wait_until_started() == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
