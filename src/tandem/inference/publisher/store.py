"""Local copies of the adapters that vLLM serves, each under a path that names its content.

vLLM reads an adapter again whenever it was pushed out of its cache, long after it was loaded, and its engine dies
(0.32) when it can't: reading from the volume, a rollback that moved the checkpoint away, or a network file system that
is down, would take all of vLLM with it. The path also tells what was loaded, so that a publisher that starts anew can
see from vLLM's list alone whether `<run>@<step>` is this checkpoint or one of the same name from before a rollback; and
newer vLLM versions key their prefix cache by it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from tandem.errors import CheckpointDamaged, SpoolUnusable
from tandem.spool.schema import Manifest

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
WEIGHTS_FILE = ADAPTER_FILES[1]
_PARTIAL = ".partial-"


class AdapterStore:
    """A directory of this machine, of this user, shared with vLLM and with nobody else."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise SpoolUnusable(
                f"{directory} belongs to somebody else; remove it, or set TMPDIR to a directory of yours"
            )
        self.directory = directory.absolute()

    @classmethod
    def of(cls, root: Path, url: str) -> AdapterStore:
        """The store of one spool and one server, under `TMPDIR`."""
        key = hashlib.sha256(f"{root.absolute()} {url}".encode()).hexdigest()[:16]
        return cls(Path(tempfile.gettempdir()) / f"tandem-adapters-{os.getuid()}-{key}")

    def path(self, name: str, manifest: Manifest) -> Path:
        """Where this adapter is, or would be. CheckpointDamaged if the manifest lists no adapter."""
        missing = [file for file in ADAPTER_FILES if file not in manifest.files]
        if missing:
            raise CheckpointDamaged(f"checkpoint {manifest.run}@{manifest.step}: its manifest lists no {missing[0]}")
        content = hashlib.sha256("".join(manifest.files[file].sha256 for file in ADAPTER_FILES).encode())
        return self.directory / f"{name}-{content.hexdigest()[:32]}"

    def place(self, path: Path, checkpoint: Path, manifest: Manifest) -> None:
        """Copy the adapter from `checkpoint` to `path`, hashing what is copied; nothing to do if it is there.

        CheckpointDamaged if a file is missing or is not what the manifest says.
        """
        if path.is_dir():
            os.utime(path)
            return
        partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=self.directory))
        try:
            for file in ADAPTER_FILES:
                if _copy(checkpoint / file, partial / file) != manifest.files[file].sha256:
                    raise CheckpointDamaged(f"checkpoint {checkpoint}: {file} is altered (its sha256 differs)")
            partial.rename(path)
        except FileNotFoundError as error:
            raise CheckpointDamaged(f"checkpoint {checkpoint}: {Path(str(error.filename)).name} is missing") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def stale(self, listed: Collection[str], *, older_than: float) -> list[Path]:
        """Copies that are not among the paths in `listed`, and were not for `older_than` seconds."""
        found = []
        for path in self.directory.iterdir():
            if str(path) in listed:
                os.utime(path)
            elif time.time() - path.stat().st_mtime > older_than:
                found.append(path)
        return found

    @staticmethod
    def remove(path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)


def _copy(source: Path, target: Path) -> str:
    """Copy a file; returns the SHA-256 of the bytes written."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("wb") as writer:
        while block := reader.read(1 << 20):
            digest.update(block)
            writer.write(block)
    return digest.hexdigest()
