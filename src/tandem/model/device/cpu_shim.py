"""Lets Megatron-core run on the CPU, by replacing functions of torch in the whole process.

Megatron-core asks `torch.cuda` for the device, streams and random state, and calls `torch.tensor`
with `device="cuda"`.
"""

import contextlib
import functools
from typing import Any

import torch
from torch.utils._device import _device_constructors


class _Stream:
    """A CUDA stream, or an event in it, of a device that has only one queue, whose work is always
    finished."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, *_: Any) -> Any:
        return self

    record_event = synchronize = wait_stream


def install() -> None:
    """Replace the functions. Call it before Megatron-core builds anything."""
    cpu, stream = torch.device("cpu"), _Stream()
    # Each name gets an object of its own: torch.compile refuses a torch in which two names are one
    # object.
    replacements: dict[str, Any] = {
        "current_device": lambda: cpu,
        "current_stream": lambda *_, **__: stream,
        "Stream": _Stream,
        "stream": lambda _: contextlib.nullcontext(),
        # The CPU has one random generator, which every caller saves and restores beside CUDA's.
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda *_, **__: None,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    # `with torch.device(...)` recognises factories by a set that it makes at first use: make it
    # before replacing one.
    _device_constructors()
    original = torch.tensor

    @functools.wraps(original)
    def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        where = kwargs.get("device")
        if where is not None and torch.device(where).type == "cuda":
            kwargs["device"] = "cpu"
        return original(*args, **kwargs)

    torch.tensor = tensor

    # Only now, because importing Megatron may call the functions above.
    from tandem.model.mcore import random

    random._get_cuda_rng_state = torch.cuda.get_rng_state
    random._set_cuda_rng_state = torch.cuda.set_rng_state
