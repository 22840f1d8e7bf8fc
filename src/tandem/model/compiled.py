"""Compiles functions once with torch.compile; later processes load the result from files.

torch itself caches kernels in files, too. But each process must trace a function to learn which of
the cached kernels the function needs. A function compiled ahead of time (`aot_compile`) is not
traced again, so it loads sooner. The compiled functions are pickles in TORCHINDUCTOR_CACHE_DIR,
beside torch's own files. Whoever can write to TORCHINDUCTOR_CACHE_DIR can run code in the ranks. So
Tandem refuses a cache directory that another user made or can write to.
"""

import contextlib
import hashlib
import inspect
import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tandem.errors import SpoolUnusable
from tandem.spool import fs
from tandem.system.environment import INDUCTOR_VARIABLE, compiler_caches, trusted_directory

# Prefixes of the environment variables that may change the compiler's output.
_ENVIRONMENT = ("TORCHINDUCTOR_", "TRITON_")


class Compiled[**P, T]:
    """`function`, compiled with its gradients. Each kind of arguments (`_kind`) has its own
    compiled function.

    `function` takes tensors and numbers, computes on one device, and depends only on its arguments
    and its module's source.
    """

    def __init__(self, function: Callable[P, T]) -> None:
        self._function = function
        self._compiled: dict[tuple[object, ...], Any] = {}  # kind of arguments -> compiled function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Takes positional arguments only. The first call with a new kind of arguments loads the
        compiled function from a file. If there is no file, this call compiles the function, which
        takes seconds."""
        assert not kwargs
        kind = _kind(args)
        if kind not in self._compiled:
            file = _directory() / f"{self._digest(kind, args)}.aot"
            self._compiled[kind] = self._load(file) or self._compile(args, file)
            # torch's guards are disabled, because the guards would only check properties that are
            # part of `kind`.
            self._compiled[kind].disable_guard_check()
        result: T = self._compiled[kind](*args)
        return result

    def _digest(self, kind: tuple[object, ...], arguments: tuple[object, ...]) -> str:
        """A hash of everything that affects the compiler's output."""
        gpus = {
            argument.device
            for argument in arguments
            if isinstance(argument, torch.Tensor) and argument.is_cuda
        }
        made_for = [
            (gpu.name, gpu.multi_processor_count)
            for gpu in map(torch.cuda.get_device_properties, gpus)
        ]
        source = Path(inspect.getfile(self._function)).read_bytes()
        environment = sorted(
            (name, value)
            for name, value in os.environ.items()
            if name.startswith(_ENVIRONMENT) and not name.endswith("_DIR")
        )
        versions = torch.__version__, platform.python_version()
        key = repr((kind, made_for, environment, versions, self._function.__qualname__)).encode()
        return hashlib.sha256(key + source).hexdigest()

    def _load(self, file: Path) -> Any:
        try:
            with file.open("rb") as opened:
                return torch.compiler.load_compiled_function(
                    opened, f_globals=self._function.__globals__
                )
        except FileNotFoundError:
            return None
        except Exception as error:  # a damaged pickle may raise anything
            warnings.warn(f"{file} can't be used, compiling again: {error!r}", stacklevel=2)
            return None

    def _compile(self, arguments: tuple[Any, ...], file: Path) -> Any:
        from torch._dynamo import config
        from torch._inductor import config as inductor

        with contextlib.ExitStack() as settings:
            if hasattr(config, "enable_aot_compile"):  # the setting is off by default in torch 2.11
                settings.enter_context(config.patch(enable_aot_compile=True))
            # Since torch 2.12, each thread has its own inductor settings. The function
            # torch.use_deterministic_algorithms changes only the calling thread's settings. A new
            # rank compiles in another thread (`Policy.rehearse`).
            settings.enter_context(
                inductor.patch(deterministic=torch.are_deterministic_algorithms_enabled())
            )
            # Guards on globals are dropped. Guards on globals check torch's own globals, and some
            # of these guards can't be serialised.
            options: dict[str, Any] = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
            lazy: Any = torch.compile(
                self._function, fullgraph=True, dynamic=False, options=options
            )
            compiled = lazy.aot_compile((arguments, {}))
        try:
            fs.write_atomic(file, type(compiled).serialize(compiled).serialized_data)
        except (OSError, RuntimeError, SpoolUnusable) as error:
            warnings.warn(
                f"{file} can't be written, later processes compile again: {error!r}", stacklevel=2
            )
        return compiled


def _directory() -> Path:
    """The directory of the files of compiled functions. Raises SpoolUnusable if another user may
    have written to the directory."""
    if not os.environ.get(INDUCTOR_VARIABLE):  # no launcher has set the cache directory
        os.environ |= compiler_caches(os.environ)
    cache = Path(os.environ[INDUCTOR_VARIABLE])
    cache.parent.mkdir(parents=True, exist_ok=True)
    directory = trusted_directory(cache) / "tandem"
    # On a read-only file system the directory can't be made. The error is ignored, because
    # `_compile` warns when it can't write the file.
    with contextlib.suppress(OSError):
        trusted_directory(directory)
    return directory


def _kind(arguments: tuple[object, ...]) -> tuple[object, ...]:
    """The properties of the arguments and of torch's state that a compiled function depends on."""
    gradients = torch.is_grad_enabled()
    return (
        gradients,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        *(
            (
                (
                    argument.dtype,
                    argument.device,
                    argument.shape,
                    argument.stride(),
                    gradients and argument.requires_grad,
                )
                if isinstance(argument, torch.Tensor)
                else argument
            )
            for argument in arguments
        ),
    )
