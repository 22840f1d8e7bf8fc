"""The device of this process. The only place that knows the CPU from CUDA.

Megatron-core asks `torch.cuda` for its device, streams and random state, and writes `device="cuda"` in factory calls.
On the CPU `activate` answers for the CPU, for the whole process, before any model is built; nothing else has to care.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils._device import _device_constructors

Kind = Literal["cpu", "cuda"]

_kind: Kind | None = None


def choose(setting: Literal["auto", "cpu", "cuda"]) -> Kind:
    """The device that a setting means: "auto" is CUDA where there is a usable GPU."""
    if setting == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return setting


def activate(kind: Kind, local_rank: int = 0) -> torch.device:
    """Make `kind` this process's device: `cuda:<local_rank>` of what the process can see, or the CPU.

    Once per process, before anything is built. Calling it again with the same kind is harmless.

    Raises:
        RuntimeError: called before with the other kind; or no such CUDA device.
    """
    global _kind
    if _kind not in (None, kind):
        raise RuntimeError(f"this process runs on {_kind} already; start another one for {kind}")
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
    elif _kind is None:
        _answer_for_the_cpu()
    _kind = kind
    return device()


def device() -> torch.device:
    """The device that `activate` chose."""
    return torch.device("cuda", torch.cuda.current_device()) if _active() == "cuda" else torch.device("cpu")


def backend() -> Literal["nccl", "gloo"]:
    """torch.distributed's backend for this device."""
    return "nccl" if _active() == "cuda" else "gloo"


def default_dtype() -> torch.dtype:
    """The dtype of base weights and activations where the settings say `auto`."""
    return torch.bfloat16 if _active() == "cuda" else torch.float32


def attention_kernel() -> Literal["flex", "sdpa"]:
    """The faster of `tandem.model.attention`'s two kernels here."""
    return "flex" if _active() == "cuda" else "sdpa"


def synchronize() -> None:
    """Wait until all work given to the device is done."""
    if _active() == "cuda":
        torch.cuda.synchronize()


def memory() -> dict[str, int]:
    """Bytes: `allocated` by tensors now, `reserved` by this process's allocator, `device_used` by everybody, and
    `peak`, the most ever allocated. On the CPU the first two are this process's resident set, and `peak` its largest.
    """
    if _active() == "cuda":
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "device_used": total - free,
            "peak": torch.cuda.max_memory_allocated(),
        }
    page = os.sysconf("SC_PAGE_SIZE")
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
    used = (os.sysconf("SC_PHYS_PAGES") - os.sysconf("SC_AVPHYS_PAGES")) * page
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"allocated": resident, "reserved": resident, "device_used": used, "peak": peak}


def _active() -> Kind:
    if _kind is None:
        raise RuntimeError("no device yet: call tandem.model.device.activate first")
    return _kind


class _Immediate:
    """A CUDA stream or event for a device that has only one queue and has always finished it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = record = synchronize = wait

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Immediate()

    def elapsed_time(self, _: Any) -> float:
        return 0.0


@contextlib.contextmanager
def _same_stream(_: Any) -> Iterator[None]:
    yield


def _answer_for_the_cpu() -> None:
    cpu, only = torch.device("cpu"), _Immediate()
    # Each name gets an answer of its own: torch.compile refuses a torch in which two names are one object.
    answers: dict[str, Any] = {
        "current_device": lambda: cpu,
        "current_stream": lambda *_, **__: only,
        "Stream": type("Stream", (_Immediate,), {}),
        "Event": type("Event", (_Immediate,), {}),
        "stream": _same_stream,
        "synchronize": lambda *_, **__: None,
        # The CPU has one generator, which every caller saves and restores beside CUDA's.
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda *_, **__: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    # `with torch.device(...)` knows factories by identity, from a set made at first use: let it know the real ones.
    _device_constructors()
    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint"):
        setattr(torch, name, _on_the_cpu(getattr(torch, name)))

    from tandem.model.mcore import random  # after the answers: imports may ask already

    random._get_cuda_rng_state = torch.cuda.get_rng_state
    random._set_cuda_rng_state = torch.cuda.set_rng_state


def _on_the_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`factory` with `device="cuda"` read as the CPU."""

    @functools.wraps(factory)
    def made_here(*args: Any, **kwargs: Any) -> torch.Tensor:
        where = kwargs.get("device")
        if where is not None and torch.device(where).type == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return made_here
