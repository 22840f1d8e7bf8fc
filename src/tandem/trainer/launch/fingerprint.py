"""Whether a process that has our code in memory is still what would be started now."""

from __future__ import annotations

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

import tandem


def fingerprint(entry: str, environment: dict[str, str]) -> str:
    """Of what a process that stays holds in memory and that may change under it: our own code and the environment."""
    digest = hashlib.sha256(json.dumps(sorted(environment.items())).encode())
    files = sorted(Path(tandem.__file__).parent.rglob("*.py"))
    spec = find_spec(entry)
    if spec is not None and spec.origin is not None:
        files.append(Path(spec.origin))
    for file in files:
        status = file.stat()
        digest.update(f"{file}:{status.st_mtime_ns}:{status.st_size}\n".encode())
    return digest.hexdigest()
