"""A checkpoint's files and `manifest.json`, which lists their sizes and hashes: written and verified."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tandem.errors import CheckpointDamaged, InvalidInput
from tandem.spool import fs
from tandem.spool.schema import Manifest
from tandem.spool.schema.checkpoints import FileEntry

MANIFEST = "manifest.json"


def write_manifest(directory: Path, manifest: Manifest, sha256: Mapping[str, str] | None = None) -> Manifest:
    """Hashes every file under `directory`, but those in `sha256`, and writes `manifest.json` with `files` filled in.

    InvalidInput (field: the file) if the directory holds anything but plain files and directories.
    """
    paths = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise InvalidInput(f"{path} is not a plain file, so it can't be part of a checkpoint", field=name)
        if path.is_file() and name != MANIFEST:
            paths[name] = path
    known = sha256 or {}
    hashes = {**known, **_hashes({name: path for name, path in paths.items() if name not in known})}
    files = {name: FileEntry(size=path.stat().st_size, sha256=hashes[name]) for name, path in paths.items()}
    manifest = manifest.model_copy(update={"files": files})
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
        remedy = "Restore it from a copy, or roll the run back"
        raise CheckpointDamaged(f"checkpoint {directory}: {'; '.join(damage)}. {remedy}")


def _hashes(paths: Mapping[str, Path]) -> dict[str, str]:
    """SHA-256 of each file, several at a time; half of the cores stay for others."""
    with ThreadPoolExecutor(min(8, max(1, len(os.sched_getaffinity(0)) // 2))) as pool:
        return dict(zip(paths, pool.map(fs.sha256_file, paths.values()), strict=True))
