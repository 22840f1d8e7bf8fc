"""A checkpoint's archive on its way to a directory; no network I/O here."""

import shutil
import tarfile
from pathlib import Path
from typing import Self

from tandem.errors import InvalidInput
from tandem.spool.checkpoint_files import verify_files
from tandem.spool.fs import new_ulid
from tandem.spool.schema import Manifest


def check_free(target: Path) -> None:
    """Raise InvalidInput if `target` exists and is not an empty directory."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidInput(f"{target} exists and is not an empty directory; choose another", field="dest")


class Download:
    """Collects a checkpoint's tar archive; the directory `target` appears once every file is complete and checked."""

    def __init__(self, target: Path) -> None:
        check_free(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        self.target = target
        self._staged = target.parent / f".{target.name}.{new_ulid()}.part"

    def __enter__(self) -> Self:
        self._staged.mkdir()
        self._file = (self._staged / "archive.tar").open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        shutil.rmtree(self._staged, ignore_errors=True)

    def restart(self) -> None:
        """Drop what was received, because the transfer begins anew."""
        self._file.seek(0)
        self._file.truncate()

    def write(self, data: bytes) -> None:
        """Append a part of the archive."""
        self._file.write(data)

    def finish(self) -> Manifest:
        """Unpack the archive, compare each file's SHA-256 with the manifest, and rename the result to `target`.

        Raises CheckpointDamaged where a file is missing or differs.
        """
        self._file.close()
        content = self._staged / "content"
        with tarfile.open(self._staged / "archive.tar") as archive:
            archive.extractall(content, filter="data")
        (root,) = content.iterdir()
        manifest = Manifest.model_validate_json((root / "manifest.json").read_bytes())
        verify_files(root, manifest)
        root.replace(self.target)
        return manifest
