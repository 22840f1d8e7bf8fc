"""Listings of directories that are read often and seldom change."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from tandem.spool import fs


@dataclass(frozen=True)
class _Listing:
    directory: tuple[int, int, int]  # device, inode, mtime (ns)
    since: float  # monotonic, when this mtime was first seen
    listed: float  # monotonic
    names: tuple[str, ...]


_listings: dict[str, _Listing] = {}
_MOST_LISTINGS = 4096
_SETTLED_SECONDS = 2.5
"""A change this long after another one changes a directory's mtime, on every file system."""


def listing(directory: Path) -> tuple[str, ...]:
    """As `names`, but the very same tuple as long as the directory has not changed."""
    # Opening a directory makes an NFS client ask the server for its mtime.
    if (fd := fs.open_dir(directory)) is None:
        _listings.pop(str(directory), None)
        return ()
    try:
        status, now, known = os.fstat(fd), time.monotonic(), _listings.get(str(directory))
        identity = status.st_dev, status.st_ino, status.st_mtime_ns
        since = now
        if known is not None and known.directory == identity:
            if known.listed - known.since > _SETTLED_SECONDS:
                return known.names
            since = known.since
        names = tuple(sorted(name for name in os.listdir(fd) if not name.startswith(".")))  # noqa: PTH208
    finally:
        os.close(fd)
    if known is not None and known.names == names:
        names = known.names
    while len(_listings) >= _MOST_LISTINGS:
        _listings.pop(next(iter(_listings)), None)
    _listings[str(directory)] = _Listing(identity, since, now, names)
    return names
