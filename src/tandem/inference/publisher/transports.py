"""Brings a checkpoint's weights into vLLM, as an adapter (`LoraTransport`) or as vLLM's own weights
(`MergedTransport`).

`TANDEM_WEIGHTS` chooses the transport. The methods of both classes may raise the errors of
`VllmClient`. The section "How to add something" of docs/architecture.md lists the parts that a new
transport for whole weights needs.

vLLM (0.32) reads the files of an evicted adapter again when a request needs the adapter. If the
files no longer exist, vLLM's engine crashes. vLLM therefore loads adapters from local copies. A
rollback or an unreachable volume does not affect the copies. A copy's path contains a hash of its
content. vLLM lists the path of each adapter. A restarted publisher knows from the path which
checkpoint vLLM has, even after a rollback. The path also separates old and new blocks in vLLM's
prefix cache (`VllmClient.prefix_cache_keyed_by_path`).
"""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tandem.config import Settings, resolve_model
from tandem.errors import CheckpointDamaged
from tandem.families.adapter import CONFIG_FILE, WEIGHTS_FILE
from tandem.families.model_config import model_directory
from tandem.inference.server.command import serving_dtype
from tandem.inference.spot_check import SpotCheck
from tandem.spool import Spool
from tandem.spool.runs import verify_files
from tandem.spool.schema import ONLY, Manifest, RunSpec
from tandem.system import liveness
from tandem.system.environment import private_directory
from tandem.system.logs import Log
from tandem.system.plain_files import NotPlainError, copy_plain
from tandem.vllm_client.client import InferenceRefused, InferenceUnavailable, VllmClient
from tandem.vllm_client.names import BASE_MODEL_NAME

log = Log("publisher")

ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
FLUSH_SECONDS = 30.0
"""The most seconds that a load waits until the requests of a replaced adapter have ended. The load
waits only if vLLM could reuse the old adapter's cached blocks for the new adapter."""
BEAT_SECONDS = 10.0
"""Seconds between two liveness beats during long work. Without these beats, the liveness probe
would consider a publisher dead whose turn takes too long."""


