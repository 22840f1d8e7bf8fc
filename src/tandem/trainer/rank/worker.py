"""The entry of a rank's process: what it imports, its exit status, and the error that it leaves
behind."""

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
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.config import Settings
from tandem.errors import TandemError
from tandem.spool import Spool, fs
from tandem.spool.paths import error_file
from tandem.spool.schema import JobError

if TYPE_CHECKING:
    from tandem.trainer.rank.session import RankState

# A rank that fails because another rank is gone waits this long, so that the other's own error
# comes first.
PEER_GRACE_SECONDS = 3.0
_TRACEBACK_CHARACTERS = 4000

# Modules that torch.compile imports at its first use, and functions of theirs whose results it
# keeps. A version of torch that lacks one doesn't need it.
_FIRST_USES_OF_COMPILE = (
    # Hashes torch's sources, for the keys of compiled code.
    ("torch._inductor.codecache", "torch_key"),
    ("triton.runtime.cache", "triton_key"),  # hashes Triton's sources
    ("torch._inductor.fx_passes.quantization", None),
    ("torch._inductor.fx_passes.pre_grad", "lazy_init"),
    ("torch._inductor.codegen.common", "init_backend_registration"),
    ("triton.backends.nvidia.driver", "libcuda_dirs"),  # runs ldconfig
    # This and the following load code that was compiled before.
    ("torch._dynamo.aot_compile", None),
    ("torch._functorch._aot_autograd.subclass_codegen", None),
    ("torch._inductor.codegen.memory_planning", None),
    ("torch._inductor.hooks", None),
    ("torch.fx.experimental.validator", None),
)


@cache
def preload() -> None:
    """Import everything a rank uses: before its job, or in the process that ranks are forked from.
    Uses no device."""
    # Megatron warns about each optional package that is not installed; a job's log should not have
    # that.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    # The imported objects stay. Without this the garbage collector would search them during the
    # import and in each job, and each forked rank would copy their memory.
    gc.disable()
    import_module("tandem.trainer.rank.session")
    # torch.use_deterministic_algorithms imports it at its first call.
    import_module("torch._inductor.config")
    from tandem.model import device

    if device.choose(Settings().device) == "cuda":
        for kernels in ("triton_kernels", "triton_softmax"):
            import_module(f"tandem.model.layer.{kernels}")
        # Importing the compiler must not start its worker processes: a rank forks its own if it
        # compiles anything.
        os.environ.setdefault("TORCH_WARM_POOL", "0")
        import_module("torch._inductor.compile_fx")
        for module, function in _FIRST_USES_OF_COMPILE:
            with contextlib.suppress(Exception):
                imported = import_module(module)
                if function is not None:
                    getattr(imported, function)()
    gc.freeze()
    gc.enable()


def resident() -> Callable[[Path, str, int], int]:
    """`main` for a process that stays: a call may use what the one before it kept. After a status
    other than 0 the process must end."""
    from tandem.trainer.rank.session import RankState

    return partial(main, state=RankState())


def main(root: Path | str, job_id: str, attempt: int, state: "RankState | None" = None) -> int:
    """Run this process's rank; returns 0, or after an error 1. Errors go to stderr, and as a
    JobError to `error.<rank>.json` in the attempt's work directory."""
    faulthandler.enable()
    work: Path | None = None
    try:
        spool = Spool(root)
        work = spool.paths.work_dir(job_id, attempt)
        # cuBLAS is deterministic only with a workspace of fixed size, set before its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # One queue to the GPU instead of eight, because creating queues takes half of the time of a
        # CUDA context.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        # Only now, because importing torch takes seconds, and an unusable spool should be reported
        # at once.
        preload()
        from tandem.trainer.rank.session import run_rank

        run_rank(spool, Settings(root=spool.root), job_id, attempt, state)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        if _lost_a_peer(error):
            time.sleep(PEER_GRACE_SECONDS)
        if work is not None:
            with contextlib.suppress(TandemError, OSError):
                fs.write_json_atomic(
                    error_file(work, int(os.environ.get("RANK", "0"))), _record(error)
                )
        return 1
    return 0


def _record(error: BaseException) -> JobError:
    if isinstance(error, TandemError):
        return JobError(type=error.code, message=str(error), retriable=error.retriable)
    # By name, because torch may not be imported.
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
