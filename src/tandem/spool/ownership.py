"""What a runner holds: the spool's runner lock, the leases of its jobs, and the hold of GPUs that vLLM shares."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

from tandem.errors import SpoolUnusable
from tandem.spool import fs
from tandem.spool.locks import LockHeldError, file_lock, is_locked
from tandem.spool.paths import Paths
from tandem.spool.schema import Hold, Job, Lease, RunnerInfo


@contextmanager
def hold_runner_lock(paths: Paths, runner: str) -> Iterator[None]:
    """Holds `jobs/runner.lock` with the runner's name in it. SpoolUnusable names another holder."""
    path = paths.runner_lock
    with ExitStack() as stack:
        try:
            fd = stack.enter_context(file_lock(path, blocking=False))
        except LockHeldError as error:
            raise SpoolUnusable(
                f"{paths.root} has a runner already: {_holder(error.content)}. One spool has one runner; stop that one "
                "first, or give this one a TANDEM_ROOT of its own"
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
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(info.since))
    except (ValueError, OverflowError, OSError):
        return "an unknown runner"
    return f"{info.runner}, pid {info.pid} on host {info.host}, since {since}"


class Leases:
    """`jobs/leases/<id>.json`: who runs a job."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def get(self, job_id: str) -> Lease | None:
        """The job's lease; None if nobody runs the job, or if the file is damaged."""
        return fs.read_undamaged(self._paths.lease_file(job_id), Lease)

    def write(self, job: Job, runner: str, phase: str) -> None:
        """The heartbeat of the runner, which runs the job."""
        lease = Lease(
            job=job.spec.id, runner=runner, host=socket.gethostname(), pid=os.getpid(), attempt=job.attempt,
            phase=phase, beat=time.time(),
        )  # fmt: skip
        # A loss of power ends the runner too, and a lease without a runner says nothing.
        fs.write_json_atomic(self._paths.lease_file(job.spec.id), lease, durable=False)


class HoldRecord:
    """The hold, `jobs/hold.json`: it says that the GPUs which trainer and vLLM share are the trainer's now.

    While the hold is *live*, nobody wakes vLLM, starts one, or loads anything into it. The hold is live while its
    runner holds the runner lock, which the kernel frees when it dies, and renews the hold's beat, which a hung runner
    doesn't.
    """

    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def lock(self, *, blocking: bool = True) -> AbstractContextManager[int]:
        """Held while the hold changes, and by whoever needs vLLM awake. Not blocking: LockHeldError."""
        return file_lock(self._paths.gpus_lock, blocking=blocking)

    def get(self) -> Hold | None:
        """The hold; None without one, or if the file is damaged."""
        return fs.read_undamaged(self._paths.hold, Hold)

    def put(self, hold: Hold) -> None:
        fs.write_json_atomic(self._paths.hold, hold)

    def clear(self) -> None:
        fs.remove_file(self._paths.hold)

    def live(self) -> Hold | None:
        """The hold if it is live. The runner itself must not call this: it would drop its own lock (`is_locked`)."""
        hold, path = self.get(), self._paths.runner_lock
        if hold is not None and abs(time.time() - hold.beat) <= hold.lease:
            with suppress(OSError):
                runner = fs.read_undamaged(path, RunnerInfo)
                # A runner that started after the hold was written is another one, even with the same name.
                if runner is not None and is_locked(path) and runner.since <= hold.since:
                    return hold
        return None
