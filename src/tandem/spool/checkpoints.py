"""Checkpoints: `runs/<run>/checkpoints/<8 digits>/`, immutable once they have that name."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from tandem.errors import CheckpointDamaged, Conflict, InvalidInput, NotFound
from tandem.spool import fs
from tandem.spool.paths import step_name
from tandem.spool.schema import FileEntry, Manifest, Origin, Probe, RunSpec

if TYPE_CHECKING:
    from tandem.spool import Spool

MANIFEST = "manifest.json"


def write_manifest(directory: Path, manifest: Manifest) -> Manifest:
    """Hashes every file under `directory` and writes `manifest.json` with `files` filled in.

    InvalidInput (field: the file) if the directory holds anything but plain files and directories.
    """
    paths = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise InvalidInput(f"{path} is not a plain file, so it can't be part of a checkpoint", field=name)
        if path.is_file() and name != MANIFEST:
            paths[name] = path
    hashes = _hashes(paths)
    files = {name: FileEntry(size=path.stat().st_size, sha256=hashes[name]) for name, path in paths.items()}
    manifest = Manifest.model_validate({**manifest.model_dump(), "files": files})
    fs.write_json_atomic(directory / MANIFEST, manifest)
    return manifest


def verify_files(directory: Path, manifest: Manifest) -> None:
    """Compares every file with the manifest; CheckpointDamaged names each that is missing, truncated or altered."""
    paths = {name: directory / name for name in manifest.files}
    sizes = {name: path.stat().st_size for name, path in paths.items() if path.is_file()}
    hashes = _hashes({name: paths[name] for name, size in sizes.items() if size == manifest.files[name].size})
    damage = []
    for name, entry in manifest.files.items():
        if name not in sizes:
            damage.append(f"{name} is missing")
        elif (size := sizes[name]) < entry.size:
            damage.append(f"{name} is truncated ({size} of {entry.size} bytes)")
        elif size > entry.size:
            damage.append(f"{name} is altered ({size} bytes instead of {entry.size})")
        elif hashes[name] != entry.sha256:
            damage.append(f"{name} is altered (its sha256 differs)")
    if damage:
        raise CheckpointDamaged(
            f"checkpoint {directory}: {'; '.join(damage)}. Restore it from a copy, or roll the run back"
        )


def _hashes(paths: Mapping[str, Path]) -> dict[str, str]:
    """SHA-256 of each file, four files at a time."""
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(paths, pool.map(fs.sha256_file, paths.values()), strict=True))


class Checkpoints:
    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def _dir(self, run: str) -> Path:
        return self._spool.runs.directory(run) / "checkpoints"

    def steps(self, run: str) -> list[int]:
        """The run's steps, ascending; NotFound (field `run`) without the run."""
        return [int(name) for name in fs.names(self._dir(run)) if re.fullmatch(r"[0-9]{8}", name)]

    def changed(self, run: str) -> float:
        """When a checkpoint last came or went, Unix seconds by the volume's clock; NotFound without the run."""
        return self._dir(run).stat().st_mtime

    def newest(self, run: str) -> int:
        """The newest step; CheckpointDamaged if the run has none."""
        steps = self.steps(run)
        if not steps:
            raise CheckpointDamaged(f"run {run!r} has no checkpoint, not even step 0: restore its directory")
        return steps[-1]

    def path(self, run: str, step: int) -> Path:
        """The checkpoint's directory; NotFound (field `step`) if there is none."""
        directory = self._dir(run) / step_name(step)
        if step < 0 or (not directory.is_dir() and not fs.exists(directory)):
            steps = self.steps(run)
            known = f"{steps[0]} to {steps[-1]}" if steps else "none"
            raise NotFound(f"run {run!r} has no checkpoint {step}; it has {known}", field="step")
        return directory

    def manifest(self, run: str, step: int) -> Manifest:
        """The manifest; CheckpointDamaged if it is missing, unreadable or of another checkpoint."""
        path = self.path(run, step) / MANIFEST
        try:
            manifest = fs.read_record(path, Manifest)
        except ValidationError as error:
            damage = f"{MANIFEST} is truncated or altered ({error})"
            raise CheckpointDamaged(f"checkpoint {path.parent}: {damage}") from error
        if manifest is None:
            raise CheckpointDamaged(f"checkpoint {path.parent}: {MANIFEST} is missing")
        if (manifest.run, manifest.step) != (run, step):
            damage = f"{MANIFEST} is altered: it names run {manifest.run!r} and step {manifest.step}"
            raise CheckpointDamaged(f"checkpoint {path.parent}: {damage}")
        return manifest

    def verify(self, run: str, step: int) -> Manifest:
        """The manifest, after comparing every file with it. CheckpointDamaged names each damaged file."""
        manifest = self.manifest(run, step)
        verify_files(self.path(run, step), manifest)
        return manifest

    def commit(
        self,
        staged_dir: Path,
        run: str,
        step: int,
        job: str | None,
        *,
        topology: dict[str, int] | None = None,
        versions: dict[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        probe: Probe | None = None,
    ) -> Manifest:
        """Makes `staged_dir` (anywhere under the root) the checkpoint `step`, by one rename.

        Conflict (field `step`) if the step exists or does not follow the newest; InvalidInput if the directory holds
        anything but plain files. If this fails, the staged directory stays where it was.
        """
        target = self._dir(run) / step_name(step)
        newest = self.newest(run)
        if step != newest + 1:
            problem = f"run {run!r} has a checkpoint {step} already" if step <= newest else "there would be a gap"
            raise Conflict(f"{problem}: its newest is {newest}, so the next is {newest + 1}, not {step}", field="step")
        manifest = Manifest(
            run=run,
            step=step,
            job=job,
            created=time.time(),
            files={},
            topology=topology or {},
            versions=versions or {},
            metrics=dict(metrics or {}),
            probe=probe,
        )
        with fs.volume_errors(target):
            manifest = write_manifest(staged_dir, manifest)
            fs.fsync_tree(staged_dir)
            try:
                fs.rename_dir(staged_dir, target)
            except FileExistsError as error:
                raise Conflict(f"run {run!r} has a checkpoint {step} already", field="step") from error
        return manifest

    def rollback(self, run: str, step: int) -> list[int]:
        """Moves every checkpoint after `step` into `runs/<run>/discarded/`, newest first; returns their steps.

        Conflict (field `step`) if jobs of the run are queued or running, since they build on these checkpoints. A crash
        half-way leaves a whole, shorter chain; calling again does the rest.
        """
        with self._spool.runs.lock(run):
            self.path(run, step)
            if pending := self._spool.jobs.pending(run):
                jobs = ", ".join(f"{job.spec.id} ({state})" for state, job in pending[:5])
                raise Conflict(f"run {run!r} has jobs that are not done: {jobs}; cancel them or wait", field="step")
            later = [other for other in reversed(self.steps(run)) if other > step]
            discarded = self._dir(run).parent / "discarded"
            for other in later:
                fs.rename_dir(self._dir(run) / step_name(other), discarded / f"{step_name(other)}-{fs.new_ulid()}")
            return later

    def fork(self, run: str, step: int, new: RunSpec) -> RunSpec:
        """Makes the run `new`, whose step 0 is a copy of this checkpoint, optimizer state included.

        Verifies the source before and the copy after. Conflict (field `name`) if `new.name` exists; InvalidInput if
        `new` has another base model or LoRA shape; CheckpointDamaged; NotFound.
        """
        with self._spool.runs.lock(run):
            source = self._spool.runs.get(run)
            for field in ("base_model", "lora"):
                if getattr(source, field) != getattr(new, field):
                    kept = getattr(source, field)
                    raise InvalidInput(f"a fork keeps the {field} of {run!r}, which is {kept}", field=field)
            manifest = self.verify(run, step)
            origin = Origin(run=run, step=step)
            new = RunSpec.model_validate({**new.model_dump(), "forked_from": origin})

            def fill(checkpoint: Path) -> None:
                for name in manifest.files:
                    target = checkpoint / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(self.path(run, step) / name, target)
                update = {"run": new.name, "step": 0, "job": None, "created": new.created, "origin": origin}
                copied = manifest.model_copy(update=update)
                verify_files(checkpoint, copied)
                fs.write_json_atomic(checkpoint / MANIFEST, copied)

            return self._spool.runs.make(new, fill)
