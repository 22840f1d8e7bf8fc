"""Brings LoRA checkpoints into vLLM: a copy of the adapter on this machine, loaded over HTTP.

Another way for weights to travel is another class with the public methods of `LoraTransport`.

vLLM (0.32) reads an adapter's files again whenever it evicted the adapter from its cache, and its engine dies when it
can't. So vLLM loads local copies: a rollback, or a volume that is down, must not end it. A copy's path names its
content. By the path a new publisher recognises the checkpoint in vLLM's list, although a rollback may have replaced it
under the same name, and vLLM's prefix cache tells the two apart (`VllmClient.prefix_cache_keyed_by_path`).
"""

import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from tandem.errors import CheckpointDamaged
from tandem.spool.fs import sha256_file
from tandem.spool.schema import Manifest
from tandem.system.environment import private_directory
from tandem.vllm_client.client import InferenceUnavailable, VllmClient

WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_FILES = ("adapter_config.json", WEIGHTS_FILE)

FLUSH_SECONDS = 30.0
"""How long one attempt waits for requests of a replaced adapter, where its cached blocks could be reused."""


def copies_directory(root: Path, url: str) -> Path:
    """The directory under `TMPDIR` for the copies of one spool and one vLLM server."""
    key = hashlib.sha256(f"{root.absolute()} {url}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"tandem-adapters-{os.getuid()}-{key}"


class LoraTransport:
    """The adapters of one vLLM server. Its methods can raise what VllmClient raises.

    `listed`: name -> path of every model that vLLM lists, as of the last `refresh` and of this object's own changes.
    """

    def __init__(self, client: VllmClient, directory: Path) -> None:
        """`directory`: where the copies are. SpoolUnusable if it belongs to another user."""
        self._client = client
        self._directory = private_directory(directory.absolute())
        self.usage_file = self._directory / "used.json"
        self.listed: dict[str, str] = {}
        self._last_path: dict[str, str] = {}  # per name, also of names that were unloaded
        # Whether this object has seen the server start, and so knows every name that the server ever loaded.
        self._saw_start = False

    def refresh(self) -> bool:
        """Ask vLLM for its list. Returns whether a name is gone that was listed before: then it is another server."""
        before, self.listed = self.listed, self._client.models()
        return not before.keys() <= self.listed.keys()

    def server_lost(self) -> None:
        """Forget the server. The next one has no adapters."""
        self.listed = {}
        self._last_path.clear()
        self._saw_start = True

    def path(self, name: str, manifest: Manifest) -> Path:
        """The path of this checkpoint's copy, whether it exists or not. CheckpointDamaged if the manifest lists no
        adapter."""
        for file in ADAPTER_FILES:
            if file not in manifest.files:
                raise CheckpointDamaged(f"checkpoint {manifest.run}@{manifest.step}: its manifest lists no {file}")
        content = hashlib.sha256("".join(manifest.files[file].sha256 for file in ADAPTER_FILES).encode())
        return self._directory / f"{name}-{content.hexdigest()[:32]}"

    def has(self, name: str, path: Path) -> bool:
        """Whether vLLM lists exactly this content under the name."""
        return self.listed.get(name) == str(path)

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
        except FileNotFoundError as error:
            raise CheckpointDamaged(f"checkpoint {checkpoint}: {Path(str(error.filename)).name} is missing") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def load(self, name: str, path: Path) -> None:
        """Load a copied adapter under a name that is not listed."""
        self._flush_prefix_cache(name, path)
        self._client.load_lora(name, str(path))
        self.listed[name] = self._last_path[name] = str(path)

    def unload(self, name: str) -> None:
        """Remove the name. Running requests finish with the adapter that they began with."""
        self._client.unload_lora(name)
        # The adapter's blocks may stay in the prefix cache.
        self._last_path[name] = self.listed.pop(name)

    def remove_unused_copies(self, older_than: float) -> None:
        """Remove copies that vLLM has not listed for `older_than` seconds, except those that running requests use: vLLM
        may read those again."""
        listed = set(self.listed.values())
        unused = []
        for path in self._directory.iterdir():
            if str(path) in listed:
                os.utime(path)
            elif path != self.usage_file and time.time() - path.stat().st_mtime > older_than:
                unused.append(path)
        in_use = tuple(f"{name}-" for name in self._client.adapters_in_use()) if unused else ()
        for path in unused:
            if not path.name.startswith(in_use):
                shutil.rmtree(path, ignore_errors=True)

    def _flush_prefix_cache(self, name: str, path: Path) -> None:
        """Drop cached blocks of another adapter of this name, where vLLM keys blocks by the name alone."""
        last_path = self._last_path.get(name, str(path) if self._saw_start else "")
        if last_path == str(path) or self._client.prefix_cache_keyed_by_path():
            return
        deadline = time.monotonic() + FLUSH_SECONDS
        # A request that still runs with the old adapter would write its blocks again after the reset.
        while name in self._client.adapters_in_use() or not self._client.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise InferenceUnavailable(f"requests use the old {name}, so the prefix cache can't be reset yet")
            time.sleep(0.2)
