"""Runs (`runs/<run>/`), which are created by one rename; the manifests of their checkpoints; and
the records of the steps that vLLM serves."""

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tandem.errors import CheckpointDamaged, Conflict, InvalidInput, NotFound, RunDamaged
from tandem.spool import fs
from tandem.spool.locks import file_lock
from tandem.spool.paths import Paths, is_run_name, listing, remembered, step_name
from tandem.spool.schema import Manifest, Refused, RunSpec, Served
from tandem.spool.schema.runs import FileEntry
from tandem.system.plain_files import NotPlainError, open_plain

MANIFEST = "manifest.json"


def write_manifest(
    directory: Path, manifest: Manifest, sha256: Mapping[str, str] | None = None
) -> Manifest:
    """Writes `manifest.json` with `files` filled in. Raises InvalidInput if an entry of the
    directory is neither a plain file nor a directory. The error's field is the entry's name.

    Args:
        sha256: path relative to `directory` -> SHA-256, for files whose writers computed the hash;
            all other files are read to compute their hashes.
    """
    paths = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise InvalidInput(
                f"{path} is not a plain file, so it can't be part of a checkpoint", field=name
            )
        if path.is_file() and name != MANIFEST:
            paths[name] = path
    known = sha256 or {}
    hashes = {**known, **_hashes({name: path for name, path in paths.items() if name not in known})}
    files = {
        name: FileEntry(size=path.stat().st_size, sha256=hashes[name])
        for name, path in paths.items()
    }
    manifest = manifest.model_copy(update={"files": files})
    fs.write_json_atomic(directory / MANIFEST, manifest)
    return manifest


def verify_files(directory: Path, manifest: Manifest) -> None:
    """Compares every file with the manifest. Raises CheckpointDamaged with the name of each file
    that is missing, truncated, altered or not a regular file. Raises CheckpointIncomplete if files
    are missing and all other files match the manifest."""
    paths = {name: directory / name for name in manifest.files}
    sizes = dict[str, int]()
    strange = dict[str, str]()
    for name, path in paths.items():
        with suppress(FileNotFoundError):
            try:
                with open_plain(path) as file:
                    sizes[name] = os.fstat(file.fileno()).st_size
            except NotPlainError as error:
                strange[name] = str(error.strerror)
    hashes = _hashes(
        {name: paths[name] for name, size in sizes.items() if size == manifest.files[name].size}
    )
    damage = []
    for name, entry in manifest.files.items():
        if name in strange:
            damage.append(f"{name} can't be used: {strange[name]}")
        elif name not in sizes:
            damage.append(f"{name} is missing")
        elif (size := sizes[name]) < entry.size:
            damage.append(f"{name} is truncated ({size} of {entry.size} bytes)")
        elif size > entry.size:
            damage.append(f"{name} is altered ({size} bytes instead of {entry.size})")
        elif hashes[name] != entry.sha256:
            damage.append(f"{name} is altered (its sha256 differs)")
    if damage:
        remedy = "Restore it from a copy, or roll the run back"
        problem = f"checkpoint {directory}: {'; '.join(damage)}. {remedy}"
        all_missing = len(damage) == len(manifest.files.keys() - sizes.keys() - strange.keys())
        raise (CheckpointIncomplete if all_missing else CheckpointDamaged)(problem)


