"""The entry point of a rank's process: its imports, its exit status, and the record of its
error."""

import contextlib
import faulthandler
import gc
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from tandem.errors import TandemError
from tandem.spool import fs
from tandem.spool.attempt import Attempt
from tandem.spool.schema import JobError
from tandem.trainer.launch import RankSettings
from tandem.trainer.rank.way_to_vllm import choose_interface

if TYPE_CHECKING:
    from tandem.trainer.rank.state import RankState

# Seconds that a rank waits before it reports that another rank has died, so that the other rank's
# own error is reported first.
PEER_GRACE_SECONDS = 3.0
_TRACEBACK_CHARACTERS = 4000


@cache
def preload(device_setting: Literal["auto", "cpu", "cuda"]) -> None:
    """Import all modules that a rank uses. The function is called before the rank's job, or in the
    process from which ranks are forked. `preload` uses no device."""
    # Megatron warns about each optional package that is not installed, and these warnings would
    # clutter a job's log.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    # `gc.freeze` (below) excludes the imported objects from garbage collection, because they live
    # as long as the process. Without the freeze, the garbage collector would search all imported
    # objects in each job, and each forked rank would copy their memory.
    gc.disable()
    import_module("tandem.trainer.rank.train")
    # The first call of torch.use_deterministic_algorithms imports torch._inductor.config.
    import_module("torch._inductor.config")
    from tandem.model import device

    if device.choose(device_setting) == "cuda":
        for kernels in ("triton_kernels", "triton_softmax"):
            import_module(f"tandem.model.layer.{kernels}")
        # Importing the compiler must not start the compiler's worker processes. A rank that
        # compiles starts its own worker processes.
        os.environ.setdefault("TORCH_WARM_POOL", "0")
        # Importing compile_fx in advance saves each forked rank a second. The compiler is not
        # called in advance, because it would call CUDA.
        import_module("torch._inductor.compile_fx")
        # The cache keys of compiled code are hashes of all sources of torch and Triton. Computing
        # the hashes in advance saves each forked rank half a second. `torch_key` and `triton_key`
        # cache the hashes.
        for module, key in (
            ("torch._inductor.codecache", "torch_key"),
            ("triton.runtime.cache", "triton_key"),
        ):
            with contextlib.suppress(ImportError, AttributeError):
                getattr(import_module(module), key)()
    gc.freeze()
    gc.enable()


def resident() -> Callable[[Attempt, RankSettings], int]:
    """Returns a `main` for a process that runs several jobs. Each call may reuse the state that the
    previous call kept. After a status other than 0, the process must end."""
    from tandem.trainer.rank.state import RankState

    return partial(main, state=RankState())


def main(attempt: Attempt, settings: RankSettings, state: "RankState | None" = None) -> int:
    """Run this process's rank. Returns 0, or 1 after an error. Errors are written to stderr, and as
    a JobError to the attempt's `error` file.

    Args:
        state: a resident rank's state, as for `run_rank`.
    """
    faulthandler.enable()
    try:
        # cuBLAS is deterministic only with a workspace of fixed size, which must be set before
        # cuBLAS is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # CUDA creates one queue to the GPU instead of eight. Creating eight queues takes half of
        # the time of creating a CUDA context.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        choose_interface(attempt.spool, settings)
        preload(settings.device)
        from tandem.trainer.rank.train import run_rank

        run_rank(attempt, settings, state)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        if _lost_a_peer(error):
            time.sleep(PEER_GRACE_SECONDS)
        with contextlib.suppress(TandemError, OSError):
            fs.write_json_atomic(attempt.error(int(os.environ.get("RANK", "0"))), _record(error))
        return 1
    return 0


def _record(error: BaseException) -> JobError:
    if isinstance(error, TandemError):
        return JobError(type=error.code, message=str(error), retriable=error.retriable)
    # The error's type is compared by name, because torch may not be imported yet.
    kind = "oom" if type(error).__name__ in ("OutOfMemoryError", "MemoryError") else "rank_error"
    tail = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:]
    return JobError(
        type=kind, message=f"{type(error).__name__}: {error}", retriable=True, log_tail=tail
    )


def _lost_a_peer(error: BaseException) -> bool:
    phrases = (
        "connection closed by peer",
        "connection reset by peer",
        "broken pipe",
        "remote process exited",
    )
    return isinstance(error, RuntimeError) and any(
        phrase in str(error).lower() for phrase in phrases
    )
