"""Makes a directory that appears only when it is complete, and unpacks a checkpoint's archive into
such a directory. This module does no network I/O."""

import os
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from tandem.errors import InvalidInput
from tandem.spool.runs import verify_files
from tandem.spool.schema import Manifest


def partial_directory(target: Path) -> TemporaryDirectory[str]:
    """A temporary directory beside `target`. The caller makes the content in this directory, and
    renames the complete content to `target`.

    Raises InvalidInput if `target` exists and is not an empty directory, or if no directory can be
    renamed to `target`.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidInput(
            f"{target} exists and is not an empty directory; choose another", field="dest"
        )
    if target.exists() and (target.samefile(".") or target.is_mount() or target.is_symlink()):
        which = "the current directory, a mount point or a link, which can't be replaced"
        raise InvalidInput(f"{target} is {which}; name a new directory in it", field="dest")
    target.parent.mkdir(parents=True, exist_ok=True)
    return TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.", suffix=".part")


def unpack(archive: Path, target: Path) -> Manifest:
    """Unpack a checkpoint's tar archive beside the archive. Compare each file's SHA-256 with the
    manifest, and rename the unpacked directory to `target`.

    Raises CheckpointDamaged if a file is missing or differs.
    """
    content = archive.parent / "content"
    with tarfile.open(archive) as tar:
        tar.extractall(content, filter="data")
    (root,) = content.iterdir()
    manifest = Manifest.model_validate_json((root / "manifest.json").read_bytes(), extra="ignore")
    verify_files(Path(os.path.realpath(root)), manifest)
    root.replace(target)
    return manifest