def copies_directory(root: Path, url: str) -> Path:
    """The directory under `TMPDIR` for the copies of one spool and one vLLM server."""
    key = hashlib.sha256(f"{root.absolute()} {url}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"tandem-adapters-{os.getuid()}-{key}"


class AdapterCopies:
    def __init__(self, directory: Path) -> None:
        """`directory`: the place of the copies. Raises SpoolUnusable if the directory belongs to
        another user."""
        self._directory = Path(os.path.realpath(private_directory(directory.absolute())))
        self._checked: set[Path] = set()  # copies that this object has made or hashed
        self.usage_file = self._directory / "used.json"

    def has(self, path: str) -> bool:
        """Whether `path` lies in the directory of copies. The path need not exist."""
        return Path(path).parent == self._directory

    def path(self, name: str, manifest: Manifest, run: RunSpec) -> Path:
        """The path of this checkpoint's copy, whether the copy exists or not. Raises
        CheckpointDamaged if the manifest lists no adapter.

        Args:
            name: the checkpoint's name in vLLM, `<run>@<step>`.
            run: the checkpoint's run. If the run trains all weights, no copy is made, and the path
                only identifies the weights.
        """
        content = manifest.weights_sha256
        if run.lora is not None:
            for file in ADAPTER_FILES:
                if file not in manifest.files:
                    raise CheckpointDamaged(
                        f"checkpoint {manifest.run}@{manifest.step}: its manifest lists no {file}"
                    )
            hashes = "".join(manifest.files[file].sha256 for file in ADAPTER_FILES)
            content = hashlib.sha256(hashes.encode()).hexdigest()
        return self._directory / f"{name}-{content[:32]}"

    def copy(self, path: Path, checkpoint: Path, manifest: Manifest) -> None:
        """Copy a checkpoint's adapter, unless a complete copy exists. Raises CheckpointDamaged if a
        file is missing or its hash differs from the hash in the manifest.

        Args:
            path: the copy's directory, as `path` returns it.
            checkpoint: the checkpoint's directory.
        """
        files = manifest.model_copy(
            update={"files": {file: manifest.files[file] for file in ADAPTER_FILES}}
        )
        if path.is_dir():
            try:
                # After a power loss, files of the copy may be empty. A program that cleans TMPDIR
                # may have removed files.
                if path not in self._checked or not _have_sizes(path, files):
                    verify_files(path, files)
                self._checked.add(path)
                os.utime(path)
                return
            except CheckpointDamaged:
                log.warning("a local copy of an adapter is damaged, and is made again", path=path)
                self._remove(path)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=self._directory))
        try:
            for file in ADAPTER_FILES:
                # `verify_files` names the missing file
                with suppress(FileNotFoundError, NotPlainError):
                    copy_plain(checkpoint / file, partial / file, most=manifest.files[file].size)
            verify_files(partial, files)
            partial.rename(path)
            self._checked.add(path)
        except CheckpointDamaged as error:
            raise type(error)(error.message.replace(str(partial), str(checkpoint))) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def remove_unused(
        self, listed: Collection[str], in_use: Callable[[], Collection[str]], *, older_than: float
    ) -> None:
        """Remove copies that vLLM has not used for a while.

        Args:
            listed: the paths of the models that vLLM lists.
            in_use: returns the names of models that running requests use; the copies of models in
                use stay, because vLLM may read the copies again.
            older_than: seconds since vLLM last used a copy.
        """
        unused = []
        for path in self._directory.iterdir():
            if str(path) in listed:
                # New mtimes protect the copies from programs that remove old files in TMPDIR.
                for used in (*path.iterdir(), path):
                    with suppress(FileNotFoundError):
                        os.utime(used)
            elif path != self.usage_file and time.time() - path.stat().st_mtime > older_than:
                unused.append(path)
        names = tuple(f"{name}-" for name in in_use()) if unused else ()
        for path in unused:
            if not path.name.startswith(names):
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Removes a copy. The copy is renamed first, so that an interrupted removal leaves no
        partial copy under the copy's name."""
        self._checked.discard(path)
        with suppress(OSError):
            removed = Path(tempfile.mkdtemp(prefix=".removed-", dir=self._directory))
            path.rename(removed / path.name)
            path = removed
        shutil.rmtree(path, ignore_errors=True)


def _have_sizes(directory: Path, files: Manifest) -> bool:
    with suppress(OSError):
        return all(
            (directory / name).stat().st_size == entry.size for name, entry in files.files.items()
        )
    return False


class LoraTransport:
    """The adapters of one vLLM server. `listed` has the path of each model that vLLM lists; `load`
    and `unload` update `listed`. `name` is the transport's name in records. `identity` is the name
    of the vLLM model that step 0 must equal."""

    name, identity = "lora", BASE_MODEL_NAME

    def __init__(self, client: VllmClient, copies: AdapterCopies) -> None:
        self._client = client
        self.copies = copies
        self.listed: dict[str, str] = {}
        # Name -> the path that vLLM last loaded under this name since vLLM started. None if vLLM
        # may have loaded models before this object existed.
        self._loaded: dict[str, str] | None = None

    def refresh(self) -> bool:
        """Ask vLLM for its list of models. Returns whether a previously listed name is missing. A
        missing name means that vLLM has started again."""
        before, self.listed = self.listed, self._client.models()
        return not before.keys() <= self.listed.keys()

    def server_lost(self) -> None:
        """Forget the adapters, because the next server starts without adapters."""
        self.listed, self._loaded = {}, {}

    def load(self, name: str, path: Path, _run: RunSpec, _checkpoint: Manifest) -> dict[str, float]:
        """Load a copied adapter under a name that is not listed yet. Returns an empty dict of
        durations, because the load of an adapter has no separate parts."""
        self._flush_prefix_cache(name, path)
        self._client.load_lora(name, str(path))
        self.listed[name] = str(path)
        if self._loaded is not None:
            self._loaded[name] = str(path)
        return {}

    def announce(self, name: str, path: Path) -> None:
        """Announces that the weights are verified. Does nothing, because clients can use an adapter
        as soon as vLLM lists its name."""

    def unload(self, name: str, *, deleted: bool = False) -> None:  # noqa: ARG002
        """Unloads a name. Running requests finish with the adapter that they began with."""
        self._client.unload_lora(name)
        path = self.listed.pop(name)
        if self._loaded is not None:  # vLLM may have loaded the adapter although `load` raised
            self._loaded[name] = path

    def _flush_prefix_cache(self, name: str, path: Path) -> None:
        """Drop the prefix cache's blocks of an earlier adapter with this name. The blocks outlive
        the adapter if vLLM keys cached blocks by the adapter's name."""
        is_new = self._loaded is not None and self._loaded.get(name, str(path)) == str(path)
        if is_new or self._client.prefix_cache_keyed_by_path():
            return
        deadline = time.monotonic() + FLUSH_SECONDS
        # A request that still runs with the old adapter would cache blocks again after the reset.
        while name in self._client.adapters_in_use() or not self._client.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise InferenceUnavailable(
                    f"requests use the old {name}, so the prefix cache can't be reset yet"
                )
            time.sleep(0.2)


