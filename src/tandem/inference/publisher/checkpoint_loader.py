"""Loads a checkpoint into vLLM, verifies it there, and remembers the result."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from tandem.config import resolve_model
from tandem.errors import CheckpointDamaged
from tandem.inference.publisher.transports import LoraTransport, MergedTransport
from tandem.inference.publisher.usage import run_of
from tandem.inference.publisher.verify import Tolerance, WrongWeights, verify
from tandem.spool import Spool
from tandem.spool.runs import CheckpointIncomplete
from tandem.spool.schema import Manifest, RunSpec, Served
from tandem.system.logs import Log
from tandem.vllm_client.client import InferenceFailed, InferenceRefused, VllmClient

log = Log("publisher")

FileStats = tuple[tuple[str, int, int, int], ...]
"""Path, size in bytes, modification time in ns and inode of each file. Any change of a file alters
one of these values."""

TRIES = 3
"""How many times vLLM may answer with status 500 before the checkpoint counts as refused."""
TRY_AGAIN_SECONDS = 30.0
"""Seconds before a checkpoint is tried again if it was refused because vLLM answered with status
500. The pause doubles with each further refusal."""
LONGEST_PAUSE_SECONDS = 3600.0
VISIBLE_SECONDS = 60.0
"""Seconds for which a file of a new checkpoint may be missing on this machine, because NFS may show
new files late. After this time, a missing file counts as damage."""


@dataclass
class ServedCheckpoint:
    """A checkpoint that vLLM lists under `path` and that was verified. `told`: whether the event
    `served` has been written to the events of the checkpoint's job."""

    path: Path
    record: Served
    job: str | None
    told: bool = False

    def with_manifest(self, manifest: tuple[int, int] | None) -> "ServedCheckpoint":
        """Records that the checkpoint's manifest was read. `manifest`: the `manifest_identity` of
        the manifest's file just before the file was read."""
        self.record = self.record.model_copy(update={"manifest": manifest})
        return self


class CheckpointRefused(Exception):
    """A checkpoint can't be served. The error's message gives the reason."""


class CheckpointNotVisible(Exception):
    """Files of a new checkpoint are not visible yet. The error's message gives the time until which
    the publisher retries the load."""


@dataclass
class Refusal:
    """A refused checkpoint. `stats` shows whether the refused files have changed. If vLLM's status
    500 caused the refusal, the publisher tries the same files again after `pause` seconds. `again`
    is the end of this pause on the monotonic clock; it is infinite after any other refusal."""

    stats: FileStats
    reason: str
    pause: float
    again: float


