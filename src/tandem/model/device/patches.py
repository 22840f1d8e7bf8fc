"""Replaces functions of torch in ranks. Every replacement of a torch function is in this file.

`tests/test_patches.py` lists the replaced names, with the version of torch from which each patch
can be removed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def uncompiled(package: str) -> Iterator[None]:
    """Within the `with` block, `torch.compile` returns functions of `package` uncompiled."""
    compile_ = torch.compile

    def compile_others(model: Any = None, **options: Any) -> Any:
        if model is None:  # called with options only, `torch.compile` returns a decorator
            return lambda function: compile_others(function, **options)
        return model if model.__module__.startswith(package) else compile_(model, **options)

    torch.compile = compile_others
    try:
        yield
    finally:
        torch.compile = compile_


def remember_gpu_count() -> None:
    """Caches the number of GPUs, because torch 2.11 queries NVML for this number eight times while
    CUDA starts."""
    torch.cuda._cached_device_count = torch._C._cuda_getDeviceCount()
