"""Makes vLLM's own weights those of a checkpoint. Whole weights come from the job's ranks or from files, if they were
offered; else vLLM's workers merge the adapter, or read a whole model's files.

Its methods are those of `LoraTransport`. vLLM serves one checkpoint at a time.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tandem.config import Settings, resolve_model
from tandem.errors import CheckpointDamaged
from tandem.families.model_config import model_directory
from tandem.inference.publisher.adapter_copies import AdapterCopies
from tandem.inference.publisher.spot_check import SpotCheck
from tandem.spool import Spool
from tandem.spool.runs import verify_files
from tandem.spool.schema import Manifest, RunSpec
from tandem.system import liveness
from tandem.system.logs import Log
from tandem.vllm_client.client import InferenceRefused, VllmClient

log = Log("publisher")


class MergedTransport:
    """`listed`: name -> path of the checkpoint that vLLM serves, as of the last `refresh` and of own changes; `name`:
    how its weights came."""

    name = "merge"

    def __init__(
        self, client: VllmClient, copies: AdapterCopies, settings: Settings, check: SpotCheck, spool: Spool
    ) -> None:
        """`check`: what the weights must be after a swap."""
        self._client, self.copies, self._settings, self._check = client, copies, settings, check
        self._spool = spool
        self.listed: dict[str, str] = {}

    def refresh(self) -> bool:
        """Ask vLLM whose weights it has. Returns whether those are gone that it had: then it is another server.

        Weights that were not announced, or that are torn, count as none: `load` writes and checks them again.
        """
        before, state = self.listed, self._client.merged()
        self.name = state["transport"]
        self.listed = {state["name"]: state["path"]} if state["phase"] == "served" else {}
        return not before.keys() <= self.listed.keys()

    def server_lost(self) -> None:
        self.listed = {}

    def load(self, name: str, path: Path, run: RunSpec, checkpoint: Manifest) -> dict[str, float]:
        """Swap the weights, and compare rows of every tensor with what they must be. New requests wait from here to
        `announce`. Returns the seconds of each part. InferenceRefused where vLLM has other weights then."""
        settings, sources = self._settings, self._sources(run, checkpoint)
        scale = run.lora.alpha / run.lora.rank if run.lora else 0.0
        swap = partial(self._client.swap_merged, name, str(path), scale=scale, requests=settings.swap_requests,
                       seconds=settings.swap_seconds)  # fmt: skip
        if run.lora is None:
            model = self._model(run, checkpoint)
            expected = self._check.model_rows(model)
            answer = self._from_ranks(swap, sources)
            if answer is None:
                verify_files(model, checkpoint.model_copy(update={"files": checkpoint.weights_files}))
                answer = swap(sources=[{"way": "volume", "directory": str(model)}])
        else:
            expected = self._check.adapter_rows(path, run.lora)
            answer = swap(sources=[*sources, None])
            for reason in answer["failed"]:
                log.warning("whole weights did not arrive", model=name, transport=answer["transport"], reason=reason)
        self.listed, self.name = {name: str(path)}, answer["transport"]
        if wrong := expected.wrong(self._client.merged_rows(expected.rows)):
            raise InferenceRefused(f"vLLM's weights differ from this checkpoint's: {wrong}")
        return {key.removesuffix("_seconds"): value for key, value in answer.items() if key.endswith("_seconds")}

    def _from_ranks(self, swap: Callable[..., dict[str, Any]], sources: list[dict[str, Any]]) -> dict[str, Any] | None:
        """A swap to what the ranks send; None where they send nothing, or where it does not arrive. They wait, and give
        up before a large checkpoint's files are verified, so those are not read first."""
        try:
            return swap(sources=sources) if sources else None
        except InferenceRefused as error:
            log.warning("whole weights did not arrive", reason=error)
            return None

    def _model(self, run: RunSpec, checkpoint: Manifest) -> Path:
        """The directory of a run's whole weights."""
        if not checkpoint.weights_files:  # step 0
            return model_directory(resolve_model(self._spool.root, run.base_model))
        return self._spool.checkpoints.path(run.name, checkpoint.step)

    def _sources(self, run: RunSpec, checkpoint: Manifest) -> list[dict[str, Any]]:
        """Where vLLM's workers may get whole weights, best first; without the checkpoint's own."""
        if self._settings.way == "merge" or checkpoint.job is None:
            return []
        sources, deadline = list[dict[str, Any]](), time.monotonic() + self._settings.swap_seconds
        while (offer := self._offer(checkpoint.job)).get("transport") == "volume" and time.monotonic() < deadline:
            liveness.beat("publisher")  # the job's ranks write the files
            time.sleep(0.1)
        if offer and offer["transport"] != "volume":
            sources.append({**offer, "way": offer["transport"]})
        try:
            if run.lora is not None and (files := self._spool.merged.find(checkpoint)) is not None:
                sources.append({"way": "volume", "directory": str(files)})
        except CheckpointDamaged as error:
            log.warning(error.message)
        return sources

    def _offer(self, job: str) -> dict[str, Any]:
        """What the job's ranks are about to send, while they run; else nothing."""
        events = [event for event in self._spool.events.read(job) if event.type in ("offered", "sent")]
        if not events or events[-1].type == "sent" or self._spool.jobs.get(job)[0] != "running":
            return {}
        return events[-1].data

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