@dataclass
class CheckpointLoader:
    """Loads and verifies checkpoints. `tolerance`: the rule for the largest allowed error of
    log-probs; `base_model`: vLLM's base model, named in the message of a refusal."""

    spool: Spool
    client: VllmClient
    transport: LoraTransport | MergedTransport
    tolerance: Tolerance
    base_model: str | None
    _served: dict[str, ServedCheckpoint] = field(default_factory=dict)
    _refused: dict[str, Refusal] = field(default_factory=dict)
    loads: int = 0
    """The number of checkpoints that this object tried to load and verify."""

    def server_lost(self) -> None:
        """Forget all served checkpoints and all refusals, because the lost server may have caused
        the refusals."""
        self._served.clear()
        self._refused.clear()
        self.transport.server_lost()

    def verified(self, name: str) -> float | None:
        """The time at which this object verified the weights that vLLM serves as `name`, in Unix
        seconds; None if this object has not verified these weights."""
        return self._served[name].record.verified if name in self._served else None

    def serving(self, run: str) -> list[Served]:
        """The verified steps of a run that vLLM lists, the newest first."""
        records = [
            served.record
            for name, served in self._served.items()
            if run_of(name) == run and self._lists(name, served.path)
        ]
        return sorted(records, key=lambda record: -record.step)

    def serve(self, run: RunSpec, step: int, name: str) -> ServedCheckpoint:
        """Load and verify a checkpoint, unless it is already loaded and verified. Raises
        CheckpointRefused.

        Raises CheckpointNotVisible for a new checkpoint whose files are missing. In every pass of
        its loop, the publisher tries again to load a checkpoint whose files are missing. A refused
        checkpoint is tried again when its files change, or when vLLM's server is lost. A checkpoint
        that was refused because of vLLM's status 500 is also tried again after a pause.

        Args:
            name: the model's name in vLLM, `<run>@<step>`.
        """
        served = self._served.get(name)
        try:
            identity = self.spool.checkpoints.manifest_identity(run.name, step)
            if (
                identity
                and served is not None
                and served.record.manifest == identity
                and self._lists(name, served.path)
            ):
                # An unchanged manifest is not read again, because reading takes milliseconds.
                return served
            manifest = self.spool.checkpoints.manifest(run.name, step)
            path = self.transport.copies.path(name, manifest, run)
        except CheckpointDamaged as error:
            if served is not None and self._lists(name, served.path):
                # vLLM serves a verified copy, which is not affected by damage on the volume.
                return served
            raise self._refuse(name, (), str(error)) from error
        if served is not None and served.path == path and self._lists(name, path):
            return served.with_manifest(identity)
        self._served.pop(name, None)
        if name in self.transport.listed and not self._lists(name, path):
            log.info("unloading an adapter whose checkpoint was replaced", model=name)
            self.unload(name)
        paths = sorted(self.spool.checkpoints.path(run.name, step).rglob("*"))
        files = [(str(path), path.stat()) for path in paths if path.is_file()]
        stats = tuple((path, s.st_size, s.st_mtime_ns, s.st_ino) for path, s in files)
        refusal = self._refused.get(name)
        if refusal is not None and refusal.stats == stats and time.monotonic() < refusal.again:
            raise CheckpointRefused(refusal.reason)
        self.loads += 1
        try:
            served = self._try_to_serve(run, manifest, name, path)
        except (CheckpointDamaged, InferenceRefused) as error:
            late = isinstance(error, CheckpointIncomplete)
            if late and time.time() - manifest.created < VISIBLE_SECONDS:
                raise CheckpointNotVisible(
                    f"{name} is tried again until {VISIBLE_SECONDS:g} s after it was made, since"
                    f" its files may not be visible yet: {error}"
                ) from error
            raise self._refuse(
                name, stats, str(error), passing=isinstance(error, InferenceFailed)
            ) from error
        self._served[name] = served.with_manifest(identity)
        self._refused.pop(name, None)
        return served

    def unload(self, name: str, *, deleted: bool = False) -> None:
        """Unload the model with this name. `deleted`: whether the model's run was deleted."""
        self.transport.unload(name, deleted=deleted)
        self._served.pop(name, None)

    def _lists(self, name: str, path: Path) -> bool:
        return self.transport.listed.get(name) == str(path)

    def _try_to_serve(
        self, run: RunSpec, manifest: Manifest, name: str, path: Path
    ) -> ServedCheckpoint:
        """Runs `_load_and_verify`, and repeats it if vLLM answers with status 500. An answer with
        status 500 does not prove that the checkpoint is bad."""
        for attempt in range(1, TRIES):
            try:
                return self._load_and_verify(run, manifest, name, path)
            except InferenceFailed as error:
                log.warning("vLLM answered 500; trying again", model=name, error=error)
                time.sleep(0.1 * 2**attempt)
                self.transport.refresh()  # vLLM may have loaded the adapter in spite of the error
        return self._load_and_verify(run, manifest, name, path)

    def _load_and_verify(
        self, run: RunSpec, manifest: Manifest, name: str, path: Path
    ) -> ServedCheckpoint:
        started = time.monotonic()
        if run.lora is not None:
            # Only the adapter's files are hashed, because vLLM needs no optimizer state.
            self.transport.copies.copy(
                path, self.spool.checkpoints.path(run.name, manifest.step), manifest
            )
        copied = time.monotonic()
        parts: dict[str, float] = {}
        if not self._lists(name, path):
            parts = self.transport.load(name, path, run, manifest)
        loaded = time.monotonic()
        identity = self.transport.identity or name
        try:
            result = verify(
                self.client,
                name,
                manifest.probe,
                tolerance=self.tolerance,
                identity=identity,
                beside=self.transport.identity,
            )
        except WrongWeights as error:
            wanted = resolve_model(self.spool.root, run.base_model)
            other = f"; the run's base model is {wanted}, vLLM's is {self.base_model}"
            raise InferenceRefused(
                str(error) + ("" if self.base_model in (None, wanted) else other)
            ) from error
        self.transport.announce(name, path)
        seconds = {
            "copy": copied - started,
            "load": loaded - copied,
            "verify": time.monotonic() - loaded,
            "since_checkpoint": time.time() - manifest.created,
            **parts,
        }
        record = Served(
            step=manifest.step,
            model=name,
            weights=run.weights,
            transport=self.transport.name,
            checkpoint=manifest.weights_sha256,
            verified=time.time(),
            mean_abs_logprob_error=result.error,
            allowed_logprob_error=result.allowed,
            tokens_checked=result.tokens,
            seconds={part: round(value, 6) for part, value in seconds.items()},
        )
        log.info(
            "serving", model=name, error=f"{result.error:.3g}", tokens=result.tokens, **seconds
        )
        return ServedCheckpoint(path, record, manifest.job)

    def _refuse(
        self, name: str, stats: FileStats, reason: str, *, passing: bool = False
    ) -> CheckpointRefused:
        """Unload the checkpoint if vLLM has it, and remember the refusal with the stats of the
        checkpoint's files. `passing`: whether the cause of the refusal is temporary, so that the
        same files may be accepted later."""
        if name in self.transport.listed:
            self.unload(name)
        before = self._refused.get(name)
        if before is None or (before.stats, before.reason) != (stats, reason):
            log.warning(f"{name} is refused: {reason}")
        pause = TRY_AGAIN_SECONDS
        if before is not None and before.stats == stats:
            pause = min(2 * before.pause, LONGEST_PAUSE_SECONDS)
        self._refused[name] = Refusal(
            stats, reason, pause, time.monotonic() + (pause if passing else math.inf)
        )
        return CheckpointRefused(reason)
