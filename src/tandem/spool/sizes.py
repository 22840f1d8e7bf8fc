"""How many bytes directories of immutable checkpoints have, without reading the same one twice."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from tandem.spool import fs

_Identity = tuple[int, int]  # inode, mtime (ns)


@dataclass
class _Known:
    identity: _Identity
    sizes: dict[str, tuple[_Identity, int]] = field(default_factory=dict)  # of each subdirectory; bytes


class Sizes:
    def __init__(self) -> None:
        self._known: dict[Path, _Known] = {}

    def of(self, directory: Path) -> int:
        """Bytes of all files in the subdirectories of `directory`, which never change while they have their names.

        Lists a directory only if it has changed since. 0 if it does not exist.
        """
        if (identity := _identity(directory)) is None:
            self._known.pop(directory, None)
            return 0
        known = self._known.get(directory, _Known((0, 0)))
        if known.identity != identity:
            sizes = {}
            for name in fs.names(directory):
                if (of_name := _identity(directory / name)) is not None:
                    before = known.sizes.get(name)
                    sizes[name] = before if before and before[0] == of_name else (of_name, _size(directory / name))
            known = self._known[directory] = _Known(identity, sizes)
        return sum(size for _, size in known.sizes.values())


def _identity(path: Path) -> _Identity | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _size(directory: Path) -> int:
    """Bytes of all files below; those that vanish meanwhile, or are links to nowhere, don't count."""
    total = 0
    for here, _, files in os.walk(directory):
        for name in files:
            try:
                total += Path(here, name).stat().st_size
            except OSError:
                continue
    return total
