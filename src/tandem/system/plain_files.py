"""Opens files that other programs wrote, but only regular files without links in their paths. Every
program that can write to the volume could put a link, a FIFO or a device in the place of a file.
Python's `open` would follow a link to this process's own files, or wait for ever at a FIFO.
"""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Literal

Links = Literal["none", "above", "any"]
"""The links that a path may contain. `above`: links in place of directories, in places where no
other user can write. `any`: also a link in place of the file itself, as in the hub's cache of
models."""

_DIRECTORY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO does not wait for a writer
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
# The errors of `open` for an existing path that is a directory, link, socket or device.
NOT_PLAIN = (errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV)


class NotPlainError(OSError):
    """The path is a link, a directory, a FIFO or a device, or its file is too large. `errno` is
    ELOOP."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(errno.ELOOP, problem, str(path))


def open_plain(path: Path, *, most: int | None = None, links: Links = "none") -> BufferedReader:
    """Opens a regular file for reading. Raises NotPlainError if the path is not a regular file, if
    the file is too large, or if the path has a link that is not allowed.

    Args:
        path: the path. With links="none", it must be absolute.
        most: the maximum size in bytes; None: any size.
        links: the links that the path may contain.
    """
    fd = descriptor(path, os.O_RDONLY, links=links)
    try:
        size = os.fstat(fd).st_size
        if most is not None and size > most:
            raise NotPlainError(path, f"it has {size} bytes, more than {most}")
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_plain(path: Path, *, most: int, links: Links = "none") -> bytes:
    """The content of a regular file.

    Args:
        path, links: as in `open_plain`.
        most: the maximum size in bytes.
    """
    with open_plain(path, most=most, links=links) as file:
        return file.read(most)


def descriptor(path: Path, flags: int, *, links: Links = "none") -> int:
    """Opens a regular file with `os.open` and the checks of `open_plain`; returns the descriptor.
    Raises NotPlainError if the path is not a regular file.

    Args:
        path: the path. With links="none", it must be absolute.
        flags: the flags of `os.open`. A file that O_CREAT makes has the mode 0o666 without the
            umask's bits.
        links: the links that the path may contain.
    """
    assert links != "none" or path.is_absolute(), path
    # O_CREAT and O_TRUNC make or empty a file while it is opened, so a check for links after
    # opening would be too late.
    changes = flags & (os.O_CREAT | os.O_TRUNC)
    if links == "none" and changes:
        fd = _through_no_link(path, flags)
    else:
        try:
            follow = os.O_NOFOLLOW if links == "any" else 0
            fd = os.open(path, (flags | _FLAGS) & ~follow, 0o666)
        except OSError as error:
            if error.errno in NOT_PLAIN:
                raise NotPlainError(path, "it is a link, a directory or a device") from error
            raise
    try:
        if links == "none" and not changes and not _is_at(fd, path):
            again = _through_no_link(path, flags)
            os.close(fd)
            fd = again
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NotPlainError(path, "it is not a regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def copy_plain(source: Path, target: Path, *, most: int | None = None) -> None:
    """Copies a regular file's content. Raises NotPlainError as `open_plain` does. Raises
    FileExistsError if `target` exists.

    Args:
        source: the file's absolute path, without links.
        target: the new file.
        most: the maximum size of `source` in bytes; None: any size.
    """
    with open_plain(source, most=most) as file, target.open("xb") as out:
        left = os.fstat(file.fileno()).st_size
        while left and (data := file.read(min(left, 2**24))):
            out.write(data)
            left -= len(data)


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file `fd` is at `path`. The file is elsewhere if a directory of the path is
    a link, or if the file was renamed."""
    try:
        return Path(f"/proc/self/fd/{fd}").readlink() == path
    except OSError:  # not Linux, so there is no /proc
        return False


def _through_no_link(path: Path, flags: int) -> int:
    """Opens the path directory by directory, so that no part of it can be a link."""
    here = os.open("/", _DIRECTORY)
    try:
        for name in path.parent.parts[1:]:
            below = os.open(name, _DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
        return os.open(path.name, flags | _FLAGS, 0o666, dir_fd=here)
    except NotADirectoryError as error:
        raise NotPlainError(path, "a directory of its path is a link or a file") from error
    except OSError as error:
        if error.errno in NOT_PLAIN:
            raise NotPlainError(path, "a part of its path is a link") from error
        raise
    finally:
        os.close(here)
