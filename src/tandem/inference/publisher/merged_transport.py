"""Makes vLLM's own weights those of a checkpoint: only the adapter travels, and vLLM's workers merge it.

Its methods are those of `LoraTransport`. vLLM serves one checkpoint at a time.
"""

import shutil
from pathlib import Path

from tandem.config import Settings
from tandem.inference.publisher.adapter_copies import AdapterCopies
from tandem.inference.publisher.spot_check import SpotCheck
from tandem.spool.schema import LoraShape
from tandem.vllm_client.client import InferenceRefused, VllmClient


class MergedTransport:
    """`listed`: name -> path of the checkpoint that vLLM serves, as of the last `refresh` and of own changes."""

    name = "merge"

    def __init__(self, client: VllmClient, copies: AdapterCopies, settings: Settings, check: SpotCheck) -> None:
        """`check`: what the weights must be after a swap."""
        self._client, self.copies, self._settings, self._check = client, copies, settings, check
        self.listed: dict[str, str] = {}

    def refresh(self) -> bool:
        """Ask vLLM whose weights it has. Returns whether those are gone that it had: then it is another server.

        Weights that were not announced, or that are torn, count as none: `load` writes and checks them again.
        """
        before, state = self.listed, self._client.merged()
        self.listed = {state["name"]: state["path"]} if state["phase"] == "served" else {}
        return not before.keys() <= self.listed.keys()

    def server_lost(self) -> None:
        self.listed = {}

    def has(self, name: str, path: Path) -> bool:
        return self.listed.get(name) == str(path)

    def load(self, name: str, path: Path, lora: LoraShape) -> dict[str, float]:
        """Swap the weights, and compare rows of every tensor with the publisher's own merge. New requests wait from
        here to `announce`. Returns the seconds of each part. InferenceRefused where vLLM has other weights then."""
        scale = lora.alpha / lora.rank
        answer = self._client.swap_merged(
            name, str(path), scale, self._settings.swap_requests, self._settings.swap_seconds
        )
        self.listed = {name: str(path)}
        rows = self._check.rows(lora)
        if wrong := self._check.wrong(self._client.merged_rows(rows), rows, path, scale):
            raise InferenceRefused(f"vLLM's weights differ from this checkpoint's: {wrong}")
        return {key.removesuffix("_seconds"): value for key, value in answer.items() if key.endswith("_seconds")}

    def announce(self, _name: str, path: Path) -> None:
        """The weights are verified: requests may use them."""
        self._client.announce_merged(str(path))

    def identity_reference(self, name: str) -> str:
        """The identity adapter's weights are the base model's, which the rows have proved."""
        return name

    def unload(self, name: str, *, deleted: bool = False) -> None:
        """Return to the weights that were verified last; `deleted`: to the base model's, which nobody is served."""
        self._client.revert_merged(self.listed[name], to_base=deleted)
        self.refresh()

    def remove_unused_copies(self, older_than: float) -> None:
        """vLLM's workers have read an adapter when the swap begins."""
        for path in self.copies.unused(self.listed.values(), older_than):
            shutil.rmtree(path, ignore_errors=True)
