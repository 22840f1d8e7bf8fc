"""Which step of each run was made and which is served, from the volume alone: checkpoints, served.json, events."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from tandem.errors import NotFound
from tandem.metrics.catalogue import PUBLISH_STAGES, CollectorName, Exporter
from tandem.metrics.collector import Collector, PartlyFailed, each
from tandem.metrics.samples import Gauges
from tandem.spool import Spool
from tandem.spool.schema import Served

RUNS = 20
"""Of so many runs, those that changed last, the policy is told: a label must not grow without bound."""


class PolicyCollector(Collector):
    """`sides`: trainer for what was made, inference for what is served."""

    name: ClassVar[CollectorName] = "policy"

    def __init__(self, spool: Callable[[], Spool], sides: tuple[Exporter, ...]) -> None:
        super().__init__()
        self._spool = spool
        self._sides = sides
        self._served: dict[str, bool] = {}  # whether a run is one that is served at all; that never changes

    def collect(self, gauges: Gauges) -> None:
        spool = self._spool()
        changed: dict[str, float] = {}
        troubles = each(spool.runs.names(), lambda run: self._look(spool, changed, run))
        latest = sorted(changed, key=lambda run: (-changed[run], run))[:RUNS]
        troubles += each(latest, lambda run: self._tell(spool, gauges, run))
        if troubles:
            raise PartlyFailed(*troubles)

    def _look(self, spool: Spool, changed: dict[str, float], run: str) -> None:
        if run not in self._served:
            self._served[run] = spool.runs.get(run).weights == "lora"
        if self._served[run]:
            changed[run] = max(spool.checkpoints.changed(run), spool.served.changed(run) or 0.0)

    def _tell(self, spool: Spool, gauges: Gauges, run: str) -> None:
        if "trainer" in self._sides:
            gauges.set("tandem_policy_version", spool.checkpoints.newest(run), side="trainer", run=run)
        served = spool.served.get(run)
        if served is not None and "inference" in self._sides:
            gauges.set("tandem_policy_version", served.step, side="inference", run=run)
            gauges.set("tandem_policy_refused", float(served.refused_step is not None), run=run)


class CheckpointsCollector(Collector):
    name: ClassVar[CollectorName] = "checkpoints"

    def __init__(self, spool: Callable[[], Spool]) -> None:
        super().__init__()
        self._spool = spool
        self._known: dict[str, int] = {}  # run -> its newest step when we looked
        self._last: tuple[float, int] | None = None  # Unix seconds and bytes of the newest checkpoint of all

    def collect(self, gauges: Gauges) -> None:
        spool = self._spool()
        troubles = each(spool.runs.names(), lambda run: self._look(spool, run))
        if self._last is not None:
            gauges.set("tandem_checkpoint_last_success_timestamp_seconds", self._last[0])
            gauges.set("tandem_checkpoint_size_bytes", self._last[1])
        if troubles:
            raise PartlyFailed(*troubles)

    def _look(self, spool: Spool, run: str) -> None:
        newest = spool.checkpoints.newest(run)
        if self._known.get(run) == newest:
            return
        manifest = spool.checkpoints.manifest(run, newest)
        self._known[run] = newest
        if manifest.job is not None:  # not a run's first checkpoint, which nobody trained
            size = sum(entry.size for entry in manifest.files.values())
            self._last = max(self._last or (0.0, 0), (manifest.created, size))


class PublishCollector(Collector):
    """Counts what was served and refused from the exporter's start on."""

    name: ClassVar[CollectorName] = "publish"
    interval = 2.0

    def __init__(self, spool: Callable[[], Spool]) -> None:
        super().__init__()
        self._spool = spool
        self._known: dict[str, tuple[float, Served | None]] = {}  # run -> when its record was written, and the record
        self._untold: dict[str, int] = {}  # job -> times we looked for its event `served`, which follows the record
        self._error: tuple[float, float] | None = None  # when the last verification was, and its nats
        self._caught_up = False

    def collect(self, gauges: Gauges) -> None:
        spool = self._spool()
        troubles = each(spool.runs.names(), lambda run: self._look(spool, run))
        self._caught_up = True
        troubles += each(list(self._untold), lambda job: self._stages(spool, job))
        if self._error is not None:
            gauges.set("tandem_publish_logprob_error_nats", self._error[1])
        if troubles:
            raise PartlyFailed(*troubles)

    def _look(self, spool: Spool, run: str) -> None:
        written = spool.served.changed(run)
        before = self._known.get(run, (0.0, None))
        if written is None or written == before[0]:
            return
        record = spool.served.get(run)
        if record is None:
            return
        self._known[run] = written, record
        self._error = max(self._error or (0.0, 0.0), (record.verified, record.mean_abs_logprob_error))
        if self._caught_up:
            self._count(spool, run, before[1], record)

    def _count(self, spool: Spool, run: str, before: Served | None, record: Served) -> None:
        if record.refused_step is not None and (before is None or before.refused_step != record.refused_step):
            self.counts.inc("tandem_publish_total", outcome="refused")
        if before is not None and before.step == record.step:
            return
        # Between two looks more than one step may have been served; after a rollback it is an older one.
        first = record.step if before is None or before.step > record.step else before.step + 1
        for step in range(first, record.step + 1):
            try:
                job = spool.checkpoints.manifest(run, step).job
            except NotFound:
                continue
            if step == record.step or (job is not None and self._was_served(spool, job)):
                self.counts.inc("tandem_publish_total", outcome="served")
                if job is not None:
                    self._untold[job] = 0

    def _was_served(self, spool: Spool, job: str) -> bool:
        return any(event.type == "served" for event in spool.events.read(job))

    def _stages(self, spool: Spool, job: str) -> None:
        for event in spool.events.read(job):
            if event.type == "served":
                seconds = event.data.get("seconds") or {}
                for stage in PUBLISH_STAGES:
                    if stage in seconds:
                        self.counts.observe("tandem_publish_duration_seconds", float(seconds[stage]), stage=stage)
                del self._untold[job]
                return
        self._untold[job] += 1
        if self._untold[job] > 30:  # the publisher died between the two
            del self._untold[job]
