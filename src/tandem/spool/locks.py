"""Locks between processes (and threads): fcntl record locks, which the kernel frees when the holder dies.

A POSIX lock belongs to the process: it doesn't keep two threads apart, and closing *any* descriptor of the file drops
it. So each lock file has an in-process lock beside it, is opened nowhere else, and holds no data of ours that anybody
else opens.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.spool.fs import volume_errors

_FLOCK = "hhqqi4x"
"""struct flock of Linux on 64 bits: type, whence, start, length, pid."""


class LockHeldError(Exception):
    """Somebody else holds the lock; `content` is what the lock file says."""

    def __init__(self, content: bytes) -> None:
        super().__init__("lock held")
        self.content = content


class _Guard:
    def __init__(self) -> None:
        self.thread_lock = threading.RLock()
        self.depth = 0
        self.fd = -1


_guards: dict[str, _Guard] = {}
_guards_lock = threading.Lock()


def _forget() -> None:
    """In a forked child: the locks stayed with the parent, and threads that held guards don't exist here."""
    global _guards_lock
    _guards.clear()
    _guards_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def file_lock(path: Path, *, blocking: bool = True, reentrant: bool = True) -> Iterator[int]:
    """Holds an exclusive lock on `path` (made if absent); gives the file's descriptor.

    The same thread may take it again unless `reentrant` is False. Not blocking: raises LockHeldError where it is held.
    Raises SpoolUnusable where the volume is read-only or has no locks.
    """
    key = os.path.realpath(path)
    with _guards_lock:
        guard = _guards.setdefault(key, _Guard())
    if not guard.thread_lock.acquire(blocking=blocking):
        raise LockHeldError(b"")
    try:
        if guard.depth and not reentrant:
            raise LockHeldError(os.pread(guard.fd, 4096, 0))
        if not guard.depth:
            guard.fd = _open_locked(path, blocking)
        guard.depth += 1
        try:
            yield guard.fd
        finally:
            guard.depth -= 1
            if not guard.depth:
                os.close(guard.fd)
    finally:
        guard.thread_lock.release()


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
    """Whether another process holds a record lock on `path`. Asks the kernel only: nothing is locked for a moment, in
    which who wants the lock would not get it. For the process that holds the lock itself the answer is no, and the lock
    is gone: closing any descriptor of its file drops it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind: int = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK
    finally:
        os.close(descriptor)
