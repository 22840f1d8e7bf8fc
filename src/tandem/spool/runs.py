"""Runs: `runs/<run>/`, made whole by one rename, and what vLLM serves of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tandem.errors import Conflict, NotFound
from tandem.spool import fs
from tandem.spool.checkpoint_files import write_manifest
from tandem.spool.locks import file_lock
from tandem.spool.paths import Paths, is_run_name, step_name
from tandem.spool.schema import Manifest, RunSpec, Served


class Runs:
    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def directory(self, name: str) -> Path:
        """The run's directory; NotFound (field `run`) if there is none."""
        path = self._paths.run_dir(name)
        if not path.is_dir() and not fs.exists(path):
            known = ", ".join(fs.names(path.parent)[:20]) or "none yet"
            raise NotFound(f"there is no run {name!r}; runs are: {known}", field="run")
        return path

    def create(self, spec: RunSpec, write_files: Callable[[Path], None], **details: Any) -> RunSpec:
        """Makes a run with its checkpoint of step 0, whose files `write_files(directory)` writes. `details`: more
        fields of its manifest.

        Conflict (field `name`) if the run exists. Nothing of the run exists unless all of it does.
        """
        manifest = Manifest(run=spec.name, step=0, job=None, created=spec.created, files={}, **details)
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
            write_files(checkpoint)
            write_manifest(checkpoint, manifest)
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


class ServedRecords:
    """`runs/<run>/served.json`: what vLLM serves of a run. All methods raise NotFound (field `run`) without the run."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def _path(self, run: str) -> Path:
        return self._runs.directory(run) / "served.json"

    def get(self, run: str) -> Served | None:
        """The run's record; None before the first publication, and after a start of vLLM until the next one."""
        return fs.read_record(self._path(run), Served)

    def put(self, run: str, served: Served) -> None:
        """Replaces the record, durably."""
        fs.write_json_atomic(self._path(run), served)

    def withdraw(self, run: str) -> None:
        """Remove the record, durably: vLLM has none of the run's steps now."""
        fs.remove_file(self._path(run))

    def changed(self, run: str) -> float | None:
        """When the record was last written, Unix seconds by the volume's clock; None without one."""
        path = self._path(run)
        return path.stat().st_mtime if path.exists() else None
