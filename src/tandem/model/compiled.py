"""Functions that torch.compile compiled once, kept in files for later processes.

torch keeps kernels from one process to the next, but each finds out anew which it needs: a trace in Python, 0.3 s for
the attention, and twice that beside threads that want the interpreter too. What was compiled ahead of time
(`aot_compile`) is there in 0.1 to 0.2 s, beside such threads. The files are pickles, as those are that torch keeps
beside them, in TORCHINDUCTOR_CACHE_DIR, and as trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import platform
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tandem.errors import SpoolUnusable
from tandem.spool import fs

_ENVIRONMENT = ("TORCHINDUCTOR_", "TRITON_")  # of variables that may decide what is made


class Compiled[**P, T]:
    """`function`, compiled for every kind of arguments it is called with, and its gradients with it.

    `function` takes tensors and numbers, computes on one device, and depends on nothing but them and its module's text.
    """

    def __init__(self, function: Callable[P, T]) -> None:
        self._function = function
        self._made: dict[tuple[object, ...], Any] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """By position alone. The first call of a kind reads its file, or compiles and writes it: seconds."""
        assert not kwargs
        kind = _kind(args)
        if kind not in self._made:
            file = _directory() / f"{self._digest(kind, args)}.aot"
            self._made[kind] = self._load(file) or self._compile(args, file)
            self._made[kind].disable_guard_check()  # the kind is all that they would look at
        result: T = self._made[kind](*args)
        return result

    def _digest(self, kind: tuple[object, ...], arguments: tuple[object, ...]) -> str:
        """Of all that decides what the compiler makes."""
        gpus = {argument.device for argument in arguments if isinstance(argument, torch.Tensor) and argument.is_cuda}
        made_for = [(found.name, found.multi_processor_count) for found in map(torch.cuda.get_device_properties, gpus)]
        source = Path(inspect.getfile(self._function)).read_bytes()
        environment = sorted(
            (name, value)
            for name, value in os.environ.items()
            if name.startswith(_ENVIRONMENT) and not name.endswith("_DIR")
        )
        versions = torch.__version__, platform.python_version()
        told = repr((kind, made_for, environment, versions, self._function.__qualname__)).encode()
        return hashlib.sha256(told + source).hexdigest()

    def _load(self, file: Path) -> Any:
        try:
            with file.open("rb") as opened:
                return torch.compiler.load_compiled_function(opened, f_globals=self._function.__globals__)
        except FileNotFoundError:
            return None
        except Exception as error:  # a pickle that is damaged may raise anything
            warnings.warn(f"{file} can't be used, compiling again: {error!r}", stacklevel=2)
            return None

    def _compile(self, arguments: tuple[Any, ...], file: Path) -> Any:
        from torch._dynamo import config

        # torch 2.11 wants to be told.
        wants = hasattr(config, "enable_aot_compile")
        with config.patch(enable_aot_compile=True) if wants else contextlib.nullcontext():
            # What is asked of globals is about torch's own, and some of it can't be written.
            lazy: Any = torch.compile(self._function, fullgraph=True, dynamic=False, options={"guard_filter_fn": _own})
            made = lazy.aot_compile((arguments, {}))
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            fs.write_atomic(file, type(made).serialize(made).serialized_data)
        except (OSError, RuntimeError, SpoolUnusable) as error:
            warnings.warn(f"{file} can't be written, later processes compile again: {error!r}", stacklevel=2)
        return made


def _own(guards: Sequence[Any]) -> list[bool]:
    return [guard.guard_type == "TENSOR_MATCH" for guard in guards]


def _kind(arguments: tuple[object, ...]) -> tuple[object, ...]:
    """What of the arguments and of torch's state the compiled function is for."""
    gradients = torch.is_grad_enabled()
    return (
        gradients,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        *(
            (argument.dtype, argument.device, argument.shape, argument.stride(), gradients and argument.requires_grad)
            if isinstance(argument, torch.Tensor)
            else argument
            for argument in arguments
        ),
    )


def _directory() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "tandem"
