"""Files that one tracker appends to, and JSON lines."""

import fcntl
import json
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from tandem.client import RunSpec
from tandem.errors import Conflict, InvalidInput
from tandem.track.rows import Position, Row


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


class Jsonl:
    """A row is a line. A line whose `optimizer_step` is not above the one before takes the place of all from there."""

    replaces = True

    def __init__(self, run: RunSpec, where: str) -> None:
        self._run, self._file, self.position = run.name, open_alone(Path(where)), None
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._file.truncate(len(whole))  # without a line that was being written at the end
        last = json.loads(whole.splitlines()[-1]) if whole else {}
        if last.get("run", run.name) != run.name:
            raise Conflict(f"{where} has rows of the run {last['run']}", field="--to")
        self.position = Position.parse(last["position"]) if last else None

    def write(self, row: Row) -> None:
        names = {"run": self._run, "optimizer_step": row.position.step, "kind": row.kind, "time": row.time}
        names |= {} if self.position else {"parameters": row.parameters}
        self._file.write(json.dumps(names | row.values | {"position": str(row.position)}).encode() + b"\n")

    def rewind(self, step: int) -> None:
        """The next line says it."""

    def close(self) -> None:
        self._file.close()
