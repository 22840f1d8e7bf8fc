"""Hooks of Schemathesis for `fuzz.api`: names that exist, and the check that a refusal leaves
no trace."""

import os
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any

import schemathesis

ROOT = Path(os.environ["FUZZ_ROOT"])
_before: set[str] = set()


def names() -> Iterator[str]:
    """The path and the size of every file of the spool. Locks are left out, because the controller
    writes locks by itself."""
    for path in ROOT.rglob("*"):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("jobs/locks") or name.endswith("/lock"):
            continue
        with suppress(FileNotFoundError):  # a directory that was set aside is being removed
            status = path.stat()
            yield f"{name} {status.st_size if S_ISREG(status.st_mode) else ''}"


@schemathesis.hook
def map_path_parameters(_: Any, path_parameters: dict[str, Any]) -> dict[str, Any]:
    """Half of the path parameters name a run, job or step that exists."""
    known = {
        "run": [path.name for path in ROOT.glob("runs/[!.]*")],
        "job": [path.name.split(",")[3] for path in ROOT.rglob("jobs/*/*/*,*,*,*")],
        "step": [0, 1, 2],
    }
    chosen = random.Random(repr(path_parameters))
    for name in path_parameters or {}:
        if known.get(name) and chosen.random() < 0.5:
            path_parameters[name] = chosen.choice(known[name])
    return path_parameters


@schemathesis.check
def refusal_leaves_no_trace(_: Any, response: Any, case: Any) -> None:
    """After an answer of 4xx or 5xx the spool has the same files with the same sizes as before the
    request."""
    global _before
    now = set(names())
    # A directory that an earlier request set aside may be removed now.
    changed = (now - _before) | {name for name in _before - now if "/.tmp-" not in f"/{name}"}
    if response.status_code >= 400 and case.method not in ("GET", "HEAD"):
        assert not changed, f"{response.status_code}, but the spool changed: {sorted(changed)[:10]}"
    _before = now
