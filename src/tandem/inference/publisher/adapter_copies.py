"""Copies of adapters on this machine, named by their content.

vLLM reads an adapter's files when it needs them, not only when it is told to load it: a rollback, or a volume that is
down, must not take them away.
"""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

from tandem.errors import CheckpointDamaged
from tandem.families.adapter import CONFIG_FILE, WEIGHTS_FILE
from tandem.spool.fs import sha256_file
from tandem.spool.schema import Manifest, RunSpec
from tandem.system.environment import private_directory

ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)


def copies_directory(root: Path, url: str) -> Path:
    """The directory under `TMPDIR` for the copies of one spool and one vLLM server."""
    key = hashlib.sha256(f"{root.absolute()} {url}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"tandem-adapters-{os.getuid()}-{key}"


class AdapterCopies:
    def __init__(self, directory: Path) -> None:
        """`directory`: where the copies are. SpoolUnusable if it belongs to another user."""
        self._directory = private_directory(directory.absolute())
        self.usage_file = self._directory / "used.json"

    def has(self, path: str) -> bool:
        """Whether this is the path of one of these copies, whether it exists or not."""
        return Path(path).parent == self._directory

    def path(self, name: str, manifest: Manifest, run: RunSpec) -> Path:
        """The path of this checkpoint's copy, whether it exists or not; of a run of all weights, which have no copy, it
        only names them. CheckpointDamaged if the manifest lists no adapter."""
        if run.lora is None:
            return self._directory / f"{name}-{manifest.weights_sha256[:32]}"
        for file in ADAPTER_FILES:
            if file not in manifest.files:
                raise CheckpointDamaged(f"checkpoint {manifest.run}@{manifest.step}: its manifest lists no {file}")
        content = hashlib.sha256("".join(manifest.files[file].sha256 for file in ADAPTER_FILES).encode())
        return self._directory / f"{name}-{content.hexdigest()[:32]}"

    def copy(self, path: Path, checkpoint: Path, manifest: Manifest) -> None:
        """Copy the adapter from the directory `checkpoint` to `path`, unless the copy exists.

        CheckpointDamaged if a file is missing or does not have the manifest's hash.
        """
        if path.is_dir():
            os.utime(path)
            return
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=self._directory))
        try:
            for file in ADAPTER_FILES:
                copy, entry = shutil.copyfile(checkpoint / file, partial / file), manifest.files[file]
                if (size := copy.stat().st_size) < entry.size:
                    raise CheckpointDamaged(
                        f"checkpoint {checkpoint}: {file} is truncated ({size} of {entry.size} bytes)"
                    )
                if sha256_file(copy) != entry.sha256:
                    raise CheckpointDamaged(f"checkpoint {checkpoint}: {file} is altered (its sha256 differs)")
            partial.rename(path)
        except (FileNotFoundError, IsADirectoryError) as error:
            raise CheckpointDamaged(f"checkpoint {checkpoint}: {Path(str(error.filename)).name} is missing") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def remove_unused(
        self, listed: Collection[str], in_use: Callable[[], Collection[str]], *, older_than: float
    ) -> None:
        """Remove copies that have not been in `listed`, the paths that vLLM uses, for `older_than` seconds. Those whose
        names are `in_use()` stay: requests run with them, and vLLM may read them again."""
        unused = []
        for path in self._directory.iterdir():
            if str(path) in listed:
                os.utime(path)
            elif path != self.usage_file and time.time() - path.stat().st_mtime > older_than:
                unused.append(path)
        names = tuple(f"{name}-" for name in in_use()) if unused else ()
        for path in unused:
            if not path.name.startswith(names):
                shutil.rmtree(path, ignore_errors=True)
