"""A program's environment: its role, its directories, package versions, caches of compiled code,
and how OpenMP's threads wait."""

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Literal, get_args

from tandem.errors import SpoolUnusable

Role = Literal["all", "trainer", "inference"]
"""The set of programs that run under one supervisord: the programs of one container, or all
programs on one machine."""
ROLE_VARIABLE = "TANDEM_ROLE"
# An inference server's id, for example a pod's name, becomes a file name and a metric's label.
REPLICA_PATTERN = r"^[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?$"
INDUCTOR_VARIABLE, TRITON_VARIABLE = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
_VLLM_VARIABLE = "VLLM_CACHE_ROOT"
# The path of a Unix socket has at most 107 bytes. Up to 57 bytes of the path are the private
# directory's name, the socket's name and a pid. The program supervisord appends its pid to the
# socket's name until it listens on the socket.
_LONGEST_PARENT = 50


def current_role() -> Role:
    """The value of TANDEM_ROLE; "all" if the variable is unset. `tandem up` sets TANDEM_ROLE for
    its programs, and the images set TANDEM_ROLE for all processes of their containers."""
    role = os.environ.get(ROLE_VARIABLE)
    return next((known for known in get_args(Role) if known == role), "all")


def runtime_dir(root: Path, role: Role) -> Path:
    """This user's directory for sockets, locks and configuration, with mode 0700. Each combination
    of a `role` and a spool `root` has its own directory. The directory is on this machine's disk,
    because a socket can't be on a network volume. Raises SpoolUnusable if another user owns the
    directory.
    """
    key = hashlib.sha256(f"{root.absolute()} {role}".encode()).hexdigest()[:12]
    return _own_directory(key, os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir())


def leaving_file(root: Path) -> Path:
    """The file that takes an inference server of this machine out of service before the server is
    stopped. The file contains the time (Unix seconds) until which the file is valid."""
    return runtime_dir(root, current_role()) / "leaving"


def scratch_directory(name: str) -> Path:
    """An empty directory under TMPDIR for the temporary files of processes that may be killed.
    `name`: a name that no other caller uses at the same time, because this function removes the
    directory's content."""
    directory = _own_directory(name, tempfile.gettempdir())
    empty_directory(directory)
    return directory


def _own_directory(name: str, *parents: str | None) -> Path:
    """This user's directory in one of `parents`: in the first that exists and whose path is short
    enough for sockets. If no parent fits, the directory is in /tmp."""
    short = (Path(parent) for parent in parents if parent and len(parent) <= _LONGEST_PARENT)
    return private_directory(
        next(filter(Path.is_dir, short), Path("/tmp")) / f"tandem-{os.getuid()}-{name}"
    )


def empty_directory(directory: Path) -> None:
    """Removes the content of `directory`, as far as possible."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def private_directory(directory: Path) -> Path:
    """Creates a directory for this user alone, if it does not exist. Raises SpoolUnusable if
    another user owns the directory or can read it."""
    return _of_this_user(directory, 0o077)


def trusted_directory(directory: Path) -> Path:
    """Like `private_directory`, but for a directory from which code is loaded. Other users may read
    the directory, but can't write to it."""
    return _of_this_user(directory, 0o022)


def _of_this_user(directory: Path, forbidden: int) -> Path:
    with suppress(FileExistsError):  # `directory` is a broken link, which the check below reports
        directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.getuid()
        or status.st_mode & forbidden
    ):
        raise SpoolUnusable(f"{directory} is not a directory of this user alone; remove it")
    return directory


def compiler_caches(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables for the directories in which torch and Triton keep compiled code.
    The compilers load compiled code, and unpickle some of it, without checking who wrote the code.
    Each directory therefore belongs to this user alone. Each directory is below the directory that
    `environ` names, or below TMPDIR. Raises SpoolUnusable if another user owns the directory."""
    own = f"tandem-{os.getuid()}-compiled"
    inductor = Path(environ.get(INDUCTOR_VARIABLE) or tempfile.gettempdir()) / own
    triton = Path(environ[TRITON_VARIABLE]) / own if environ.get(TRITON_VARIABLE) else None
    for directory in filter(None, (inductor, triton)):
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            private_directory(directory)
        except PermissionError as error:
            raise SpoolUnusable(
                f"{directory} for compiled code cannot be made: {directory.parent} belongs to "
                f"another user; remove it, or set {INDUCTOR_VARIABLE} and {TRITON_VARIABLE}"
            ) from error
    return {
        INDUCTOR_VARIABLE: str(inductor),
        TRITON_VARIABLE: str(triton or private_directory(inductor / "triton")),
    }


def vllm_caches(environ: Mapping[str, str]) -> dict[str, str]:
    """Like `compiler_caches`, but for vLLM, which also unpickles compiled code. The directory
    belongs to this user alone. The directory is below the directory that `environ` names, by
    default `vllm` in the user's cache. The keys in vLLM's cache contain the versions of vLLM, torch
    and Triton."""
    default = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm"
    own = Path(environ.get(_VLLM_VARIABLE) or default) / f"tandem-{os.getuid()}-compiled"
    own.parent.mkdir(parents=True, exist_ok=True)
    private_directory(own)
    return {_VLLM_VARIABLE: str(own)} | compiler_caches({INDUCTOR_VARIABLE: str(own)} | {**environ})


def installed_version(package: str) -> str:
    """The version of an installed package; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def omp_waiting(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variable that makes a waiting OpenMP thread spin briefly and then sleep. The
    result is empty if `environ` already sets such a variable. In torch and vLLM, OpenMP is libgomp.
    By default, its threads spin 300,000 times before they sleep. With 300,000 spins, the threads
    were 40 times slower while another process used one of two cores."""
    return (
        {} if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys() else {"GOMP_SPINCOUNT": "1000"}
    )
