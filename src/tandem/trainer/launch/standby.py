"""Launching through processes that stay between jobs (the fork server, resident ranks)."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import tandem
from tandem.system.logs import Log
from tandem.trainer.launch import Handle, Launch
from tandem.trainer.launch.fork import ForkServer
from tandem.trainer.launch.resident import ResidentRanks

log = Log("runner")


Standby = ForkServer | ResidentRanks


class StandbyLauncher:
    """Starts processes ahead of the first job and replaces them when they ended or their code changed.

    `start`: starts them for an entry module and an environment.
    """

    def __init__(
        self, start: Callable[[str, dict[str, str]], Standby], entry: str, environment: dict[str, str]
    ) -> None:
        self._start, self._entry, self._environment = start, entry, environment
        self._standby: Standby | None = None
        self._code_version: set[tuple[Path, int, int]] = set()

    def prepare(self) -> None:
        current = code_version(self._entry)
        if self._standby is not None:
            if self._standby.alive and self._code_version == current:
                return
            reason = "the code changed" if self._standby.alive else "it ended"
            log.info(f"replacing the {self._standby.name}", reason=reason)
            self._standby.close()
        self._standby = self._start(self._entry, self._environment)
        self._code_version = current

    def launch(self, launch: Launch) -> Handle:
        self.prepare()
        assert self._standby is not None
        return self._standby.launch(launch)

    @property
    def holds_devices(self) -> bool:
        return self._standby is not None and self._standby.alive and self._standby.holds_devices

    def close(self) -> None:
        if self._standby is not None:
            self._standby.close()
            self._standby = None


def code_version(entry: str) -> set[tuple[Path, int, int]]:
    """(path, modification time, size) of the files that a process has in memory: Tandem's and the entry module's."""
    files = [*Path(tandem.__file__).parent.rglob("*.py")]
    spec = find_spec(entry)
    if spec is not None and spec.origin is not None:
        files.append(Path(spec.origin))
    return {(file, status.st_mtime_ns, status.st_size) for file in files if (status := file.stat())}
