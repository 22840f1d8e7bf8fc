"""`python -m tandem.inference.publisher`: serves each run's newest checkpoint, once it is verified.

It runs beside vLLM (they share a local directory), looks at the spool and at vLLM's list of models, and does what is
missing; what it remembers only spares work. So it may die anywhere and start again, and so may vLLM.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from tandem.config import Settings, resolve_model
from tandem.errors import CheckpointDamaged, TandemError
from tandem.inference.publisher.adapters import Adapters
from tandem.inference.publisher.retention import Retention
from tandem.inference.publisher.store import WEIGHTS_FILE, AdapterStore
from tandem.inference.publisher.verify import verify
from tandem.inference.server.args import verify_tolerance
from tandem.spool import Spool
from tandem.spool.schema import Manifest, RunSpec, Served
from tandem.system import liveness
from tandem.system.logs import Log, configure
from tandem.vllm_client.admin import AdminClient, InferenceRefused, InferenceUnavailable
from tandem.vllm_client.waking import Turns, turns

log = Log("publisher")

POLL_SECONDS = 0.5
Fingerprint = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class Live:
    """An adapter that vLLM lists and that was verified."""

    path: Path
    record: Served
    job: str | None
    seconds: dict[str, float]


class Refused(Exception):
    """This checkpoint is not served."""


class Publisher:
    def __init__(
        self,
        spool: Spool,
        admin: AdminClient,
        store: AdapterStore,
        *,
        tolerance: float = 0.02,
        keep: int = 2,
        max_listed: int = 16,
        grace: float = 60.0,
        base_model: str | None = None,
        turns: Turns | None = None,
    ) -> None:
        """`tolerance`: nats; `keep`: newest steps of a run that stay loaded; `max_listed`: adapters beyond which older
        ones go without waiting `grace` seconds; `base_model`: what vLLM serves, to explain a refusal; `turns`: when
        vLLM may be used, by default always."""
        self._spool = spool
        self._admin = admin
        self._store = store
        self._tolerance = tolerance
        self._keep = keep
        self._base_model = base_model
        self._retention = Retention(admin, grace=grace, max_listed=max_listed)
        self._adapters = Adapters(admin)
        self._turns = turns or Turns()
        self._live: dict[str, Live] = {}
        self._refused: dict[str, tuple[Fingerprint, str]] = {}
        self._told: set[str] = set()
        self._said: dict[str, str] = {}

    def once(self) -> bool:
        """Do what is missing, for every run; False when vLLM sleeps or could not be reached."""
        try:
            with self._turns.turn() as why_not:
                if why_not:
                    # Nothing may be loaded into it. What it has it keeps.
                    self._say("turn", f"vLLM sleeps: {why_not}", log.info)
                    return False
                self._say("turn", "", log.info)
                self._publish_all()
        except InferenceUnavailable as error:
            self._say("vllm", f"waiting for vLLM: {error}")
            self._live.clear()
            self._refused.clear()
            self._adapters.server_went_away()
            return False
        self._say("vllm", "")
        return True

    def _publish_all(self) -> None:
        self._adapters.refresh()
        wanted: set[str] = set()
        existing: set[str] = set()
        runs = self._spool.runs.list()
        for run in runs:
            if run.weights != "lora":
                continue
            liveness.beat("publisher")
            try:
                existing |= {f"{run.name}@{step}" for step in self._spool.checkpoints.steps(run.name)}
                wanted |= self._follow(run)
                self._say(run.name, "")
            except InferenceUnavailable:
                raise
            except (TandemError, ValidationError, OSError) as error:
                # One run's trouble is not the others'. What it has loaded stays.
                wanted |= {name for name in self._adapters.listed if name.startswith(f"{run.name}@")}
                self._say(run.name, f"run {run.name} can't be published: {error}")
        listed, names = self._adapters.listed, {run.name for run in runs}
        for name in self._retention.retire(listed, runs=names, wanted=wanted, existing=existing):
            self._unload(name)
        self._sweep()

    def _sweep(self) -> None:
        """Remove local copies of adapters long unloaded, unless a request still runs on one: vLLM may read it again."""
        stale = self._store.stale(set(self._adapters.listed.values()), older_than=10 * self._retention.grace)
        if stale:
            in_use = tuple(f"{name}-" for name in self._admin.adapters_in_use())
            for path in stale:
                if not path.name.startswith(in_use):
                    self._store.remove(path)

    def _follow(self, run: RunSpec) -> set[str]:
        """Have the newest `keep` good steps of a run loaded; returns their names."""
        wanted: set[str] = set()
        best: Served | None = None
        refused: tuple[int, str] | None = None
        # Two more than are kept: behind a refused step an older one is still looked for, but not all the way down.
        for step in list(reversed(self._spool.checkpoints.steps(run.name)))[: self._keep + 2]:
            if len(wanted) == self._keep:
                break
            name = f"{run.name}@{step}"
            try:
                live = self._ensure(run, step, name)
            except Refused as error:
                refused = refused if best or refused else (step, str(error))
                continue
            wanted.add(name)
            if best is None:
                best = live.record
                # Written before older steps are looked at: nobody waits for those.
                self._record(run.name, best, refused)
            self._tell_job(live)
        if best is None and refused is not None:
            before = self._served(run.name)
            if before is not None:
                self._record(run.name, before, refused)
                wanted.add(before.model)
        return wanted

    def _served(self, run: str) -> Served | None:
        try:
            return self._spool.served.get(run)
        except ValidationError:
            return None  # unreadable is as good as absent: the record is made anew

    def _record(self, run: str, record: Served, refused: tuple[int, str] | None) -> None:
        """Write `served.json` if it says something else."""
        step, reason = refused or (None, None)
        record = record.model_copy(update={"refused_step": step, "refused_reason": reason})
        if self._served(run) != record:
            self._spool.served.put(run, record)

    def _ensure(self, run: RunSpec, step: int, name: str) -> Live:
        """The checkpoint, loaded and verified. Raises Refused."""
        live = self._live.get(name)
        try:
            manifest = self._spool.checkpoints.manifest(run.name, step)
            path = self._store.path(name, manifest)
        except CheckpointDamaged as error:
            if live is not None and self._adapters.has(name, live.path):
                return live  # what vLLM holds was verified, whatever has happened to the volume since
            raise Refused(self._refuse(name, (), str(error))) from error
        if live is not None and live.path == path and self._adapters.has(name, path):
            return live
        self._live.pop(name, None)
        if name in self._adapters.listed and not self._adapters.has(name, path):
            log.info("unloading an adapter whose checkpoint was replaced", model=name)
            self._unload(name)
        fingerprint = self._fingerprint(run.name, step)
        known = self._refused.get(name)
        if known is not None and known[0] == fingerprint:
            raise Refused(known[1])
        try:
            live = self._publish(run, manifest, name, path)
        except (CheckpointDamaged, InferenceRefused) as error:
            raise Refused(self._refuse(name, fingerprint, str(error))) from error
        self._live[name] = live
        self._refused.pop(name, None)
        return live

    def _publish(self, run: RunSpec, manifest: Manifest, name: str, path: Path) -> Live:
        began = time.monotonic()
        manifest = self._spool.checkpoints.verify(run.name, manifest.step)
        self._store.place(path, self._spool.checkpoints.path(run.name, manifest.step), manifest)
        hashed = time.monotonic()
        if not self._adapters.has(name, path):
            self._adapters.load(name, path)
        loaded = time.monotonic()
        result = verify(self._admin, name, manifest.probe, tolerance=self._tolerance)
        if not result.ok:
            raise InferenceRefused(result.reason + self._other_base(run))
        seconds = {
            "copy": hashed - began,
            "load": loaded - hashed,
            "verify": time.monotonic() - loaded,
            "since_checkpoint": time.time() - manifest.created,
        }
        record = Served(
            step=manifest.step,
            model=name,
            checkpoint=manifest.files[WEIGHTS_FILE].sha256,
            verified=time.time(),
            mean_abs_logprob_error=result.error,
            tokens_checked=result.tokens,
        )
        log.info("serving", model=name, error=f"{result.error:.3g}", tokens=result.tokens, **seconds)
        return Live(path, record, manifest.job, seconds)

    def _tell_job(self, live: Live) -> None:
        """Append `served` to the checkpoint's job, once, however often the checkpoint is loaded."""
        record = live.record
        if live.job is None or record.model in self._told:
            return
        if not any(event.type == "served" for event in self._spool.events.read(live.job)):
            self._spool.events.append(
                live.job,
                "served",
                step=record.step,
                model=record.model,
                mean_abs_logprob_error=record.mean_abs_logprob_error,
                tokens_checked=record.tokens_checked,
                seconds={key: round(value, 6) for key, value in live.seconds.items()},
            )
        self._told.add(record.model)

    def _refuse(self, name: str, fingerprint: Fingerprint, reason: str) -> str:
        """Make sure that vLLM does not serve it, and remember until its files or the server change."""
        if name in self._adapters.listed:
            self._unload(name)
        if fingerprint:
            self._refused[name] = (fingerprint, reason)
        self._say(name, f"{name} is refused: {reason}")
        return reason

    def _unload(self, name: str) -> None:
        self._adapters.unload(name)
        self._live.pop(name, None)
        self._told.discard(name)

    def _fingerprint(self, run: str, step: int) -> Fingerprint:
        directory = self._spool.checkpoints.path(run, step)
        found = [(path, path.stat()) for path in sorted(directory.rglob("*")) if path.is_file()]
        return tuple((str(path), s.st_size, s.st_mtime_ns, s.st_ino) for path, s in found)

    def _other_base(self, run: RunSpec) -> str:
        if self._base_model is None:
            return ""
        wanted = resolve_model(self._spool.root, run.base_model)
        return "" if wanted == self._base_model else f"; the run's base model is {wanted}, vLLM's is {self._base_model}"

    def _say(self, about: str, message: str, tell: Callable[[str], None] = log.warning) -> None:
        """Log a trouble once, and once more when it is over."""
        before = self._said.get(about, "")
        if message and message != before:
            tell(message)
        elif before and not message:
            log.info(f"over: {before}")
        self._said[about] = message


