"""Lets Megatron-core run on the CPU.

Megatron-core asks `torch.cuda` for the device, streams and random state, and writes `device="cuda"` in factory calls.
`install` replaces those functions of torch in the whole process with functions that answer for the CPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import _device_constructors


def install() -> None:
    """Replace the functions. Call it before Megatron-core builds anything."""
    cpu, stream = torch.device("cpu"), _FinishedWork()
    # Each name gets an object of its own: torch.compile refuses a torch in which two names are one object.
    replacements: dict[str, Any] = {
        "current_device": lambda: cpu,
        "current_stream": lambda *_, **__: stream,
        "Stream": type("Stream", (_FinishedWork,), {}),
        "Event": type("Event", (_FinishedWork,), {}),
        "stream": _same_stream,
        "synchronize": lambda *_, **__: None,
        # The CPU has one random generator, which every caller saves and restores beside CUDA's.
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda *_, **__: None,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    # `with torch.device(...)` recognises factories by a set that it makes at first use: make it of the real ones.
    _device_constructors()
    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint"):
        setattr(torch, name, _on_the_cpu(getattr(torch, name)))

    from tandem.model.mcore import random  # only now, because importing Megatron may call the functions above

    random._get_cuda_rng_state = torch.cuda.get_rng_state
    random._set_cuda_rng_state = torch.cuda.set_rng_state


def _on_the_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`factory`, which takes `device="cuda"` to mean the CPU."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        where = kwargs.get("device")
        if where is not None and torch.device(where).type == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


class _FinishedWork:
    """A CUDA stream or event of a device that has only one queue and has always finished it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = record = synchronize = wait

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _FinishedWork()

    def elapsed_time(self, _: Any) -> float:
        return 0.0


@contextlib.contextmanager
def _same_stream(_: Any) -> Iterator[None]:
    yield
