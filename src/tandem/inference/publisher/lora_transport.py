"""Brings LoRA checkpoints into vLLM: a copy of the adapter on this machine, loaded over HTTP.

Another way for weights to travel is another class with the public methods of `LoraTransport`.

vLLM (0.32) reads an adapter's files again whenever it evicted the adapter from its cache, and its engine dies when it
can't. So vLLM loads local copies: a rollback, or a volume that is down, must not end it. A copy's path names its
content. By the path a new publisher recognises the checkpoint in vLLM's list, although a rollback may have replaced it
under the same name, and vLLM's prefix cache tells the two apart (`VllmClient.prefix_cache_keyed_by_path`).
"""

import time
from pathlib import Path

from tandem.inference.publisher.adapter_copies import AdapterCopies
from tandem.spool.schema import Manifest, RunSpec
from tandem.vllm_client.client import InferenceUnavailable, VllmClient
from tandem.vllm_client.names import BASE_MODEL_NAME

FLUSH_SECONDS = 30.0
"""How long one attempt waits for requests of a replaced adapter, where its cached blocks could be reused."""
MOST_NAMES = 10_000
"""Names of unloaded adapters that are remembered. After that the cache is flushed for each name that is not."""


class LoraTransport:
    """The adapters of one vLLM server. Its methods can raise what VllmClient raises.

    `listed`: name -> path of every model that vLLM lists, as of the last `refresh` and of this object's own changes.
    """

    name = "lora"

    def __init__(self, client: VllmClient, copies: AdapterCopies) -> None:
        self._client = client
        self.copies = copies
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

    def load(self, name: str, path: Path, _run: RunSpec, _checkpoint: Manifest) -> dict[str, float]:
        """Load a copied adapter under a name that is not listed."""
        self._flush_prefix_cache(name, path)
        self._client.load_lora(name, str(path))
        self.listed[name] = self._last_path[name] = str(path)
        return {}

    def announce(self, name: str, path: Path) -> None:
        """Nothing: who knows the name may use it as soon as vLLM lists it."""

    def identity_reference(self, _name: str) -> str:
        """The model that the identity adapter must equal."""
        return BASE_MODEL_NAME

    def unload(self, name: str, *, deleted: bool = False) -> None:  # noqa: ARG002 - as in MergedTransport
        """Remove the name. Running requests finish with the adapter that they began with."""
        self._client.unload_lora(name)
        # The adapter's blocks may stay in the prefix cache.
        self._last_path[name] = self.listed.pop(name)
        while len(self._last_path) > MOST_NAMES:
            del self._last_path[next(iter(self._last_path))]
            self._saw_start = False

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
