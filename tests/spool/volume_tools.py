"""Tools for volumes: their content, full and read-only volumes, and processes that die while they
write."""

import errno
import io
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest

from tandem.errors import TandemError


def tree(root: Path) -> dict[str, bytes | None]:
    """Every path under root with its content; directories map to None. The result excludes files
    that are removed during the listing."""
    found: dict[Path, bytes | None] = {}
    for here, directories, files in root.walk():
        found |= dict.fromkeys(here / name for name in directories)
        for path in (here / name for name in files):
            with suppress(FileNotFoundError):
                found[path] = path.read_bytes() if stat.S_ISREG(path.stat().st_mode) else None
    return {path.relative_to(root).as_posix(): found[path] for path in sorted(found)}


def temporary_names(root: Path) -> list[str]:
    return [name for name in tree(root) if "/." in "/" + name]


_CHANGES = ("write", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir", "ftruncate", "open")


class DiedError(BaseException):
    """Raised by `dying_at` in place of the end of a process."""


@contextmanager
def dying_at(count: int) -> Iterator[None]:
    """Counts the calls that change the file system in the `with` block. Raises DiedError in place
    of the `count`-th call. All later calls that change the file system raise DiedError too, because
    a dead process can't clean up. A dying write writes half of its bytes first. A dying open
    empties its file."""
    calls = 0

    def mortal(real: Callable) -> Callable:
        def call(*args, **kwargs):
            nonlocal calls
            if real is io_open and not set(str(args[1:2])) & set("wax+"):  # reading
                return real(*args, **kwargs)
            calls += 1
            if calls == count and real is os_write:
                real(args[0], bytes(args[1])[: len(args[1]) // 2])
            if calls == count and real is io_open:
                real(*args, **kwargs).close()
            if calls >= count:
                raise DiedError
            return real(*args, **kwargs)

        return call

    io_open, os_write = io.open, os.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", mortal(io.open))
        for name in _CHANGES:
            patch.setattr(os, name, mortal(getattr(os, name)))
        yield


def full_disk(*args: object) -> NoReturn:
    """Takes the place of `os.write` and similar functions."""
    raise OSError(errno.ENOSPC, "No space left on device")


def in_child(work: Callable[[], object]) -> int:
    """Runs `work` in a forked child. Returns the child's exit status: 0 if it ended well, -9 if it
    killed itself."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            os.write(2, f"child: {error!r}\n".encode())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def mounted(directory: Path, *options: str) -> Iterator[None]:
    directory.mkdir(exist_ok=True)
    if subprocess.run(["mount", *options, directory], capture_output=True, check=False).returncode:
        pytest.skip("this test needs the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", directory], check=False)


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Bind-mounts the directory onto itself, read-only, while the context lasts."""
    with mounted(directory, "--bind", str(directory)), mounted(directory, "-o", "remount,bind,ro"):
        yield


@contextmanager
def refused(kind: type[TandemError], field: str, match: str | None = None) -> Iterator[None]:
    with pytest.raises(kind, match=match) as caught:
        yield
    assert caught.value.field == field
