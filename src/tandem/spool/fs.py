"""Files on the volume: durable writes that are committed by rename. Each error message tells the
user what to do.

A write first creates a temporary file in the directory of its target. Listings leave out the names
of temporary files (`.tmp-…`). The temporary file is then fsynced and renamed, and the directory is
fsynced. A file that exists under its final name is therefore complete. A failed write removes its
temporary file.
"""

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ValidationError

from tandem.errors import SpoolUnusable, VolumeFull
from tandem.system.plain_files import NOT_PLAIN, NotPlainError, open_plain, read_plain

TEMPORARY = ".tmp-"
RECORD_BYTES = 2**24
"""The maximum size in bytes of a file with one record. Tandem's own records are far smaller."""
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

_DENIED = ("permission denied", f"give uid {os.getuid()} read and write permission on the volume")
# errno -> (what is wrong, what to do)
_REMEDIES = {
    errno.ENOSPC: ("the volume is full", "free space on it or enlarge it, then try again"),
    errno.EDQUOT: (
        "the quota of the volume is used up",
        "free space on it or raise the quota, then try again",
    ),
    errno.EROFS: ("the volume is mounted read-only", "mount it read-write in this container"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), _DENIED),
    **dict.fromkeys(
        NOT_PLAIN,
        ("it is not a regular file, or a link leads there", "remove it, or restore it from a copy"),
    ),
    errno.ENOTDIR: (
        "a part of the path is a file, not a directory",
        "point TANDEM_ROOT at a directory",
    ),
    errno.ENOLCK: (
        "the volume has no file locks",
        "mount it with working locks (NFSv4, not 'nolock')",
    ),
    errno.EIO: (
        "the volume reports an input/output error",
        "check the disk or the network file system",
    ),
    errno.EMFILE: (
        "this process has too many files open",
        "try again later, or raise its limit (ulimit -n)",
    ),
    errno.ENFILE: (
        "this machine has too many files open",
        "try again later, or raise its limit (fs.file-max)",
    ),
    errno.ESTALE: ("the network file system's handle is stale", "mount the volume again"),
}


def new_ulid(at: float | None = None) -> str:
    """A ULID: 48 bits of milliseconds and 80 random bits, as 26 characters of Crockford base32.
    `at`: the time in Unix seconds, by default now."""
    value = (int((time.time() if at is None else at) * 1000) << 80) | int.from_bytes(os.urandom(10))
    return "".join(_CROCKFORD[(value >> shift) & 31] for shift in range(125, -5, -5))


def temporary_beside(path: Path) -> Path:
    """A temporary name in the directory of `path`."""
    return path.with_name(f"{TEMPORARY}{path.name}.{new_ulid()}")


@contextmanager
def volume_errors(path: Path) -> Iterator[None]:
    """Converts an OSError about the state of the volume into a SpoolUnusable that names `path`.
    Other errors pass unchanged."""
    try:
        yield
    except OSError as error:
        if (unusable := volume_error(error, path)) is None:
            raise
        raise unusable from error


def volume_error(error: OSError, path: object) -> SpoolUnusable | None:
    """The SpoolUnusable for an OSError about the state of the volume; None for another OSError."""
    if error.errno not in _REMEDIES:
        return None
    problem, remedy = _REMEDIES[error.errno]
    kind = VolumeFull if error.errno in VolumeFull.ERRNOS else SpoolUnusable
    return kind(f"can't use {path}: {problem} ({errno.errorcode[error.errno]}); {remedy}")


def fsync_dir(directory: Path) -> None:
    """Makes the names in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems can't fsync a directory, but make the names durable without
        # fsync.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)


def fsync_tree(directory: Path) -> None:
    """Makes `directory` and everything below it durable. Makes each file readable for every user
    who can read the file's directory. The library safetensors writes files that only their owner
    can read, but the users of a group share the volume.
    """
    with volume_errors(directory):
        for here, _, files in os.walk(directory, topdown=False):
            shared = Path(here).stat().st_mode & 0o666
            for name in files:
                with open_plain(Path(here, name)) as file:
                    mode = os.fstat(file.fileno()).st_mode
                    if shared & ~mode:
                        os.fchmod(file.fileno(), mode | shared)
                    os.fsync(file.fileno())
            fsync_dir(Path(here))


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Repeats `os.write` until all of `data` is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Writes or replaces `path`. Readers see either the old or the new content, even after a crash.
    Raises SpoolUnusable if the volume refuses the write; no temporary file stays.

    Args:
        durable: whether fsync is called on the file and its directory. Without fsync, the file may
            have old content, be empty, or be missing after a power loss.
    """
    with replacing(path, data, durable=durable):
        pass


@contextmanager
def replacing(path: Path, data: bytes, *, durable: bool = True) -> Iterator[None]:
    """Like `write_atomic`, but as a context manager. The data is written before the `with` block,
    and the rename happens at the end of the block. If the block raises an error, the file `path`
    stays as it was.

    Args:
        durable: as in `write_atomic`.
    """
    temporary = temporary_beside(path)
    with volume_errors(path):
        try:
            with temporary.open("xb") as file:
                write_all(file.fileno(), data)
                if durable:
                    os.fsync(file.fileno())
            yield
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        if durable:
            fsync_dir(path.parent)


def write_json_atomic(path: Path, model: BaseModel, *, durable: bool = True) -> None:
    """Writes a record as indented JSON with `write_atomic`.

    Args:
        model: the record.
        durable: as in `write_atomic`.
    """
    write_atomic(path, record_bytes(model), durable=durable)


