"""Locks between processes and threads, and three records that the runner writes. The records are
the runner lock, the leases of jobs, and the hold of shared GPUs.

Locks are fcntl record locks, which the kernel frees when their holder dies. A record lock belongs
to a process, and doesn't exclude other threads of this process. If the process closes *any*
descriptor of the file, the kernel releases the record lock. Each lock file therefore also has a
lock for threads, and no other module opens lock files.
"""

import errno
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from tandem.errors import SpoolUnusable
from tandem.spool import fs
from tandem.spool.paths import Paths
from tandem.spool.schema import Hold, Job, Lease, RunnerInfo
from tandem.system.plain_files import descriptor

# `struct flock` of 64-bit Linux: type, whence, start, length, pid.
_FLOCK = "hhqqi4x"


class LockHeldError(Exception):
    """Another process or thread holds the lock. `content` has the bytes of the lock file."""

    def __init__(self, content: bytes) -> None:
        super().__init__("lock held")
        self.content = content


class _ProcessLock:
    """The state of one lock file in this process."""

    def __init__(self) -> None:
        self.thread_lock = threading.RLock()
        self.depth = 0  # how many times the owning thread has taken the lock
        self.fd = -1


_process_locks: dict[str, _ProcessLock] = {}
_process_locks_lock = threading.Lock()


def _forget_in_child() -> None:
    """Resets the locks in a forked child. After a fork, the record locks still belong to the
    parent, and the child lacks the threads that hold the thread locks."""
    global _process_locks_lock
    _process_locks.clear()
    _process_locks_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)


@contextmanager
def file_lock(path: Path, *, blocking: bool = True) -> Iterator[int]:
    """Holds an exclusive lock on `path`, which is created if absent; yields the file's descriptor.
    A thread that holds the lock may take it again. With `blocking=False`, raises LockHeldError if
    another process or thread holds the lock. Raises SpoolUnusable if the volume is read-only or
    does not support locks."""
    with _process_locks_lock:
        lock = _process_locks.setdefault(os.path.realpath(path), _ProcessLock())
    if not lock.thread_lock.acquire(blocking=blocking):
        raise LockHeldError(b"")
    try:
        if not lock.depth:
            lock.fd = _open_locked(path, blocking)
        lock.depth += 1
        try:
            yield lock.fd
        finally:
            lock.depth -= 1
            if not lock.depth:
                os.close(lock.fd)
    finally:
        lock.thread_lock.release()


def _open_locked(path: Path, blocking: bool) -> int:
    with fs.volume_errors(path):
        fd = descriptor(path, os.O_RDWR | os.O_CREAT, links="above")
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX if blocking else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            content = os.pread(fd, 4096, 0)
            os.close(fd)
            if (
                not blocking
                and isinstance(error, OSError)
                and error.errno in (errno.EAGAIN, errno.EACCES)
            ):
                raise LockHeldError(content) from error
            raise
        return fd


def is_locked(path: Path) -> bool:
    """Whether another process holds a record lock on `path`. The function only asks the kernel and
    does not take the lock, so no other process has to wait. The holder of the lock must not call
    `is_locked`. For the holder, `is_locked` would return False, and would release the lock by
    closing a descriptor.
    """
    fd = descriptor(path, os.O_RDONLY)
    try:
        query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind: int = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, query))[0]
        return kind != fcntl.F_UNLCK
    finally:
        os.close(fd)


def hold_runner_lock(paths: Paths, runner: str) -> AbstractContextManager[None]:
    """Holds `jobs/runner.lock`, and writes the runner's name into it. If another runner holds the
    lock, raises SpoolUnusable with that holder's name."""
    return _hold(paths, paths.runner_lock, "runner", runner)


def hold_publisher_lock(paths: Paths, path: Path | None = None) -> AbstractContextManager[None]:
    """Holds `jobs/locks/publisher`, or the lock file `path` of one replica's publisher. If another
    publisher holds the lock, raises SpoolUnusable with that holder's name."""
    return _hold(paths, path or paths.publisher_lock, "publisher", "publisher")


