"""Copies from the GPU memory of other processes on this machine (CUDA IPC)."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator

import torch

from tandem.model.device import runtime

Export = tuple[bytes, int]
"""CUDA's handle of an allocation (cudaIpcMemHandle_t), and a byte offset in the allocation."""


class NotShared(RuntimeError):
    """The driver doesn't let this process use another process's GPU memory."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


def exported(tensor: torch.Tensor) -> Export | None:
    """The handle that another process passes to `imported` to copy `tensor`. `tensor` is
    contiguous, and its memory must exist until the copy is done.

    The result is None if the memory can't be shared: on the CPU, or with the allocator's
    `expandable_segments`.
    """
    if not tensor.is_cuda:
        return None
    handle, base, address = _Handle(), ctypes.c_uint64(), ctypes.c_uint64(tensor.data_ptr())
    try:
        _check(runtime().cudaIpcGetMemHandle(ctypes.byref(handle), address))
    except NotShared:
        return None
    if ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2(ctypes.byref(base), None, address):
        return None
    return bytes(handle), address.value - base.value


@contextlib.contextmanager
def imported(export: Export | None) -> Iterator[Callable[[torch.Tensor, int], None]]:
    """Yields `copy(tensor, offset)`, a function that queues a copy from byte `offset` of another
    process's export into a contiguous tensor. Wait for the copies before the end of the `with`
    block, because the end of the block closes the other process's memory.

    The calling thread's current device and stream are used. Raises NotShared if the memory can't be
    shared, or if a CUDA call fails.
    """
    if export is None:
        raise NotShared("the other process can't share its memory")
    handle, start = export
    pointer, cuda = ctypes.c_void_p(), runtime()
    # The flag 1 is cudaIpcMemLazyEnablePeerAccess, which works without a context on the other
    # process's GPU.
    _check(cuda.cudaIpcOpenMemHandle(ctypes.byref(pointer), _Handle.from_buffer_copy(handle), 1))

    def copy(tensor: torch.Tensor, offset: int) -> None:
        source, target = (
            ctypes.c_void_p((pointer.value or 0) + start + offset),
            ctypes.c_void_p(tensor.data_ptr()),
        )
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        # The kind 3 is cudaMemcpyDeviceToDevice.
        _check(cuda.cudaMemcpyAsync(target, source, ctypes.c_size_t(tensor.nbytes), 3, stream))

    try:
        yield copy
    finally:
        _check(cuda.cudaIpcCloseMemHandle(pointer))


def _check(code: int) -> None:
    if code:
        # CUDA's last error is cleared, because torch's next call would report it.
        runtime().cudaGetLastError()
        raise NotShared(f"CUDA error {code}")
