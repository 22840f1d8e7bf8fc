"""What a runner holds: the spool's runner lock, the leases of its jobs, and the hold of GPUs that vLLM shares."""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from pydantic import ValidationError

from tandem.errors import Conflict, SpoolUnusable
from tandem.spool import fs
from tandem.spool.jobs import Jobs
from tandem.spool.locks import LockHeldError, file_lock, is_locked
from tandem.spool.paths import Paths
from tandem.spool.schema import Hold, Job, Lease, RankProcess, RunnerInfo


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

    def __init__(self, paths: Paths, jobs: Jobs) -> None:
        self._paths = paths
        self._jobs = jobs

    def get(self, job_id: str) -> Lease | None:
        """The job's lease; None if nobody runs the job, or if the file is damaged."""
        return fs.read_undamaged(self._paths.lease_file(job_id), Lease)

    def renew(self, job_id: str, runner: str, phase: str, ranks: Sequence[RankProcess] | None = None) -> Lease:
        """The runner's heartbeat; `ranks` None keeps the recorded ones.

        Conflict (field `id`) if the job is not running, or another runner runs it.
        """
        with file_lock(self._paths.job_lock(job_id)):
            located = self._jobs.locate(job_id)
            if located is None or located[0] != "running" or located[1].result is not None:
                raise Conflict(f"job {job_id!r} is not running, so its lease can't be renewed", field="id")
            lease = self.get(job_id)
            if lease is not None and lease.runner != runner:
                raise Conflict(f"job {job_id!r} is run by {lease.runner} on {lease.host}, not by {runner}", field="id")
            if ranks is None:
                ranks = () if lease is None else lease.ranks
            return self.write(located[1], runner, phase, ranks)

    def write(self, job: Job, runner: str, phase: str, ranks: Sequence[RankProcess]) -> Lease:
        """Replaces the lease, under the job's lock."""
        lease = Lease(
            job=job.spec.id, runner=runner, host=socket.gethostname(), pid=os.getpid(), attempt=job.attempt,
            phase=phase, beat=time.time(), ranks=[*ranks],
        )  # fmt: skip
        # A loss of power ends the runner too, and a lease without a runner says nothing.
        fs.write_json_atomic(self._paths.lease_file(job.spec.id), lease, durable=False)
        return lease


class HoldRecord:
    """The hold, `jobs/hold.json`: it says that the GPUs which trainer and vLLM share are the trainer's now.

    The runner writes it before vLLM sleeps, and removes it once vLLM is awake again. While the hold is *live*, nobody
    wakes vLLM, starts one, or loads anything into it. The hold is live while its runner is alive and makes progress: it
    holds the runner lock, which the kernel frees when it dies, and renews the hold's beat, which a hung runner doesn't.
    """

    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def lock(self, *, blocking: bool = True) -> AbstractContextManager[int]:
        """Held while the hold changes, and by whoever needs vLLM awake while it works. Not blocking: LockHeldError."""
        return file_lock(self._paths.gpus_lock, blocking=blocking)

    def get(self) -> Hold | None:
        """The hold; None without one, or if the file is damaged."""
        return fs.read_undamaged(self._paths.hold, Hold)

    def put(self, hold: Hold) -> None:
        """Replaces the hold, durably."""
        fs.write_json_atomic(self._paths.hold, hold)

    def clear(self) -> None:
        fs.remove_file(self._paths.hold)

    def live(self) -> Hold | None:
        """The hold if it is live. The runner itself must not call this: it would drop its own lock (`is_locked`)."""
        hold = self.get()
        if hold is None or abs(time.time() - hold.beat) > hold.lease:
            return None
        try:
            runner = RunnerInfo.model_validate_json(self._paths.runner_lock.read_bytes())
        except (OSError, ValidationError):
            return None
        # A runner that started after the hold was written is another one, even with the same name.
        return hold if is_locked(self._paths.runner_lock) and runner.since <= hold.since else None
