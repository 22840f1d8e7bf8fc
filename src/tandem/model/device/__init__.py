"""The device of this process, chosen by `activate`: one GPU, or the CPU."""

import os
from collections.abc import Callable
from typing import Literal

import torch

from tandem.model.device import cpu_shim, cuda_start

Kind = Literal["cpu", "cuda"]

_kind: Kind | None = None  # set by `activate`
_gpu_seen = False  # set by `choose`


def choose(setting: Literal["auto", "cpu", "cuda"]) -> Kind:
    """The kind of device that a setting means: "auto" means CUDA if there is a usable GPU.

    Once a GPU was found, neither this process nor one forked from it looks again, which takes time in each rank.
    """
    global _gpu_seen
    if setting == "auto":
        _gpu_seen = _gpu_seen or torch.cuda.is_available()
        return "cuda" if _gpu_seen else "cpu"
    return setting


def activate(kind: Kind, local_rank: int = 0) -> torch.device:
    """Make `kind` this process's device: the CPU, or `cuda:<local_rank>` of the GPUs that the process can see.

    Returns at once; CUDA starts in a thread (see `cuda_start`). Call it before anything is built. A second call with
    the same kind does nothing; with the other kind it raises RuntimeError. A missing GPU is reported by the first
    function that needs it.
    """
    global _kind
    if _kind not in (None, kind):
        raise RuntimeError(f"this process runs on {_kind} already; start another process for {kind}")
    if _kind is None and kind == "cuda":
        cuda_start.begin(local_rank)
    elif _kind is None:
        cpu_shim.install()
    _kind = kind
    return torch.device(kind, cuda_start.index) if kind == "cuda" else torch.device(kind)


def is_cuda() -> bool:
    """Whether `activate` chose a GPU. Doesn't wait for it."""
    if _kind is None:
        raise RuntimeError("this process has no device yet: call tandem.model.device.activate first")
    return _kind == "cuda"


def started() -> bool:
    """Whether the device is ready. Until then this process has no memory on it."""
    return not is_cuda() or cuda_start.finished


def wait_until_started() -> Kind:
    """Wait for the device, make it the calling thread's current device, and return its kind."""
    if not is_cuda():
        return "cpu"
    cuda_start.wait()
    return "cuda"


def on_device[**P, T](work: Callable[P, T]) -> Callable[P, T]:
    """`work`, to be called in another thread: it first waits for the device and makes it current in that thread."""

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        wait_until_started()
        return work(*args, **kwargs)

    return run


def device() -> torch.device:
    """The device that `activate` chose, when it has started."""
    return torch.device("cuda", cuda_start.index) if wait_until_started() == "cuda" else torch.device("cpu")


def synchronize() -> None:
    """Wait until the device has finished all work queued by this process."""
    if started() and wait_until_started() == "cuda":
        torch.cuda.synchronize()


def uuid() -> str:
    """The GPU's UUID in NVML's form (`GPU-…` or `MIG-…`), or "cpu"."""
    if wait_until_started() == "cpu":
        return "cpu"
    index, visible = cuda_start.index, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if index < len(visible) and visible[index].startswith("MIG-"):
        return visible[index]
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def default_dtype() -> torch.dtype:
    """The dtype of base weights and activations for the setting `auto`."""
    return torch.bfloat16 if is_cuda() else torch.float32
