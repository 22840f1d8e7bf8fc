"""The device of this process, chosen by `activate`: one GPU, or the CPU.

CUDA starts in a thread, while the rank does work that needs no GPU. Creating a CUDA context takes a
considerable part of a rank's start time. If several ranks start at once, creating the contexts
takes longer. By itself, torch creates the context at the first use of the GPU, and holds the GIL
during the creation. So Tandem creates the context in three steps:

1. `activate` starts a thread that creates the context through CUDA's runtime library. A call
   through ctypes releases the GIL.
2. While CUDA starts, the rank joins its process groups and builds the model in host memory.
3. Code that needs the GPU calls `wait_until_started`, which joins the thread. After that, torch
   uses the existing context.

The thread ignores errors, because torch runs into the same error later and reports it with a
message.

`memory.py` measures memory; `offload.py` releases memory and allocates it again. `ipc.py` copies
from other processes' GPU memory. `patches.py` replaces functions of torch.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from typing import Literal

import torch

from tandem.model.device import patches

Kind = Literal["cpu", "cuda"]

_kind: Kind | None = None  # set by `activate`
_gpu_seen = False  # set by `choose`
_gpu = 0  # index of the GPU among the GPUs that the process can see
_start: threading.Thread | None = None
_started = False  # whether any thread has waited for CUDA
_current = threading.local()  # `.set`: whether the GPU is the current device of this thread


def choose(setting: Literal["auto", "cpu", "cuda"]) -> Kind:
    """The kind of device for a setting. "auto" is CUDA if there is a usable GPU, else the CPU.

    This process and its forks remember that a GPU was found, because a search takes time in each
    rank.
    """
    global _gpu_seen
    if setting == "auto":
        _gpu_seen = _gpu_seen or torch.cuda.is_available()
        return "cuda" if _gpu_seen else "cpu"
    return setting


def activate(kind: Kind, local_rank: int = 0) -> torch.device:
    """Make `kind` this process's device: the CPU, or `cuda:<local_rank>` of the GPUs that the
    process can see.

    Returns at once; CUDA starts in a thread. Call `activate` before any part of the model is built.
    A second call with the same kind does nothing. A second call with the other kind raises
    RuntimeError. If the GPU is missing, the first function that needs a GPU reports the error.
    """
    global _kind, _gpu, _start
    if _kind not in (None, kind):
        raise RuntimeError(
            f"this process runs on {_kind} already; start another process for {kind}"
        )
    if _kind is None and kind == "cuda":
        _gpu, _start = (
            local_rank,
            threading.Thread(target=_create_context, args=(local_rank,), daemon=True),
        )
        _start.start()
    _kind = kind
    return torch.device(kind, _gpu) if kind == "cuda" else torch.device(kind)


def _create_context(gpu: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        runtime().cudaSetDevice(gpu)


def runtime() -> ctypes.CDLL:
    """The copy of CUDA's runtime library that torch has loaded. Calls of the library's functions
    release the GIL."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")


def is_cuda() -> bool:
    """Whether `activate` chose a GPU. The function does not wait for the GPU to start. Raises
    RuntimeError if `activate` was not called before."""
    if _kind is None:
        raise RuntimeError(
            "this process has no device yet: call tandem.model.device.activate first"
        )
    return _kind == "cuda"


def started() -> bool:
    """Whether the device is ready. Until the device is ready, this process has no memory on the
    device."""
    return not is_cuda() or _started


def wait_until_started() -> Kind:
    """Wait for the device, make it the calling thread's current device, and return its kind. Raises
    RuntimeError if the GPU can't be used."""
    global _started
    if not is_cuda():
        return "cpu"
    if getattr(_current, "set", False):
        return "cuda"
    if _start is not None:
        _start.join()
    try:
        patches.remember_gpu_count()
        torch.cuda.set_device(_gpu)
    except RuntimeError as error:
        raise RuntimeError(
            f"GPU {_gpu} of those that this process can see can't be used: {error}"
        ) from error
    _current.set = _started = True
    return "cuda"


def on_device[**P, T](work: Callable[P, T]) -> Callable[P, T]:
    """`work`, wrapped for use in another thread: the wrapper waits for the device, and makes the
    device current in that thread."""

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        wait_until_started()
        return work(*args, **kwargs)

    return run


def device() -> torch.device:
    """The device that `activate` chose. Waits until the device has started."""
    return torch.device("cuda", _gpu) if wait_until_started() == "cuda" else torch.device("cpu")


def synchronize() -> None:
    """Wait until the device has finished all work queued by this process."""
    if started() and wait_until_started() == "cuda":
        torch.cuda.synchronize()


def uuid() -> str:
    """The GPU's UUID in NVML's form (`GPU-…` or `MIG-…`), or "cpu"."""
    if wait_until_started() == "cpu":
        return "cpu"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if _gpu < len(visible) and visible[_gpu].startswith("MIG-"):
        return visible[_gpu]
    return f"GPU-{torch.cuda.get_device_properties(_gpu).uuid}"


def default_dtype() -> torch.dtype:
    """The dtype of base weights and activations for the setting `auto`."""
    return torch.bfloat16 if is_cuda() else torch.float32
