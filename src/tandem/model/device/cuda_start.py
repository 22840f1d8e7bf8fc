"""Starts CUDA in a thread, while the rank does work that needs no GPU.

Creating a CUDA context takes a good part of a rank's start, more so if several ranks start at once. torch creates it at
the first use of the GPU, and holds the interpreter's lock all the while. Instead:

1. `begin` starts a thread that creates the context through CUDA's runtime library. A call through ctypes releases the
   interpreter's lock.
2. Meanwhile the rank joins its process groups and builds the model in host memory.
3. Code that needs the GPU calls `wait`, which joins the thread and then has torch use the context that exists.

The thread ignores errors: torch runs into the same error in `wait`, and reports it with a message.
"""

import contextlib
import ctypes
import threading

import torch

index = 0  # of the GPU, among those that the process can see
finished = False  # whether any thread has waited for CUDA
_thread: threading.Thread | None = None
_current = threading.local()  # `.set`: the GPU is the current device of this thread


def begin(gpu: int) -> None:
    """Start CUDA on GPU number `gpu` of those that the process can see. Returns at once."""
    global index, _thread
    index, _thread = gpu, threading.Thread(target=_create_context, args=(gpu,), daemon=True)
    _thread.start()


def _create_context(gpu: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        runtime().cudaSetDevice(gpu)


def wait() -> None:
    """Make the GPU the calling thread's current device, when CUDA has started. RuntimeError if it can't be used."""
    global finished
    if getattr(_current, "set", False):
        return
    if _thread is not None:
        _thread.join()
    try:
        # torch 2.11 would ask NVML eight times.
        torch.cuda._cached_device_count = torch._C._cuda_getDeviceCount()
        torch.cuda.set_device(index)
    except RuntimeError as error:
        raise RuntimeError(f"GPU {index} of those that this process can see can't be used: {error}") from error
    _current.set = finished = True


def runtime() -> ctypes.CDLL:
    """CUDA's runtime library, the copy that torch has loaded. Its calls release the interpreter's lock."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