@contextmanager
def _hold(paths: Paths, path: Path, kind: str, name: str) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            fd = stack.enter_context(file_lock(path, blocking=False))
        except LockHeldError as error:
            raise SpoolUnusable(
                f"{paths.root} has a {kind} already: {_holder(error.content)}. One spool has one"
                f" {kind}; stop that one first, or give this one a TANDEM_ROOT of its own"
            ) from error
        info = RunnerInfo(
            runner=name, host=socket.gethostname(), pid=os.getpid(), since=time.time()
        )
        with fs.volume_errors(path):
            os.pwrite(fd, info.model_dump_json().encode().ljust(512) + b"\n", 0)
            os.fsync(fd)
        yield


def runner_info(paths: Paths) -> RunnerInfo | None:
    """The runner that holds `jobs/runner.lock`, or held it last; None if no runner ever held the
    lock. The runner itself must not call this function, because the call would release the runner's
    own lock."""
    with suppress(OSError):
        return fs.read_undamaged(paths.runner_lock, RunnerInfo)
    return None


def _holder(content: bytes) -> str:
    try:
        info = RunnerInfo.model_validate_json(content)
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(info.since))
    except (ValueError, OverflowError, OSError):
        return "an unknown runner"
    return f"{info.runner}, pid {info.pid} on host {info.host}, since {since}"


class Leases:
    """The leases: `lease.json` in a job's directory names the runner that runs the job."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def get(self, job_id: str) -> Lease | None:
        """The job's lease; None if no runner runs the job, or if the file is damaged."""
        return fs.read_undamaged(self._paths.lease_file(job_id), Lease)

    def write(self, job: Job, runner: str, phase: str, waits_since: float | None = None) -> None:
        """Writes the runner's heartbeat for the job. The write needs no check, because only the
        runner that holds the runner lock writes leases.

        Args:
            runner: the runner's name.
            waits_since: the time (Unix seconds) at which the attempt began to wait for its ranks to
                start; None if the ranks run.
        """
        lease = Lease(
            job=job.spec.id,
            runner=runner,
            host=socket.gethostname(),
            pid=os.getpid(),
            attempt=job.attempt,
            phase=phase,
            beat=time.time(),
            waits_since=waits_since,
        )
        # The write need not be durable, because a power loss also ends the runner, and a lease
        # without its runner has no meaning.
        fs.write_json_atomic(self._paths.lease_file(job.spec.id), lease, durable=False)


class HoldRecord:
    """The hold, `jobs/hold.json`, reserves the GPUs for the trainer if trainer and vLLM share GPUs.
    While the hold is *live*, no program wakes vLLM, starts vLLM, or loads anything into vLLM. The
    hold is live while its runner holds the runner lock and renews the hold's heartbeat (`beat`). If
    the runner dies, the kernel releases the lock; if the runner hangs, the heartbeat becomes old.
    """

    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def get(self) -> Hold | None:
        """The hold; None if no hold exists, or if the file is damaged."""
        return fs.read_undamaged(self._paths.hold, Hold)

    def put(self, hold: Hold) -> None:
        fs.write_json_atomic(self._paths.hold, hold)

    def clear(self) -> None:
        fs.remove_file(self._paths.hold)

    def live(self) -> Hold | None:
        """The hold if it is live; None if it is not live. The runner itself must not call this
        method, because the call would release the runner's own lock (`is_locked`)."""
        hold, path = self.get(), self._paths.runner_lock
        if hold is not None and abs(time.time() - hold.beat) <= hold.lease:
            runner = runner_info(self._paths)
            # The code compares the names of runners instead of times, because the clock may have
            # been set back since the runner started.
            if runner is not None and is_locked(path) and runner.runner == hold.runner:
                return hold
        return None
