"""What is read often and seldom changes: listings of directories, and what is computed from files."""

import os
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tandem.spool import fs


class Names(tuple[str, ...]):
    """Sorted names in a directory; `parsed` is what their reader made of them."""

    parsed: tuple[Any, ...] | None = None


class _Listing(NamedTuple):
    directory: tuple[int, int, int]  # device, inode, mtime (ns)
    since: float  # monotonic, when this mtime was first seen
    listed: float  # monotonic
    names: Names


_listings: dict[str, _Listing] = {}
_SETTLED_SECONDS = 2.5
"""A change this long after another one changes a directory's mtime, on every file system."""


def listing(directory: Path) -> Names:
    """The names in `directory`, without temporary and hidden ones; none if it does not exist. The very same object as
    long as the directory has not changed."""
    # Opening a directory makes an NFS client ask the server for its mtime.
    if (fd := fs.open_dir(directory)) is None:
        _listings.pop(str(directory), None)
        return Names()
    try:
        status, now = os.fstat(fd), time.monotonic()
        identity = status.st_dev, status.st_ino, status.st_mtime_ns
        known = _listings.get(str(directory)) or _Listing(identity, now, now, Names())
        if known.directory == identity and known.listed - known.since > _SETTLED_SECONDS:
            return known.names
        names = Names(sorted(name for name in os.listdir(fd) if not name.startswith(".")))  # noqa: PTH208
    finally:
        os.close(fd)
    if known.names == names:
        names = known.names
    for gone in set(known.names).difference(names):
        _listings.pop(f"{directory}/{gone}", None)
    since = known.since if known.directory == identity else now
    _listings[str(directory)] = _Listing(identity, since, now, names)
    return names


def remembered[T](compute: Callable[[Path], T]) -> Callable[[Path], T | None]:
    """`compute(path)`, computed again only after the path's inode or mtime has changed; None where there is no path."""

    @lru_cache(maxsize=2**14)
    def known(path: Path, _inode: int, _mtime: int) -> T:
        return compute(path)

    def of(path: Path) -> T | None:
        try:
            status = path.stat()
        except OSError:
            return None
        return known(path, status.st_ino, status.st_mtime_ns)

    return of