def main() -> None:
    """Publish until SIGTERM. Exits 2 on wrong settings; waits for spool and vLLM, whichever comes later."""
    configure()
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line per request otherwise, twice a second
    # Dying is safe at any point, so there is nothing to finish first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        settings = Settings()
        admin = AdminClient.from_settings(settings)
    except (ValidationError, OSError) as error:
        log.error(f"the publisher can't start: {error}")
        sys.exit(2)
    publisher: Publisher | None = None
    trouble = ""
    log.info("started", pid=os.getpid(), root=settings.root, vllm=settings.resolved_inference_url)
    while True:
        liveness.beat("publisher")
        try:
            if publisher is None:
                spool = Spool(settings.root)
                publisher = Publisher(
                    spool,
                    admin,
                    AdapterStore.of(settings.root, settings.resolved_inference_url),
                    tolerance=verify_tolerance(settings),
                    keep=settings.keep_served,
                    max_listed=4 * settings.max_loras,
                    base_model=settings.model_path() if settings.base_model else None,
                    turns=turns(settings, spool, admin),
                )
            publisher.once()
            trouble = ""
        except (TandemError, ValidationError, OSError) as error:
            if str(error) != trouble:
                log.error(f"trying again: {error}")
            trouble = str(error)
        time.sleep(POLL_SECONDS)
