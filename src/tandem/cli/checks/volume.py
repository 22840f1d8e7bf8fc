"""The shared volume: whether it can be written, its locks, its free space."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tandem.cli.checks import Check, Status
from tandem.cli.output import size
from tandem.config import Settings
from tandem.spool import Spool
from tandem.spool.fs import rename_dir, write_atomic
from tandem.spool.locks import file_lock

_LOW_DISK_BYTES, _NO_DISK_BYTES = 10 * 2**30, 2**30
# Fails where another process holds the lock on the file. A process of its own, because none conflicts with itself.
_TAKE_LOCK = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def volume_checks(settings: Settings) -> Iterator[Check]:
    """Writes, fsyncs, renames and locks files in a temporary directory."""
    root = settings.root.absolute()
    parent = _existing(root)
    if not parent.is_dir():
        yield Check("fail", "volume", f"{parent} is not a directory", "point TANDEM_ROOT at a directory")
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".tmp-doctor-", dir=parent) as scratch:
            seconds = _time_writing(Path(scratch))
            locks_work = _locks_work(Path(scratch) / "lock")
    except OSError as error:
        remedy = f"give uid {os.getuid()} write permission, free space, or mount it read-write"
        yield Check("fail", "volume", f"can't write to {parent}: {error.strerror}", remedy)
        return
    found = f"{root}: write, fsync ({seconds * 1000:.1f} ms) and rename work"
    if parent == root:
        yield Check("ok", "volume", found)
    else:
        yield Check("warn", "volume", f"{found}; it does not exist yet", "`tandem up` or the controller creates it")
    if locks_work:
        yield Check("ok", "volume: locks", "fcntl locks exclude other processes")
    else:
        remedy = "mount it with working locks (NFSv4, not 'nolock')"
        yield Check("fail", "volume: locks", "two processes get the same fcntl lock", remedy)


def disk_checks(settings: Settings) -> Iterator[Check]:
    """Free space on the volume."""
    free = shutil.disk_usage(_existing(settings.root.absolute())).free
    status: Status = "ok" if free >= _LOW_DISK_BYTES else "warn" if free >= _NO_DISK_BYTES else "fail"
    remedy = "" if status == "ok" else "free space: every step keeps its adapter and optimizer state"
    yield Check(status, "disk", f"{size(free)} free", remedy)


def spool_checks(settings: Settings) -> Iterator[Check]:
    """Creates the spool where there is none."""
    yield Check("ok", "spool", f"{Spool.create(settings.root).root} exists")


def _existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def _time_writing(scratch: Path) -> float:
    """Seconds that write, fsync and rename take."""
    start = time.perf_counter()
    (scratch / "staged").mkdir()
    write_atomic(scratch / "staged" / "file", bytes(4096))
    rename_dir(scratch / "staged", scratch / "renamed")
    return time.perf_counter() - start


def _locks_work(lock: Path) -> bool:
    """Whether another process can't take `lock` while this one holds it, and can afterwards."""
    command = [sys.executable, "-c", _TAKE_LOCK, str(lock)]
    with file_lock(lock):
        while_held = subprocess.run(command, check=False, capture_output=True, timeout=60)
    afterwards = subprocess.run(command, check=False, capture_output=True, timeout=60)
    return while_held.returncode != 0 and afterwards.returncode == 0
