"""Runs: `runs/<run>/`, made whole by one rename."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.errors import Conflict, NotFound
from tandem.spool import fs
from tandem.spool.checkpoints import write_manifest
from tandem.spool.locks import file_lock
from tandem.spool.paths import is_run_name, step_name
from tandem.spool.schema import Manifest, RunSpec

if TYPE_CHECKING:
    from tandem.spool import Spool


class Runs:
    def __init__(self, spool: Spool) -> None:
        self._paths = spool.paths

    def directory(self, name: str) -> Path:
        """The run's directory; NotFound (field `run`) if there is none."""
        path = self._paths.run_dir(name)
        if not path.is_dir() and not fs.exists(path):
            known = ", ".join(fs.names(path.parent)[:20]) or "none yet"
            raise NotFound(f"there is no run {name!r}; runs are: {known}", field="run")
        return path

    def create(self, spec: RunSpec, write_adapter: Callable[[Path], None]) -> RunSpec:
        """Makes a run with its checkpoint of step 0, whose adapter files `write_adapter(directory)` writes.

        Conflict (field `name`) if the run exists. Nothing of the run exists unless all of it does.
        """

        def fill(checkpoint: Path) -> None:
            write_adapter(checkpoint)
            write_manifest(checkpoint, Manifest(run=spec.name, step=0, job=None, created=spec.created, files={}))

        return self.make(spec, fill)

    def make(self, spec: RunSpec, fill_checkpoint: Callable[[Path], None]) -> RunSpec:
        """As `create`; `fill_checkpoint(directory)` writes all files of step 0, the manifest included."""
        target = self._paths.run_dir(spec.name)
        taken = Conflict(f"a run {spec.name!r} exists already; choose another name", field="name")
        if fs.exists(target):
            raise taken
        with fs.volume_errors(target), fs.staging(target.parent) as staged:
            fs.write_json_atomic(staged / "run.json", spec)
            (staged / "lock").touch()
            (staged / "discarded").mkdir()
            checkpoint = staged / "checkpoints" / step_name(0)
            checkpoint.mkdir(parents=True)
            fill_checkpoint(checkpoint)
            fs.fsync_tree(staged)
            try:
                fs.rename_dir(staged, target)
            except FileExistsError as error:
                raise taken from error
        return spec

    def get(self, name: str) -> RunSpec:
        """The run's specification; NotFound (field `run`) if there is none."""
        path = self.directory(name) / "run.json"
        if (spec := fs.read_record(path, RunSpec)) is None:
            raise NotFound(f"{path} is missing: the run {name!r} is damaged; restore the file", field="run")
        return spec

    def names(self) -> list[str]:
        """The names of all runs, in order."""
        return [name for name in fs.names(self._paths.runs) if is_run_name(name)]

    def list(self) -> list[RunSpec]:
        """All runs, by name."""
        return [self.get(name) for name in self.names()]

    def lock(self, name: str) -> AbstractContextManager[int]:
        """Serialises changes of the run's chain: submit, rollback, fork."""
        return file_lock(self.directory(name) / "lock")