def _hashes(paths: Mapping[str, Path]) -> dict[str, str]:
    """SHA-256 of each file. Several files are hashed in parallel, on at most half of the CPU
    cores."""
    with ThreadPoolExecutor(min(8, max(1, len(os.sched_getaffinity(0)) // 2))) as pool:
        return dict(zip(paths, pool.map(fs.sha256_file, paths.values()), strict=True))


class CheckpointIncomplete(CheckpointDamaged):
    """Some files of a checkpoint are missing, and all others match the manifest."""


class Runs:
    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def directory(self, name: str) -> Path:
        """The run's directory. Raises NotFound (field `run`) if the run does not exist."""
        path = self._paths.run_dir(name)
        if not path.is_dir() and not fs.exists(path):
            known = ", ".join(listing(path.parent)[:20]) or "none yet"
            raise NotFound(f"there is no run {name!r}; runs are: {known}", field="run")
        return path

    def create(
        self,
        spec: RunSpec,
        write_files: Callable[[Path], None],
        sha256: Mapping[str, str] | None = None,
        **details: Any,
    ) -> RunSpec:
        """Creates a run with its checkpoint of step 0. Raises Conflict (field `name`) if the run
        exists. The run appears completely or not at all.

        Args:
            write_files: writes the files of the checkpoint of step 0 into a given directory.
            sha256: the known hashes of files, as for `write_manifest`.
            details: the values of further fields of the manifest.
        """
        manifest = Manifest(
            run=spec.name, step=0, job=None, created=spec.created, files={}, **details
        )
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
            write_manifest(checkpoint, manifest, sha256)
            fs.fsync_tree(staged)
            try:
                fs.rename_dir(staged, target)
            except FileExistsError as error:
                raise taken from error
        return spec

    def get(self, name: str) -> RunSpec:
        """The run's specification. Raises NotFound (field `run`) if the run does not exist. Raises
        RunDamaged if the run's record can't be read."""
        path = self.directory(name) / "run.json"
        try:
            spec = _read_spec(path) or fs.read_record(path, RunSpec)
        except ValidationError as error:
            raise RunDamaged(
                f"{path} is damaged; restore it from a copy: {error}", field="run"
            ) from error
        if spec is None or spec.name != name:
            problem = "is missing" if spec is None else f"is of another run, {spec.name!r}"
            raise RunDamaged(f"{path} {problem}; restore it, or remove {path.parent}", field="run")
        return spec

    def names(self) -> list[str]:
        """The sorted names of all runs that can be read."""
        return [spec.name for spec in self.list()]

    def list(self) -> list[RunSpec]:
        """All runs that can be read, sorted by name."""
        return [*self.after("")]

    def after(self, name: str) -> Iterator[RunSpec]:
        """The readable runs whose names come after `name`, sorted by name and read lazily."""
        names = listing(self._paths.runs)
        for at in range(bisect_right(names, name), len(names)):
            if is_run_name(names[at]):
                # The method `damaged` reports damaged runs. If a listed run is not found, it was
                # removed meanwhile.
                with suppress(RunDamaged, NotFound):
                    yield self.get(names[at])

    def damaged(self) -> dict[str, str]:
        """Name -> problem, for each name in `runs/` that is not a complete run."""
        found = {}
        for name in listing(self._paths.runs):
            try:
                if not is_run_name(name):
                    raise RunDamaged(f"{self._paths.runs / name} is not a run; remove it")
                self.get(name)
                if not listing(self.directory(name) / "checkpoints"):
                    raise RunDamaged(
                        f"run {name!r} has no checkpoint, not even step 0: restore its directory"
                    )
            except RunDamaged as error:
                found[name] = error.message
            except NotFound:  # the run was removed meanwhile
                continue
        return found

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """The lock for changes of the run's chain of checkpoints: submission of a job, rollback,
        removal, and the start of a fork. Raises NotFound (field `run`) if the run does not exist,
        or is deleted while this method waits for the lock."""
        path = self.directory(name) / "lock"
        with ExitStack() as stack:
            try:
                held = os.fstat(stack.enter_context(file_lock(path)))
                same = os.path.samestat(held, path.stat())
            except FileNotFoundError:
                same = False
            # If the lock file is no longer at `path`, the run has been removed. A new run with the
            # same name has its own lock file.
            if not same:
                raise NotFound(f"run {name!r} was deleted", field="run")
            yield


@remembered
def _read_spec(path: Path) -> RunSpec | None:
    return fs.read_record(path, RunSpec)


WANTED_SECONDS = 600.0
"""Seconds for which a step stays loaded after a client has asked for it."""


class ServedRecords:
    """`runs/<run>/served.json`: the step of a run that vLLM serves. All methods of the class raise
    NotFound (field `run`) if the run does not exist."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def _path(self, run: str) -> Path:
        return self._runs.directory(run) / "served.json"

    def get(self, run: str) -> Served | None:
        """The run's record; None if vLLM serves no step of the run, or if the file is damaged."""
        return fs.read_undamaged(self._path(run), Served)

    def put(self, run: str, served: Served) -> None:
        fs.write_json_atomic(self._path(run), served)
        fs.remove_file(self._refused(run))

    def withdraw(self, run: str) -> None:
        """Records that vLLM serves no step of the run, and that no step was refused."""
        fs.remove_file(self._path(run))
        fs.remove_file(self._refused(run))

    def _refused(self, run: str) -> Path:
        return self._runs.directory(run) / "refused.json"

    def refused(self, run: str) -> Refused | None:
        """The newest step that the publisher refused. None if vLLM serves a step of the run, or if
        no step was refused."""
        return fs.read_undamaged(self._refused(run), Refused)

    def put_refused(self, run: str, refused: Refused) -> None:
        if self.refused(run) != refused:
            fs.write_json_atomic(self._refused(run), refused)

    def want(self, run: str, step: int) -> None:
        """Records that a client wants to sample from a step that vLLM does not have. The publisher
        loads a recorded step and keeps the step for WANTED_SECONDS."""
        path = self._wanted(run) / str(step)
        with fs.volume_errors(path):
            fs.make_dir(path.parent)
            path.touch()

    def wanted(self, run: str) -> list[int]:
        """The steps that clients asked for within the last WANTED_SECONDS, by this machine's
        clock."""
        found = []
        for name in listing(self._wanted(run)):
            with suppress(OSError, ValueError):
                if time.time() - (self._wanted(run) / name).stat().st_mtime < WANTED_SECONDS:
                    found.append(int(name))
        return found

    def _wanted(self, run: str) -> Path:
        return self._runs.directory(run) / "wanted"

    def changed(self, run: str) -> float | None:
        """The time at which `served.json` was written, in Unix seconds by the volume's clock. None
        if the file does not exist."""
        with suppress(FileNotFoundError):
            return self._path(run).stat().st_mtime
        return None