class MergedTransport:
    """vLLM's own weights, which belong to one checkpoint at a time. If the job's ranks offer whole
    weights, the weights come from the ranks or from the files that the ranks have written. If the
    ranks offer no weights, vLLM's workers merge the adapter, or read a whole model's files."""

    # vLLM has no second model to compare with, so `identity` is empty. The comparison of rows
    # verifies the weights.
    name, identity = "merge", ""

    def __init__(
        self, client: VllmClient, copies: AdapterCopies, settings: Settings, spool: Spool
    ) -> None:
        self._client, self.copies, self._settings, self._spool = client, copies, settings, spool
        self._check = SpotCheck(settings.model_path(), serving_dtype(settings))
        self.listed: dict[str, str] = {}
        # The models that the last `refresh` found; `load` changes `listed` but not this mapping.
        self._refreshed: dict[str, str] = {}
        # The monotonic time before which no swap is ordered, and the reason. The next swap is
        # delayed if running requests did not end in time.
        self._waits = 0.0, ""

    def refresh(self) -> bool:
        """Asks vLLM which merged weights it has. Weights count as missing if they were not
        announced, or if they are torn (the workers have different versions). `load` writes and
        checks missing weights again."""
        before, state = self._refreshed, self._client.merged()
        self.name = state["transport"]
        self.listed = {state["name"]: state["path"]} if state["phase"] == "served" else {}
        self._refreshed = dict(self.listed)
        return not before.keys() <= self.listed.keys()

    def server_lost(self) -> None:
        self.listed = self._refreshed = {}
        self._waits = 0.0, ""

    def load(self, name: str, path: Path, run: RunSpec, checkpoint: Manifest) -> dict[str, float]:
        """Swap the weights, and compare one row of each changed matrix with the expected values.
        New requests wait from the swap until `announce`. Raises InferenceRefused if vLLM has wrong
        weights after the swap, and InferenceUnavailable if vLLM can't swap now."""
        until, why = self._waits
        if time.monotonic() < until:
            raise InferenceUnavailable(why)
        sources = self._offered(run, checkpoint)
        if run.lora is not None:
            expected, scale, own = (
                self._check.adapter_rows(path, run.lora),
                run.lora.alpha / run.lora.rank,
                None,
            )
        else:
            model = self._model(run, checkpoint)
            expected, scale, own = (
                self._check.model_rows(model),
                0.0,
                {"way": "volume", "directory": str(model)},
            )
        swap = partial(
            self._client.swap_merged,
            name,
            str(path),
            scale,
            self._settings.swap_requests,
            self._settings.swap_seconds,
            again=own,
        )
        for source in sources:
            try:
                answer = self._order(partial(swap, source=source))
                break
            except InferenceRefused as error:
                log.warning(
                    "whole weights did not arrive",
                    model=name,
                    transport=source["way"],
                    reason=error,
                )
        else:
            # The files are hashed only after the ranks' offers were tried, because hashing a large
            # checkpoint takes longer than the ranks wait for vLLM.
            if own is not None:
                files = checkpoint.model_copy(update={"files": checkpoint.weights_files})
                _alive(partial(verify_files, model, files))
            answer = self._order(partial(swap, source=own))
        self.listed, self.name = {name: str(path)}, answer["transport"]
        if wrong := expected.wrong(self._client.merged_rows(expected.rows)):
            raise InferenceRefused(f"vLLM's weights differ from this checkpoint's: {wrong}")
        return {
            key.removesuffix("_seconds"): value
            for key, value in answer.items()
            if key.endswith("_seconds")
        }

    def _order(self, swap: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """vLLM's answer to `swap`. With TANDEM_SWAP_REQUESTS=wait, new requests wait until the
        running requests have ended. If the running requests do not end in time, the next swap is
        delayed by the duration of this attempt. During this delay, vLLM answers new requests."""
        begin = time.monotonic()
        try:
            return _alive(swap)
        except InferenceUnavailable as error:
            if self._settings.swap_requests == "wait":
                self._waits = 2 * time.monotonic() - begin, error.message
            raise

    def _model(self, run: RunSpec, checkpoint: Manifest) -> Path:
        if not checkpoint.weights_files:  # step 0
            return model_directory(resolve_model(self._spool.root, run.base_model))
        return self._spool.checkpoints.path(run.name, checkpoint.step)

    def _offered(self, run: RunSpec, checkpoint: Manifest) -> list[dict[str, Any]]:
        """The sources from which vLLM's workers may get whole weights, the best source first. The
        checkpoint's own files are not in the result."""
        if self._settings.way == "merge" or checkpoint.job is None:
            return []
        sources, deadline = list[dict[str, Any]](), time.monotonic() + self._settings.swap_seconds
        # If ranks can't connect to vLLM's workers, the ranks write files instead.
        while (
            (offer := self._offer(checkpoint.job))
            and "meeting" not in offer
            and time.monotonic() < deadline
        ):
            liveness.beat("publisher")
            time.sleep(0.1)
        server = self._settings.replica or ONLY
        if "meeting" in offer and server in offer["servers"]:
            meeting = self._spool.root / offer["meeting"]
            if meeting.parent.parent == self._spool.paths.all_work_dirs(checkpoint.job):
                way = offer["transport"]
                sources.append({**offer, "way": way, "meeting": str(meeting), "server": server})
        try:
            # While `merged.find` hashes all files, `_alive` sends liveness beats.
            if (
                run.lora is not None
                and (files := _alive(partial(self._spool.merged.find, checkpoint))) is not None
            ):
                sources.append({"way": "volume", "directory": str(files)})
        except CheckpointDamaged as error:
            log.warning(error.message)
        return sources

    def _offer(self, job: str) -> dict[str, Any]:
        """The offer of the job's ranks to send weights. The result is empty if the ranks made no
        offer, no longer run, or have ended the transfer (event `sent`)."""
        offers = [
            event for event in self._spool.events.read(job) if event.type in ("offered", "sent")
        ]
        if not offers:
            return {}
        state, now = self._spool.jobs.get(job)
        of_now = [event for event in offers if event.attempt == now.attempt and state == "running"]
        return of_now[-1].data if of_now and of_now[-1].type == "offered" else {}

    def announce(self, _name: str, path: Path) -> None:
        self._client.announce_merged(str(path))

    def unload(self, name: str, *, deleted: bool = False) -> None:
        """Return to the previously verified weights. With `deleted`, return to the base model's
        weights, and serve no model to clients."""
        self._client.revert_merged(self.listed[name], to_base=deleted)
        self.refresh()


def _alive[T](action: Callable[[], T]) -> T:
    """The result of `action`. Calls `liveness.beat` while `action` runs, because `action` may take
    TANDEM_SWAP_SECONDS, or longer for a large model."""
    return liveness.in_thread(action, lambda: liveness.beat("publisher"), BEAT_SECONDS)
