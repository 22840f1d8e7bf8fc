"""Memory for many tensors at once, and for reading files."""

import contextlib
import math
import mmap
from collections.abc import Iterator, Mapping

import torch

ALIGNMENT = 512  # bytes; each tensor starts at a multiple of it, as in an allocation of its own


def allocate(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, where: torch.device, *, multiple: int = ALIGNMENT
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Pack many uninitialised tensors into one allocation, because each driver call blocks the other threads.

    Returns `(whole, parts)`: a flat tensor whose size in bytes is a multiple of `multiple`, and a view of it of each
    shape, in the order of `shapes`.
    """
    begins, end, step = {}, 0, ALIGNMENT // dtype.itemsize
    for name, shape in shapes.items():
        begins[name] = end
        end += -(-math.prod(shape) // step) * step
    length = -(-end * dtype.itemsize // multiple) * multiple // dtype.itemsize
    whole = torch.empty(length, dtype=dtype, device=where)
    return whole, {name: whole[at : at + math.prod(shapes[name])].view(shapes[name]) for name, at in begins.items()}


@contextlib.contextmanager
def host_buffer(size: int, *, pinned: bool) -> Iterator[torch.Tensor]:
    """uint8 [size] of host memory to read files into, freed at the end of the block. `pinned`: for copies to a GPU.

    Pinned memory is in huge pages if the kernel has any, because small ones take longer to pin and to read.
    """
    if not pinned:
        yield torch.empty(size, dtype=torch.uint8)
        return
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer, runtime = torch.frombuffer(memory, dtype=torch.uint8), torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(buffer.data_ptr(), size, 0)))
    try:
        yield buffer
    finally:
        runtime.cudaHostUnregister(buffer.data_ptr())
