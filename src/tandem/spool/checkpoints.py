"""Checkpoints (`runs/<run>/checkpoints/<8 digits>/`) and whole merged weights
(`runs/<run>/merged/<8 digits>-<12 hex digits>/`). The 12 hexadecimal digits in a name identify the
checkpoint.

The directory of a checkpoint or of merged weights is immutable once it has its final name.
"""

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from tandem.errors import CheckpointDamaged, Conflict, InvalidInput, NotFound
from tandem.spool import fs
from tandem.spool.jobs import Jobs
from tandem.spool.paths import listing, remembered, step_name
from tandem.spool.runs import MANIFEST, Runs, ServedRecords, verify_files, write_manifest
from tandem.spool.schema import STEPS, Job, Manifest, Origin, RunSpec, Served, SessionJob
from tandem.system.plain_files import NotPlainError, open_plain

_is_step = re.compile(r"[0-9]{8}").fullmatch
_is_merged = re.compile(r"[0-9]{8}-[0-9a-f]{12}").fullmatch
_COPY_BYTES = 2**24  # bytes copied at a time


class Checkpoints:
    def __init__(self, runs: Runs, jobs: Jobs) -> None:
        self._runs = runs
        self._jobs = jobs

    def _dir(self, run: str) -> Path:
        return self._runs.directory(run) / "checkpoints"

    def steps(self, run: str) -> list[int]:
        """The steps of the run's checkpoints, ascending. Raises NotFound (field `run`) if the run
        does not exist."""
        return [int(name) for name in listing(self._dir(run)) if _is_step(name)]

    def discarded(self, run: str) -> list[Path]:
        """The directories of the checkpoints that rollbacks discarded: `<step>-<ULID of the
        rollback>`."""
        directory = self._runs.directory(run) / "discarded"
        return [directory / name for name in listing(directory)]

    def size(self, run: str) -> int:
        """The size, in bytes, of the run's checkpoints, discarded checkpoints and whole merged
        weights. Raises NotFound if the run does not exist."""
        directory = self._runs.directory(run)
        return sum(
            _bytes_of_all(directory / name) or 0 for name in ("checkpoints", "discarded", "merged")
        )

    def pin(self, run: str, step: int) -> None:
        """Keeps a checkpoint from being removed, until `unpin` is called or a rollback discards the
        checkpoint. Raises NotFound if the checkpoint does not exist."""
        with self._runs.lock(run):
            marker = self._pins(run) / self.path(run, step).name
            fs.in_made_dir(marker.parent, lambda: fs.write_atomic(marker, b""))

    def unpin(self, run: str, step: int) -> None:
        """Removes the pin of a step; does nothing if the step is not pinned."""
        fs.remove_file(self._pins(run) / step_name(step))

    def pinned(self, run: str) -> list[int]:
        """The pinned steps, ascending."""
        return [int(name) for name in listing(self._pins(run)) if _is_step(name)]

    def _pins(self, run: str) -> Path:
        return self._runs.directory(run) / "pinned"

    def changed(self, run: str) -> float:
        """The time at which a checkpoint was last added or removed, in Unix seconds by the volume's
        clock. Raises NotFound if the run does not exist."""
        return self._dir(run).stat().st_mtime

    def newest(self, run: str) -> int:
        """The newest step. Raises CheckpointDamaged if the run has no checkpoint."""
        newest = next(filter(_is_step, reversed(listing(self._dir(run)))), None)
        if newest is None:
            raise CheckpointDamaged(
                f"run {run!r} has no checkpoint, not even step 0: restore its directory"
            )
        return int(newest)

    def path(self, run: str, step: int) -> Path:
        """The checkpoint's directory. Raises NotFound (field `step`) if the checkpoint does not
        exist."""
        directory = self._dir(run) / step_name(min(step, STEPS))
        if not 0 <= step < STEPS or (not directory.is_dir() and not fs.exists(directory)):
            steps = self.steps(run)
            known = f"{steps[0]} to {steps[-1]}" if steps else "none"
            removed = (
                " without those that were removed" if steps and len(steps) <= steps[-1] else ""
            )
            raise NotFound(
                f"run {run!r} has no checkpoint {step}; it has {known}{removed}", field="step"
            )
        return directory

    def manifest(self, run: str, step: int) -> Manifest:
        """The manifest. Raises NotFound if the checkpoint does not exist. Raises CheckpointDamaged
        if the manifest is missing, is unreadable or belongs to another checkpoint."""
        path = self.path(run, step) / MANIFEST
        try:
            manifest = fs.read_record(path, Manifest)
        except ValidationError as error:
            raise CheckpointDamaged(f"{path} is truncated or altered ({error})") from error
        if manifest is None:
            self.path(run, step)  # raises NotFound if the checkpoint was removed meanwhile
            raise CheckpointDamaged(f"{path} is missing")
        if (manifest.run, manifest.step) != (run, step):
            raise CheckpointDamaged(
                f"{path} is altered: it names run {manifest.run!r} and step {manifest.step}"
            )
        return manifest

    def manifest_identity(self, run: str, step: int) -> tuple[int, int] | None:
        """The identity (inode, mtime in ns) of the manifest's file. The identity changes when the
        manifest is written again. Returns None if there is no manifest. Raises NotFound if the
        checkpoint does not exist."""
        with suppress(FileNotFoundError):
            status = (self.path(run, step) / MANIFEST).stat()
            return status.st_ino, status.st_mtime_ns
        return None

    def has(self, run: str, served: Served) -> bool:
        """Whether the served checkpoint is still the run's checkpoint of step `served.step`. Opens
        the manifest only if the inode or mtime of the manifest's file differs from
        `served.manifest`."""
        with suppress(NotFound, CheckpointDamaged):
            if served.manifest is not None and served.manifest == self.manifest_identity(
                run, served.step
            ):
                return True
            return self.manifest(run, served.step).weights_sha256 == served.checkpoint
        return False

    def verify(self, run: str, step: int) -> Manifest:
        """Compares every file with the manifest, and returns the manifest. Raises CheckpointDamaged
        with the name of each damaged file."""
        manifest = self.manifest(run, step)
        verify_files(self.path(run, step), manifest)
        return manifest

    def commit(
        self,
        staged_dir: Path,
        run: str,
        step: int,
        job: str,
        sha256: Mapping[str, str] | None = None,
        check: Callable[[], None] = lambda: None,
        **details: Any,
    ) -> Manifest:
        """Commits the directory `staged_dir` as the checkpoint `step`, by one rename. If the commit
        fails, `staged_dir` stays where it was.

        Raises Conflict (field `step`) if `step` is not the newest step plus 1. Raises InvalidInput
        if the directory contains a link or a special file.

        Args:
            staged_dir: any directory under the root.
            sha256: file name -> SHA-256, for files whose writers computed the hash; all other files
                are read to compute their hashes.
            check: called right before the rename; it may raise an error to refuse the commit.
            details: the values of further fields of the manifest.
        """
        target = self._dir(run) / step_name(step)
        newest = self.newest(run)
        if step != newest + 1:
            problem = (
                f"run {run!r} has a checkpoint {step} already"
                if step <= newest
                else "there would be a gap"
            )
            raise Conflict(
                f"{problem}: its newest is {newest}, so the next is {newest + 1}, not {step}",
                field="step",
            )
        manifest = Manifest(run=run, step=step, job=job, created=time.time(), files={}, **details)
        with fs.volume_errors(target):
            manifest = write_manifest(staged_dir, manifest, sha256)
            fs.fsync_tree(staged_dir)
            check()
            try:
                fs.rename_dir(staged_dir, target)
            # a rank of an earlier attempt has already committed the step
            except FileExistsError as error:
                raise Conflict(
                    f"run {run!r} has a checkpoint {step} already", field="step"
                ) from error
        return manifest

    def made_by(self, job: Job) -> bool:
        """Whether the job's checkpoint exists and this job made it. A session's job makes any
        number of checkpoints. The existence of a checkpoint therefore does not show that a
        session's job is done."""
        if isinstance(job.spec, SessionJob):
            return False
        try:
            return self.manifest(job.spec.run, job.spec.base_step + 1).job == job.spec.id
        except (NotFound, CheckpointDamaged):
            return False

    def rollback(self, run: str, step: int) -> list[int]:
        """Moves every checkpoint after `step` into `runs/<run>/discarded/`, newest first; returns
        the steps of the moved checkpoints. Raises Conflict (field `step`) if jobs of the run are
        queued or running, because these jobs build on the checkpoints. A crash during the rollback
        leaves a shorter chain without gaps. Another call completes the rollback."""
        if self._runs.get(run).session is not None:
            problem = f"run {run!r} is of a session, whose requests can't be undone"
            raise Conflict(f"{problem}; fork it from this step", field="run")
        with self._runs.lock(run):
            self.path(run, step)
            self._jobs.check_none_pending(run, "step")
            later = [other for other in reversed(self.steps(run)) if other > step]
            checkpoints = self._dir(run)
            discarded = checkpoints.parent / "discarded"
            with fs.volume_errors(discarded):
                try:
                    for other in later:
                        fs.remove_file(self._pins(run) / step_name(other))
                    # The volume keeps the order of renames, so one fsync after all renames is
                    # enough.
                    for other in later:
                        name = step_name(other)
                        (checkpoints / name).rename(discarded / f"{name}-{fs.new_ulid()}")
                finally:
                    fs.fsync_dir(discarded)
                    fs.fsync_dir(checkpoints)
            return later

    def fork(self, run: str, step: int, new: RunSpec) -> RunSpec:
        """Creates a run whose step 0 is a copy of this checkpoint, optimizer state included. Every
        copied file is compared with the manifest.

        Raises Conflict (field `name`) if the run `new.name` exists. Raises InvalidInput if `new`
        has another base model or LoRA shape. Raises CheckpointDamaged if the checkpoint or its copy
        is damaged. Raises NotFound if the run or the checkpoint does not exist. The source run may
        change during the copy, because the source's files are opened before the copy and stay
        readable after their removal.

        Args:
            new: the new run's specification; `fork` sets its `forked_from`.
        """
        with ExitStack() as opened:
            with self._runs.lock(run):
                manifest = self._forkable(run, step, new)
                files = {
                    name: opened.enter_context(self._open(run, step, name, entry.size))
                    for name, entry in manifest.files.items()
                }
            origin = Origin(run=run, step=step)
            details = manifest.model_dump(include={"topology", "versions", "metrics", "probe"})

            def copy(checkpoint: Path) -> None:
                for name, file in files.items():
                    target = checkpoint / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with target.open("xb") as out:
                        shutil.copyfileobj(file, out, _COPY_BYTES)
                    # Each file is verified right after it is copied, because a verification of all
                    # files at the end could last long. `recovery.sweep` removes a copy in which no
                    # file has changed for an hour.
                    self._check_copy(checkpoint, run, manifest, name)

            sha256 = {name: entry.sha256 for name, entry in manifest.files.items()}
            new = new.model_copy(update={"forked_from": origin})
            return self._runs.create(new, copy, sha256, origin=origin, **details)

    def _forkable(self, run: str, step: int, new: RunSpec) -> Manifest:
        source = self._runs.get(run)
        for field in ("base_model", "lora"):
            if (kept := getattr(source, field)) != getattr(new, field):
                raise InvalidInput(
                    f"a fork keeps the {field} of {run!r}, which is {kept}", field=field
                )
        return self.manifest(run, step)

    def _check_copy(self, copy: Path, run: str, manifest: Manifest, name: str) -> None:
        try:
            verify_files(copy, manifest.model_copy(update={"files": {name: manifest.files[name]}}))
        except CheckpointDamaged:
            with suppress(NotFound):
                self.verify(run, manifest.step)  # raises an error if the source is damaged
            raise

    def _open(self, run: str, step: int, name: str, size: int) -> IO[bytes]:
        try:
            # A file that is longer than `size` is damaged, so `open_plain` refuses to open it.
            return open_plain(self.path(run, step) / name, most=size)
        except (FileNotFoundError, NotPlainError):
            self.verify(run, step)
            raise


