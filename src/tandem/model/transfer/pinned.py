"""Pinned host memory of an exact size. torch's allocator rounds each allocation up to a power of
two."""

import contextlib
import mmap

import torch


def pinned_memory(size: int) -> torch.Tensor:
    """A block of pinned memory, uint8 [size]; call `release_pinned` before the block is freed.

    The block uses huge pages if the kernel has any, because small pages take longer to pin and to
    read.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0)))
    return buffer


def release_pinned(buffer: torch.Tensor) -> None:
    """Unpin memory that `pinned_memory` returned, uint8 [size]."""
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
