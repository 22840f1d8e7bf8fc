"""Runs: `runs/<run>/`, made whole by one rename, and what vLLM serves of them."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tandem.errors import Conflict, NotFound, RunDamaged
from tandem.spool import fs
from tandem.spool.checkpoint_files import write_manifest
from tandem.spool.listing import listing, remembered
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
            known = ", ".join(listing(path.parent)[:20]) or "none yet"
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
        """The run's specification; NotFound (field `run`) if there is none; RunDamaged if it can't be read."""
        path = self.directory(name) / "run.json"
        try:
            spec = _read_spec(path) or fs.read_record(path, RunSpec)
        except ValidationError as error:
            raise RunDamaged(f"{path} is damaged; restore it from a copy: {error}", field="run") from error
        if spec is None or spec.name != name:
            problem = "is missing" if spec is None else f"is of another run, {spec.name!r}"
            raise RunDamaged(f"{path} {problem}; restore it, or remove {path.parent}", field="run")
        return spec

    def names(self) -> list[str]:
        """The names of all runs that can be read, in order."""
        return [spec.name for spec in self.list()]

    def list(self) -> list[RunSpec]:
        """All runs that can be read, by name."""
        return [spec for spec in (self._get(name) for name in listing(self._paths.runs)) if spec is not None]

    def _get(self, name: str) -> RunSpec | None:
        try:
            return self.get(name) if is_run_name(name) else None
        except (RunDamaged, NotFound):  # it is named by `damaged`; or it is gone since
            return None

    def damaged(self) -> dict[str, str]:
        """Names below `runs/` that are no whole run, and what is wrong with each."""
        found = {}
        for name in listing(self._paths.runs):
            try:
                if not is_run_name(name):
                    raise RunDamaged(f"{self._paths.runs / name} is no run; remove it")
                self.get(name)
                if not listing(self.directory(name) / "checkpoints"):
                    raise RunDamaged(f"run {name!r} has no checkpoint, not even step 0: restore its directory")
            except RunDamaged as error:
                found[name] = error.message
            except NotFound:
                pass
        return found

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Serialises changes of the run's chain: submit, rollback, fork, removal. NotFound (field `run`) if there is no
        run, also if it is deleted while this waits."""
        path = self.directory(name) / "lock"
        with ExitStack() as stack:
            try:
                held = os.fstat(stack.enter_context(file_lock(path)))
                same = os.path.samestat(held, path.stat())
            except FileNotFoundError:
                same = False
            if not same:  # the lock of a run that is gone, which keeps nobody from a new run of the same name
                raise NotFound(f"run {name!r} was deleted", field="run")
            yield


@remembered
def _read_spec(path: Path) -> RunSpec | None:
    return fs.read_record(path, RunSpec)


class ServedRecords:
    """`runs/<run>/served.json`: what vLLM serves of a run. All methods raise NotFound (field `run`) without the run."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def _path(self, run: str) -> Path:
        return self._runs.directory(run) / "served.json"

    def get(self, run: str) -> Served | None:
        """The run's record; None while vLLM serves no step of it, and if the file is damaged."""
        return fs.read_undamaged(self._path(run), Served)

    def put(self, run: str, served: Served) -> None:
        """Replaces the record, durably."""
        fs.write_json_atomic(self._path(run), served)

    def withdraw(self, run: str) -> None:
        """Remove the record, durably: vLLM has none of the run's steps now."""
        fs.remove_file(self._path(run))

    def changed(self, run: str) -> float | None:
        """When the record was last written, Unix seconds by the volume's clock; None without one."""
        with suppress(FileNotFoundError):
            return self._path(run).stat().st_mtime
        return None
