"""The lock of the spool's one runner, `jobs/runner.lock`. The kernel frees it when the runner dies."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pydantic import ValidationError

from tandem.errors import SpoolUnusable
from tandem.spool import fs
from tandem.spool.locks import LockHeldError, file_lock
from tandem.spool.schema import RunnerInfo


@contextmanager
def hold_runner_lock(path: Path, runner: str) -> Iterator[None]:
    """Holds the lock file `path` and writes the runner's name into it. SpoolUnusable names another holder."""
    with ExitStack() as stack:
        try:
            fd = stack.enter_context(file_lock(path, blocking=False, reentrant=False))
        except LockHeldError as error:
            raise SpoolUnusable(
                f"{path.parent.parent} has a runner already: {_holder(error.content)}. One spool has one runner; stop "
                "that one first, or give this one a TANDEM_ROOT of its own"
            ) from error
        info = RunnerInfo(runner=runner, host=socket.gethostname(), pid=os.getpid(), since=time.time())
        with fs.volume_errors(path):
            os.pwrite(fd, info.model_dump_json().encode().ljust(512) + b"\n", 0)
            os.ftruncate(fd, 513)
            os.fsync(fd)
        yield


def _holder(content: bytes) -> str:
    try:
        info = RunnerInfo.model_validate_json(content)
    except ValidationError:
        return "an unknown runner"
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(info.since))
    return f"{info.runner}, pid {info.pid} on host {info.host}, since {since}"
