"""Whole merged weights as Hugging Face models: `runs/<run>/merged/<8 digits>/`, immutable once they have that name.

Its `manifest.json` is the checkpoint's, with these files.
"""

from pathlib import Path

from pydantic import ValidationError

from tandem.spool import fs
from tandem.spool.checkpoint_files import MANIFEST, verify_files, write_manifest
from tandem.spool.paths import step_name
from tandem.spool.runs import Runs, ServedRecords
from tandem.spool.schema import Manifest


class MergedFiles:
    def __init__(self, runs: Runs, served: ServedRecords) -> None:
        self._runs, self._served = runs, served

    def _dir(self, run: str) -> Path:
        return self._runs.directory(run) / "merged"

    def commit(self, staged: Path, checkpoint: Manifest) -> int:
        """Make `staged` (on the volume) the merged weights of the checkpoint, and remove those of other steps but the
        served one. Returns their bytes. If this fails, `staged` stays where it was."""
        run, directory = checkpoint.run, self._dir(checkpoint.run)
        target = directory / step_name(checkpoint.step)
        with fs.volume_errors(target):
            manifest = write_manifest(staged, checkpoint.model_copy(update={"files": {}}))
            fs.fsync_tree(staged)
            directory.mkdir(exist_ok=True)
            fs.remove_tree(target)  # of a checkpoint that a rollback discarded
            fs.rename_dir(staged, target)
        served = self._served.get(run)
        keep = {target.name, step_name(served.step) if served else ""}
        for name in fs.names(directory):
            if name not in keep:
                fs.remove_tree(directory / name)
        return sum(entry.size for entry in manifest.files.values())

    def find(self, checkpoint: Manifest) -> Path | None:
        """The directory with the whole weights of this checkpoint, if there is one."""
        directory = self._dir(checkpoint.run) / step_name(checkpoint.step)
        try:
            manifest = fs.read_record(directory / MANIFEST, Manifest)
        except ValidationError:
            return None
        made = manifest and (manifest.job, manifest.created)
        return directory if made == (checkpoint.job, checkpoint.created) else None

    def verify(self, directory: Path) -> None:
        """Compare every file with the manifest. CheckpointDamaged names each that is missing, truncated or altered."""
        manifest = fs.read_record(directory / MANIFEST, Manifest)
        assert manifest is not None, "it was found a moment ago"
        verify_files(directory, manifest)
