"""Starts CUDA in a thread, while the rank does work that needs no GPU.

Creating a CUDA context takes a good part of a rank's start, more so if several ranks start at once. torch creates it at
the first use of the GPU, and holds the interpreter's lock all the while. Instead:

1. `begin` starts a thread that creates the context through CUDA's runtime library. A call through ctypes releases the
   interpreter's lock.
2. Meanwhile the rank joins its process groups and builds the model in host memory.
3. Code that needs the GPU calls `wait`, which joins the thread and then has torch use the context that exists.

The thread ignores errors: torch runs into the same error in `wait`, and reports it with a message.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading

import torch

_index = 0
_thread: threading.Thread | None = None
_finished = False
_current = threading.local()  # `.set`: the GPU is the current device of this thread


def begin(index: int) -> None:
    """Start CUDA for GPU number `index` of those that the process can see. Returns at once."""
    global _index, _thread
    _index, _thread = index, threading.Thread(target=_create_context, args=(index,), daemon=True)
    _thread.start()


def _create_context(index: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        runtime().cudaSetDevice(index)


def wait() -> None:
    """Wait until CUDA has started, and make the GPU the calling thread's current device.

    Raises:
        RuntimeError: the GPU can't be used.
    """
    global _finished
    if getattr(_current, "set", False):
        return
    if _thread is not None:
        _thread.join()
    try:
        # torch 2.11 would ask NVML eight times.
        torch.cuda._cached_device_count = torch._C._cuda_getDeviceCount()
        torch.cuda.set_device(_index)
    except RuntimeError as error:
        raise RuntimeError(f"GPU {_index} of those that this process can see can't be used: {error}") from error
    _current.set = _finished = True


def finished() -> bool:
    """Whether any thread has waited for CUDA yet."""
    return _finished


def index() -> int:
    """The GPU's number among those that the process can see."""
    return _index


def runtime() -> ctypes.CDLL:
    """CUDA's runtime library, the copy that torch has loaded. Its calls release the interpreter's lock."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
