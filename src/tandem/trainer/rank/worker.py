"""One rank of one job, as a process: its arguments, its exit status, and the error it leaves behind.

    python -m tandem.trainer.rank.worker --root <spool> --job <id> --attempt <n>

under torchrun's environment. What a rank does is in `tandem.trainer.rank.session`. A rank that fails leaves
`error.<rank>.json` (a JobError) in the attempt's work directory and exits with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.config import Settings
from tandem.errors import TandemError
from tandem.spool import Spool, fs
from tandem.spool.paths import error_file
from tandem.spool.schema import JobError
from tandem.system.processes import die_with_parent

if TYPE_CHECKING:
    from tandem.trainer.rank.kept import Kept

# A rank that merely lost its peer waits this long before it fails too, so that the peer's own error is the first.
PEER_GRACE_SECONDS = 3.0
_TRACEBACK_CHARACTERS = 4000


@cache
def preload() -> None:
    """Import everything a rank uses, ahead of a job or for a process that ranks are forked from. Touches no device."""
    _quiet()
    # What imports make stays. Looking through it for garbage takes half a second each time, now and in the job, and
    # would give each forked rank pages of its own.
    gc.disable()
    try:
        _import()
        gc.freeze()
    finally:
        gc.enable()


def _import() -> None:
    importlib.import_module("tandem.trainer.rank.session")
    # torch.use_deterministic_algorithms imports it on its first call: two seconds that every forked rank would pay.
    importlib.import_module("torch._inductor.config")
    with contextlib.suppress(ImportError):
        importlib.import_module("megatron.core.models.mimo.optimizer")  # to make any optimizer, Megatron asks it
    from tandem.model.device import device

    if device.choose(Settings().device) == "cuda":
        # What torch.compile imports on its first call, another second. Not its worker processes, which it starts when
        # this is imported: a rank forks its own if there is anything to compile.
        os.environ.setdefault("TORCH_WARM_POOL", "0")
        importlib.import_module("torch._inductor.compile_fx")
        with contextlib.suppress(ImportError, AttributeError):
            # Hashes of torch's and Triton's sources, for the keys of what is compiled: half a second.
            importlib.import_module("torch._inductor.codecache").torch_key()
            importlib.import_module("triton.runtime.cache").triton_key()
        with contextlib.suppress(ImportError, AttributeError):
            # What it imports at its first graph.
            importlib.import_module("torch._inductor.fx_passes.quantization")
            importlib.import_module("torch._inductor.fx_passes.pre_grad").lazy_init()
            importlib.import_module("torch._inductor.codegen.common").init_backend_registration()
        with contextlib.suppress(Exception):
            importlib.import_module("triton.backends.nvidia.driver").libcuda_dirs()  # asks ldconfig
        for name in ("_dynamo.aot_compile", "_inductor.codegen.memory_planning", "_inductor.hooks",
                     "fx.experimental.validator"):  # fmt: skip
            with contextlib.suppress(ImportError):  # to load what was compiled ahead
                importlib.import_module(f"torch.{name}")


def resident() -> Callable[[Path, str, int], int]:
    """`main` for a process that stays: each call may use what the one before it kept. After any status but 0 the
    process should end."""
    from tandem.trainer.rank.kept import Kept

    return partial(main, kept=Kept())


def main(root: Path | str, job_id: str, attempt: int, kept: Kept | None = None) -> int:
    """Run this process's rank; its exit status. Never raises: errors go to stderr and to `error.<rank>.json`."""
    faulthandler.enable()
    _quiet()
    rank = int(os.environ.get("RANK", "0"))
    work: Path | None = None
    try:
        spool = Spool(root)
        work = spool.paths.work_dir(job_id, attempt)
        # cuBLAS sums in the same order every time only with a workspace that was fixed before its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # One queue to the GPU instead of eight: making them is half of the time that a context takes.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        # Late: importing torch takes seconds, and a spool that is unusable should say so at once.
        preload()
        from tandem.trainer.rank.session import run_rank

        run_rank(spool, Settings(root=spool.root), job_id, attempt, kept)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        if _lost_a_peer(error):
            time.sleep(PEER_GRACE_SECONDS)
        if work is not None:
            with contextlib.suppress(TandemError, OSError):
                fs.write_json_atomic(error_file(work, rank), describe(error))
        return 1
    return 0


def describe(error: BaseException) -> JobError:
    """What a job's record says about `error`."""
    if isinstance(error, TandemError):
        return JobError(type=error.code, message=str(error), retriable=error.retriable)
    # By its name: torch may not be imported yet, or not at all.
    memory = type(error).__name__ in ("OutOfMemoryError", "MemoryError")
    trace = "".join(traceback.format_exception(error))
    return JobError(
        type="oom" if memory else "rank_error",
        message=f"{type(error).__name__}: {error}",
        retriable=True,
        log_tail=trace[-_TRACEBACK_CHARACTERS:],
    )


def _quiet() -> None:
    """Megatron warns at import about each optional package that is absent; a job's log is for what happened in it."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=SyntaxWarning)


def _lost_a_peer(error: BaseException) -> bool:
    phrases = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in phrases)


if __name__ == "__main__":
    die_with_parent()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    arguments = parser.parse_args()
    sys.exit(main(arguments.root, arguments.job, arguments.attempt))
