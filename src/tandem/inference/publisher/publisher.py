"""Follows the runs on the spool: loads each run's newest good checkpoints into vLLM, and unloads
old checkpoints. The publisher loads recently trained or sampled runs first, so that they don't wait
for unused runs after a restart.

The publisher compares the spool with vLLM's list of models, and carries out the loads and unloads
that are missing. The publisher keeps no state that it needs after a restart: its memory only saves
repeated work. The publisher and vLLM may therefore die and start again at any time.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from pydantic import ValidationError

from tandem.config import Settings
from tandem.errors import CheckpointDamaged, NotFound, TandemError
from tandem.inference.publisher.checkpoint_loader import (
    CheckpointLoader,
    CheckpointNotVisible,
    CheckpointRefused,
)
from tandem.inference.publisher.place import vllm_place
from tandem.inference.publisher.records import OnlyServer, Records
from tandem.inference.publisher.replica import Member
from tandem.inference.publisher.shared_gpus import LentGpus
from tandem.inference.publisher.transports import (
    AdapterCopies,
    LoraTransport,
    MergedTransport,
    copies_directory,
)
from tandem.inference.publisher.usage import Retention, Usage, run_of
from tandem.inference.publisher.verify import Tolerance
from tandem.spool import Spool
from tandem.spool.paths import is_run_name
from tandem.spool.schema import Refused, RunSpec, Served
from tandem.system import liveness
from tandem.system.gpus import Devices
from tandem.system.logs import Log
from tandem.vllm_client.client import InferenceGone, InferenceUnavailable, VllmClient

log = Log("publisher")

GRACE_SECONDS = 60.0


class Publisher:
    def __init__(
        self, settings: Settings, client: VllmClient, *, grace: float = GRACE_SECONDS
    ) -> None:
        """Opens the spool and vLLM's client. Raises SpoolUnusable while the volume is missing.
        Raises InvalidInput for wrong settings.

        Args:
            grace: see `usage.Retention`.
        """
        self._spool = Spool(settings.root)
        self._weights = settings.weights
        self._keep = settings.keep_served if settings.weights == "adapter" else 1
        self._client = client
        # the GPUs that vLLM shares with the trainer; None if vLLM has its own GPUs
        self._shared: LentGpus | None = None
        if settings.gpu_mode == "shared":
            self._shared = LentGpus(self._spool, client, Devices(settings, "inference"))
        copies = AdapterCopies(copies_directory(settings.root, settings.resolved_inference_url))
        self._transport = (
            LoraTransport(client, copies)
            if self._weights == "adapter"
            else MergedTransport(client, copies, settings, self._spool)
        )
        base_model = settings.model_path() if settings.base_model else None
        self._loader = CheckpointLoader(
            self._spool, client, self._transport, Tolerance.of(settings), base_model
        )
        place = vllm_place(settings) if settings.way == "nccl" else None
        if settings.replica is None:
            self._records: Records = OnlyServer(self._spool)
            if place is not None:
                self._spool.inference.put_place(place)
        else:
            self._records = Member(self._spool, client, settings, place)
        self._usage = Usage(client, self._transport.copies.usage_file)
        self._retention = Retention(client, grace, most=4 * settings.max_loras)
        self._specs: dict[str, RunSpec] = {}
        # True if nothing listens at vLLM's address and no record of a served step is left.
        self._gone = False
        # Whether the records were compared with vLLM since vLLM last started.
        self._records_checked = False
        self._troubles: dict[str, str] = {}

    def once(self) -> bool:
        """Carry out all missing loads and unloads, for every run. Returns False if vLLM sleeps or
        can't be reached."""
        try:
            why_not = self._shared.turn() if self._shared is not None else ""
            self._log_change("awake", why_not and f"vLLM sleeps: {why_not}", log.info)
            if why_not:
                return False
            self._publish_runs()
        except InferenceUnavailable as error:
            self._log_change("vllm", f"waiting for vLLM: {error}")
            if isinstance(error, InferenceGone) and not self._gone:
                self._loader.server_lost()
                self._gone = self._withdraw_records()
                self._records_checked = False
            return False
        self._gone = False
        self._log_change("vllm", "")
        return True

    def wait(self, seconds: float) -> None:
        """Waits until the next call of `once` is due. On shared GPUs, the wait ends earlier if a
        trainer asks for the GPUs or gives them back."""
        if self._shared is not None:
            self._shared.wait(seconds)
        else:
            time.sleep(seconds)

    def _publish_runs(self) -> None:
        self._records.turn_begins()
        if self._transport.refresh() or not self._records_checked:
            self._records_checked = self._withdraw_records()
            # This code runs after a start of vLLM or of this publisher. The newest step of each run
            # is loaded first, so that the older steps of one run do not delay another run.
            if self._keep > 1:
                self._publish_all(keep=1)
        wanted = self._publish_all(self._keep)
        self._usage.update(set(wanted), self._loader.verified)
        self._unload_old(wanted)
        self._transport.copies.remove_unused(
            self._transport.listed.values(),
            self._client.adapters_in_use,
            older_than=10 * self._retention.grace,
        )
        self._records.turn_done(wanted.keys())

    def _publish_all(self, keep: int) -> dict[str, set[str]]:
        """Make vLLM serve the newest `keep` steps of each run. Returns for each run the names of
        the steps that must stay loaded."""
        wanted: dict[str, set[str]] = {}
        # For each run that this call has published: the Unix time at which the run's checkpoints
        # had last changed.
        published: dict[str, float] = {}
        again = False  # whether the last load was for a run that was already in `published`
        while (changed := self._changes()).keys() - published.keys():
            loads = self._loader.loads
            for run in sorted(changed, key=lambda run: -max(changed[run], self._usage.last(run))):
                # After a load for a run in `published`, the next load must be for a run that is not
                # in `published`. Without this rule, the loop would never end if a run makes steps
                # faster than vLLM loads them.
                if published.get(run) == changed[run] or (again and run in published):
                    continue
                liveness.beat("publisher")
                is_again = run in published
                published[run] = changed[run]
                wanted[run] = self._try_to_publish(run, keep)
                if self._loader.loads > loads:
                    again = is_again
                    # The order of the runs is computed again after each load, because another run
                    # may have a new checkpoint.
                    break
        return wanted

    def _changes(self) -> dict[str, float]:
        """Run -> the Unix time at which the run's checkpoints last changed, for all runs that can
        be served."""
        changes: dict[str, float] = {}
        self._specs = {}
        for run in self._spool.runs.names():
            try:
                self._specs[run] = self._spool.runs.get(run)
                if self._specs[run].weights == self._weights:
                    changes[run] = self._spool.checkpoints.changed(run)
            except (TandemError, ValidationError, OSError) as error:
                self._log_change(run, f"run {run} can't be published: {error}")
        # vLLM has the merged weights of only one run. Other runs with merged weights were made
        # under an earlier deployment.
        if self._weights == "merged" and len(changes) > 1:
            run = max(changes, key=lambda run: self._specs[run].created)
            return {run: changes[run]}
        return changes

    def _try_to_publish(self, run: str, keep: int) -> set[str]:
        """Runs `_publish_run`. After an error, the run's loaded steps stay loaded, and the
        publisher continues with the other runs."""
        try:
            wanted = self._publish_run(self._specs[run], keep)
        except InferenceUnavailable:
            raise
        except (TandemError, ValidationError, OSError) as error:
            self._log_change(run, f"run {run} can't be published: {error}")
            return {name for name in self._transport.listed if run_of(name) == run}
        self._log_change(run, "")
        return wanted

    def _unload_old(self, wanted: Mapping[str, set[str]]) -> None:
        for name in [
            name
            for name, path in self._transport.listed.items()
            if self._is_of_deleted_run(name, path)
        ]:
            log.info("unloading", model=name, deleted=True)
            self._loader.unload(name, deleted=True)
        existing = {name for name in self._transport.listed if self._is_in_chain(name)}
        names = set().union(*wanted.values())
        for name in self._retention.expired(
            self._transport.listed, runs=wanted, wanted=names, existing=existing
        ):
            if self._records.unload(run_of(name), name):
                self._loader.unload(name)

    def _is_of_deleted_run(self, name: str, path: str) -> bool:
        """Whether a publisher loaded this name for a run that has been deleted. A run that can't be
        read does not count as deleted."""
        run = run_of(name)
        if run in self._specs or not is_run_name(run) or not self._transport.copies.has(path):
            return False
        try:
            self._spool.check()  # if the volume is missing, every run looks deleted
            self._spool.runs.directory(run)
        except NotFound:
            return True
        except (TandemError, OSError):
            pass
        return False

    def _is_in_chain(self, name: str) -> bool:
        """Whether the step is in its run's chain of checkpoints. A step whose checkpoint was
        removed because of its age also counts as in the chain. A step that a rollback discarded
        does not count as in the chain."""
        run = run_of(name)
        try:
            return run in self._specs and int(
                name.rpartition("@")[2]
            ) <= self._spool.checkpoints.newest(run)
        except (TandemError, OSError):  # the run was deleted meanwhile
            return True

    def _withdraw_records(self) -> bool:
        """Remove the records of steps that vLLM does not list, for example after a restart of vLLM.
        Returns False if the records can't be removed."""
        try:
            self._spool.check()
            self._records.withdraw(self._transport.listed)
        except (TandemError, OSError) as error:
            self._log_change("records", f"can't remove the records of what vLLM served: {error}")
            return False
        self._log_change("records", "")
        return True

    def _publish_run(self, run: RunSpec, keep: int) -> set[str]:
        """Make vLLM serve the newest `keep` good steps of a run. Returns the names of the steps
        that must stay loaded."""
        wanted = self._records.keep(run.name)
        kept: list[Served] = []  # The newest step is first.
        # The newest refused step, if this step is newer than all steps in `kept`.
        refused: Refused | None = None
        # If steps are refused, older steps are tried, but one call loads at most `keep + 2` steps.
        # If no step can be served, the next call tries even older steps: refused steps are
        # remembered and not loaded again.
        most_steps, most_loads = keep + 2, self._loader.loads + keep + 2
        invisible = ""
        for looked, step in enumerate(reversed(self._spool.checkpoints.steps(run.name))):
            enough = looked >= most_steps and (
                kept or self._served(run.name) or self._loader.loads >= most_loads
            )
            if len(kept) == keep or enough:
                break
            name = f"{run.name}@{step}"
            try:
                served = self._loader.serve(run, step, name)
            except CheckpointNotVisible as error:
                invisible = str(error)
                continue
            except CheckpointRefused as error:
                if not kept and refused is None:
                    refused = Refused(step=step, reason=str(error))
                continue
            wanted.add(name)
            kept.append(served.record)
            # The record of served steps is written before older steps are loaded, because clients
            # wait for this record.
            self._records.put(run.name, self._serves(run.name, kept), refused)
            self._records.tell(run.name, served)
        if not kept and refused is not None:
            before = [record] if (record := self._served(run.name)) is not None else []
            wanted |= {record.model for record in before}
            self._records.put(run.name, before, refused)
        self._log_change(f"{run.name} is not visible", invisible)
        if self._weights == "adapter":
            wanted |= self._serve_wanted(run)
        return wanted

    def _serve_wanted(self, run: RunSpec) -> set[str]:
        """Load the older steps that clients sample. Returns the names of the loaded steps."""
        loaded = set()
        existing = {*self._spool.checkpoints.steps(run.name)}
        for step in existing.intersection(self._spool.served.wanted(run.name)):
            name = f"{run.name}@{step}"
            with suppress(CheckpointRefused, CheckpointNotVisible):
                self._loader.serve(run, step, name)
                loaded.add(name)
        return loaded

    def _serves(self, run: str, kept: list[Served]) -> list[Served]:
        """The steps that vLLM serves: the steps in `kept`, followed by older steps that are still
        loaded."""
        return kept + [old for old in self._loader.serving(run) if old.step < kept[-1].step]

    def _served(self, run: str) -> Served | None:
        """The record of the run's newest served step; None if a rollback discarded this step."""
        record = self._records.served(run)
        if record is not None:
            try:
                if (
                    self._spool.checkpoints.manifest(run, record.step).weights_sha256
                    != record.checkpoint
                ):
                    return None
            except NotFound:
                return None
            except CheckpointDamaged:
                pass
        return record

    def _log_change(
        self, topic: str, trouble: str, write: Callable[[str], None] = log.warning
    ) -> None:
        """Log a problem when it begins or changes, and once more when it has ended (`trouble` is
        empty)."""
        before = self._troubles.pop(topic, "")
        if trouble:
            self._troubles[topic] = trouble
            if trouble != before:
                write(trouble)
        elif before:
            log.info(f"over: {before}")
