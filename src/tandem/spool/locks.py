"""Locks between processes and threads: fcntl record locks, which the kernel frees when their holder dies.

A record lock belongs to the process. It doesn't keep two threads apart, and closing *any* descriptor of the file drops
it. So each lock file has a thread lock beside it, and only this module opens it.
"""

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.spool.fs import volume_errors

# `struct flock` of Linux on 64 bits: type, whence, start, length, pid.
_FLOCK = "hhqqi4x"


class LockHeldError(Exception):
    """Another process or thread holds the lock; `content` is the lock file's."""

    def __init__(self, content: bytes) -> None:
        super().__init__("lock held")
        self.content = content


class _ProcessLock:
    """The state of one lock file in this process."""

    def __init__(self) -> None:
        self.thread_lock = threading.RLock()
        self.depth = 0  # how often its thread holds it
        self.fd = -1


_process_locks: dict[str, _ProcessLock] = {}
_process_locks_lock = threading.Lock()


def _forget_in_child() -> None:
    """After a fork: the record locks stayed with the parent, and the threads that held thread locks don't exist."""
    global _process_locks_lock
    _process_locks.clear()
    _process_locks_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)


@contextmanager
def file_lock(path: Path, *, blocking: bool = True) -> Iterator[int]:
    """Holds an exclusive lock on `path` (made if absent); yields the file's descriptor.

    The same thread may take it again. Not blocking: LockHeldError if somebody else holds it. SpoolUnusable if the
    volume is read-only or has no locks.
    """
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
    with volume_errors(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX if blocking else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            content = os.pread(fd, 4096, 0)
            os.close(fd)
            if not blocking and isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.EACCES):
                raise LockHeldError(content) from error
            raise
        return fd


def is_locked(path: Path) -> bool:
    """Whether another process holds a record lock on `path`. Takes no lock itself, so it keeps nobody out.

    The holder must not call this: the answer would be False, and closing the descriptor would drop its lock.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind: int = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, query))[0]
        return kind != fcntl.F_UNLCK
    finally:
        os.close(fd)