class MergedFiles:
    """The complete merged weights of checkpoints, as Hugging Face models. The `manifest.json` of
    merged weights is a copy of the checkpoint's manifest, but lists the files of the merged
    weights."""

    def __init__(
        self, runs: Runs, served: ServedRecords, replicas: Callable[[str], Collection[int]]
    ) -> None:
        """
        Args:
            replicas: If there are several inference servers, `replicas(run)` returns the steps of
                the run that the servers serve.
        """
        self._runs, self._served, self._replicas = runs, served, replicas

    def _dir(self, run: str) -> Path:
        return self._runs.directory(run) / "merged"

    def steps(self, run: str) -> dict[Path, int]:
        """Directory -> step, for the whole merged weights of the run's checkpoints. Raises NotFound
        if the run does not exist."""
        directory = self._dir(run)
        return {directory / name: int(name[:8]) for name in listing(directory) if _is_merged(name)}

    def _path(self, checkpoint: Manifest) -> Path:
        """The directory of the checkpoint's whole weights. The directory's name contains 12
        hexadecimal digits that identify the checkpoint, because two checkpoints of the same step
        need different directories."""
        made = hashlib.sha256(f"{checkpoint.job} {checkpoint.created!r}".encode()).hexdigest()[:12]
        return self._dir(checkpoint.run) / f"{step_name(checkpoint.step)}-{made}"

    def commit(self, staged: Path, checkpoint: Manifest) -> int:
        """Commits `staged`, a directory on the volume, as the merged weights of the checkpoint.
        Removes older merged weights, except the weights of the served step and of the previous
        step. Returns the size of the merged weights in bytes. If the commit fails, `staged` stays
        where it was. If the checkpoint already has merged weights, they are not replaced.
        """
        run, target = checkpoint.run, self._path(checkpoint)
        directory = target.parent
        with fs.volume_errors(target):
            manifest = write_manifest(staged, checkpoint.model_copy(update={"files": {}}))
            fs.fsync_tree(staged)
            directory.mkdir(exist_ok=True)
            with suppress(FileExistsError):
                fs.rename_dir(staged, target)
        served, steps = self._served.get(run), self.steps(run)
        # vLLM may still read the weights of the previous step. On NFS, a reader on another host
        # can't read a file after its removal.
        before = [step for step in steps.values() if step < checkpoint.step][-1:]
        keep = {*before, served.step if served else None, *self._replicas(run)}
        for path, step in steps.items():
            other = fs.read_undamaged(path / MANIFEST, Manifest)
            newer = other is not None and other.created > checkpoint.created
            if path != target and step not in keep and not newer:
                fs.remove_tree(path)
        return sum(entry.size for entry in manifest.files.values())

    def find(self, checkpoint: Manifest) -> Path | None:
        """Finds the directory with the whole weights of this checkpoint, and compares every file in
        the directory with the manifest. Returns the directory; None if it does not exist. Raises
        CheckpointDamaged with the name of each damaged file."""
        directory = self._path(checkpoint)
        manifest = fs.read_undamaged(directory / MANIFEST, Manifest)
        if manifest is None or (manifest.job, manifest.created) != (
            checkpoint.job,
            checkpoint.created,
        ):
            return None
        verify_files(directory, manifest)
        return directory


@remembered
def _bytes_of_all(directory: Path) -> int:
    """The size in bytes of all files in the directory's subdirectories. The size of each
    subdirectory is cached, because a subdirectory with a final name never changes."""
    return sum(_bytes_of(directory / name) or 0 for name in listing(directory))


@remembered
def _bytes_of(directory: Path) -> int:
    """The size in bytes of all files below the directory. Broken links, and files that vanish
    during the count, are skipped."""
    total = 0
    for here, _, files in os.walk(directory):
        for name in files:
            with suppress(OSError):
                total += Path(here, name).stat().st_size
    return total