def record_bytes(model: BaseModel) -> bytes:
    return (model.model_dump_json(indent=1) + "\n").encode()


@contextmanager
def staging(parent: Path) -> Iterator[Path]:
    """A new directory under `parent` with a temporary name. The directory is removed at the end of
    the `with` block unless it was renamed."""
    directory = parent / f"{TEMPORARY}{new_ulid()}"
    with volume_errors(parent):
        directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def in_made_dir[T](directory: Path, action: Callable[[], T]) -> T:
    """Calls `action`, which puts a file into `directory`, and returns the result. Creates
    `directory` before it calls `action`. If another process removes the empty directory at the same
    moment, creates the directory and calls `action` again."""
    with volume_errors(directory):
        for _ in range(20):
            with suppress(FileNotFoundError):
                make_dir(directory)
                return action()
        return action()


def make_dir(directory: Path) -> None:
    """Makes a directory and its missing parents, durably."""
    if not directory.is_dir():
        make_dir(directory.parent)
        with suppress(FileExistsError):
            directory.mkdir()
        fsync_dir(directory.parent)


def remove_empty(*directories: Path) -> None:
    """Removes the directories in order. Stops at the first directory that can't be removed, for
    example because it is not empty."""
    with suppress(OSError):
        for directory in directories:
            directory.rmdir()


def move_file(source: Path, target: Path) -> None:
    """Moves a file within the volume, replacing `target`. Creates the target's directory. The file
    is durable at `target`; after a power loss it may also exist at `source` again."""
    with volume_errors(target):
        in_made_dir(target.parent, lambda: source.replace(target))
        fsync_dir(target.parent)


def rename_dir(source: Path, target: Path) -> None:
    """Moves a directory within the volume, durably. Raises FileExistsError if `target` exists. The
    directory's content must already be durable (`fsync_tree`)."""
    taken = FileExistsError(errno.EEXIST, "exists already", str(target))
    if exists(target):
        raise taken
    with volume_errors(target):
        try:
            source.rename(target)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:  # another process has created the target meanwhile
                raise taken from error
            raise
        fsync_dir(target.parent)
        if source.parent != target.parent:
            # the source was removed meanwhile, because its attempt was ended
            with suppress(FileNotFoundError):
                fsync_dir(source.parent)


def remove_file(path: Path, *, durable: bool = True) -> None:
    """Removes the file `path` if it exists. If `path` is a directory, removes the directory.
    Without `durable`, the file may exist again after a power loss."""
    with volume_errors(path):
        try:
            path.unlink()
        except FileNotFoundError:
            return
        except IsADirectoryError:
            remove_tree(path)
        if durable:
            fsync_dir(path.parent)


def remove_tree(directory: Path) -> None:
    """Removes a directory if it exists. No error is raised if the directory can't be removed, for
    example because NFS keeps files that are still mapped. The directory is first renamed to a
    temporary name, so that no reader finds an incomplete directory."""
    with suppress(OSError):
        if not directory.name.startswith(TEMPORARY):
            directory = directory.rename(temporary_beside(directory))
        shutil.rmtree(directory, ignore_errors=True)


def exists(path: Path) -> bool:
    """Whether `path` exists. An NFS client caches the absence of a name. The function therefore
    opens the parent directory first, which makes the NFS client ask the server whether the
    directory has changed."""
    fd = open_dir(path.parent)
    if fd is None and path.parent != path and exists(path.parent):
        fd = open_dir(path.parent)
    if fd is None:
        return False
    try:
        os.stat(path.name, dir_fd=fd, follow_symlinks=False)
        return True
    except FileNotFoundError:
        return False
    finally:
        os.close(fd)


def open_dir(directory: Path) -> int | None:
    """A descriptor of the directory, or None if it does not exist."""
    try:
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_bytes(path: Path, *, sure: bool = True, most: int = RECORD_BYTES) -> bytes | None:
    """The content of a file that other processes replace by rename; None if it does not exist.
    Returns b"" if the path is not a regular file or has more than `most` bytes. Every reader treats
    b"" as a damaged file.

    Args:
        sure: if true, the function opens the directory and looks a second time for a missing file,
            because an NFS client that has not opened the directory may not see a new file yet.
        most: the maximum size in bytes.
    """
    for more in (4, 3, 2, 1, 0):
        try:
            return read_plain(path.absolute(), most=most)
        except NotPlainError:
            return b""
        except (FileNotFoundError, NotADirectoryError):
            if not sure or not exists(path):
                return None
        except OSError as error:
            # NFS: the file was replaced between open and read
            if error.errno != errno.ESTALE or not more:
                raise
        time.sleep(0.01)
    return None


def read_record[R: BaseModel](path: Path, model: type[R], *, sure: bool = True) -> R | None:
    """The record in a file; None if the file does not exist. Raises pydantic's ValidationError if
    the file is damaged.

    Args:
        model: the record's class.
        sure: as in `read_bytes`.
    """
    content = read_bytes(path, sure=sure)
    return None if content is None else model.model_validate_json(content)


def read_undamaged[R: BaseModel](path: Path, model: type[R], *, sure: bool = True) -> R | None:
    """The record in a file; None if the file does not exist or is damaged.

    Args:
        model: the record's class.
        sure: as in `read_bytes`.
    """
    with suppress(ValidationError):
        return read_record(path, model, sure=sure)
    return None


def sha256_file(path: Path) -> str:
    """SHA-256 of a regular file's content, lower-case hex."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
