"""Files that belong to one `tandem track`, and packages that may be missing."""

import fcntl
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from tandem.errors import Conflict, InvalidInput


def open_alone(path: Path) -> BinaryIO:
    """The file, made if missing, to read it and to append to it, locked until it is closed. Raises Conflict."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+b", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Conflict(f"another `tandem track` holds {path}; stop it first", field="--to") from error
    return file


def optional(module: str) -> Any:
    """A module of a package that Tandem does not need otherwise."""
    try:
        return import_module(module)
    except ImportError as error:
        extra = module.split(".")[0]
        raise InvalidInput(f"it needs a package: pip install 'tandem-rl[{extra}]' ({error})", field="--to") from error
