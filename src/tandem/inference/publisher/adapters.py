"""The adapters that one vLLM server has loaded: loading, unloading, and what a name meant before."""

from __future__ import annotations

import time
from pathlib import Path

from tandem.vllm_client.admin import AdminClient, InferenceRefused, InferenceUnavailable

LISTED_SECONDS = 30.0
"""How long vLLM may take to list an adapter that it said it loaded."""
FLUSH_SECONDS = 30.0
"""How long requests of a replaced adapter are waited for, per attempt, where its cached blocks could be mistaken."""


class Adapters:
    """`listed`: name -> path, as of the last `refresh` and of what was done since."""

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin
        self.listed: dict[str, str] = {}
        self._loaded_from: dict[str, str] = {}
        # Whether we saw the server start, and so know every name it ever loaded.
        self._saw_start = False

    def refresh(self) -> None:
        self.listed = self._admin.models()

    def server_went_away(self) -> None:
        """It may come back as another server: without its adapters, of another version."""
        self.listed = {}
        self._loaded_from.clear()
        self._saw_start = True
        self._admin.forget_version()

    def has(self, name: str, path: Path) -> bool:
        return self.listed.get(name) == str(path)

    def load(self, name: str, path: Path) -> None:
        """Load an adapter under a name that is not listed, and wait until it is."""
        self._flush_prefix_cache(name, path)
        self._admin.load_lora(name, str(path))
        self._loaded_from[name] = str(path)
        deadline = time.monotonic() + LISTED_SECONDS
        while self._admin.models().get(name) != str(path):
            if time.monotonic() > deadline:
                raise InferenceRefused(f"vLLM does not list {name} {LISTED_SECONDS:g} s after it said it loaded it")
            time.sleep(0.05)
        self.listed[name] = str(path)

    def unload(self, name: str) -> None:
        """Take the name away; running requests finish with what they began with."""
        self._admin.unload_lora(name)
        # Remembered as loaded once: its cached blocks may still lie about.
        self._loaded_from[name] = self.listed.pop(name)

    def _flush_prefix_cache(self, name: str, path: Path) -> None:
        """Where cached blocks are keyed by the name alone, none of another adapter of this name may be left."""
        if self._admin.prefix_cache_keyed_by_path:
            return
        if self._loaded_from.get(name, str(path) if self._saw_start else "") == str(path):
            return
        deadline = time.monotonic() + FLUSH_SECONDS
        # A request that still runs on the old adapter would write its blocks again after the reset.
        while name in self._admin.adapters_in_use() or not self._admin.reset_prefix_cache(preempt=True):
            if time.monotonic() > deadline:
                raise InferenceUnavailable(f"the prefix cache can't be reset while requests use the old {name}")
            time.sleep(0.2)
