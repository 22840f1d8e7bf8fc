"""The ranks of the running job, from the heartbeats that they leave in the attempt's work directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from tandem.metrics.catalogue import PHASE_MEMORY, PHASES, STALE_SECONDS, CollectorName
from tandem.metrics.collector import Collector
from tandem.metrics.samples import Gauges
from tandem.spool import Spool
from tandem.spool.schema import Beat, Job

_BYTES = ("allocated", "reserved", "active", "inactive_split", "requested")
_COUNTED = {
    "alloc_retries": "tandem_torch_memory_alloc_retries_total",
    "ooms": "tandem_torch_memory_ooms_total",
    "device_allocs": "tandem_torch_device_allocs_total",
    "device_frees": "tandem_torch_device_frees_total",
}


@dataclass
class _Heard:
    """The last beat of a rank, and when this process first saw it: the rank's clock may be off."""

    beat: Beat
    at: float  # monotonic


@dataclass
class _Attempt:
    job: Job
    number: int
    since: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)
    ranks: dict[int, _Heard] = field(default_factory=dict)


class RanksCollector(Collector):
    """`ranks`: how many there are to be in an attempt."""

    name: ClassVar[CollectorName] = "ranks"
    interval = 2.0

    def __init__(self, spool: Callable[[], Spool], ranks: int) -> None:
        super().__init__()
        self._spool = spool
        self._expected = ranks
        self._attempt: _Attempt | None = None

    def collect(self, gauges: Gauges) -> None:
        spool = self._spool()
        attempt = self._attempt = self._current(spool)
        gauges.set("tandem_train_active", float(attempt is not None))
        if attempt is None:
            return
        spec = attempt.job.spec
        gauges.set("tandem_job_info", 1, job_id=spec.id, run=spec.run, kind=spec.kind)
        now = time.monotonic()
        for rank, beat in spool.jobs.beats(spec.id, attempt.number).items():
            heard = attempt.ranks.get(rank)
            if heard is None or heard.beat != beat:
                self._count(str(rank), heard.beat if heard else None, beat)
                attempt.ranks[rank] = _Heard(beat, now)
        for rank, heard in attempt.ranks.items():
            self._tell(gauges, str(rank), heard.beat, fresh=now - heard.at <= STALE_SECONDS)
        for rank in set(range(self._expected)) - set(attempt.ranks):
            if now - attempt.began > STALE_SECONDS:
                gauges.set("tandem_rank_up", 0, rank=str(rank))
        progress = [heard.beat.time for heard in attempt.ranks.values()]
        silent = len(progress) < self._expected
        gauges.set("tandem_job_last_progress_timestamp_seconds", attempt.since if silent else min(progress))

    def _current(self, spool: Spool) -> _Attempt | None:
        """The attempt that runs now. A spool has one runner, which runs one job at a time."""
        for job_id in spool.jobs.ids("running"):
            lease = spool.leases.get(job_id)
            if lease is None:
                continue
            known = self._attempt
            if known is not None and (known.job.spec.id, known.number) == (job_id, lease.attempt):
                return known
            state, job = spool.jobs.get(job_id)
            if state == "running":
                return _Attempt(job, lease.attempt)
        return None

    def _tell(self, gauges: Gauges, rank: str, beat: Beat, *, fresh: bool) -> None:
        gauges.set("tandem_rank_up", float(fresh), rank=rank)
        gauges.set("tandem_train_rank_step", beat.step, rank=rank)
        if rank == "0":
            gauges.set("tandem_train_step", beat.step)
            if beat.steps:
                gauges.set("tandem_train_steps", beat.steps)
        if not fresh or beat.uuid is None:
            return  # what a silent rank held a minute ago says nothing about now
        where = {"uuid": beat.uuid, "rank": rank}
        for kind in _BYTES:
            for key in (kind, f"{kind}_peak"):
                if key in beat.memory:
                    gauges.set(f"tandem_torch_memory_{key}_bytes", beat.memory[key], **where)
        for phase in PHASES:
            for kind in PHASE_MEMORY:
                if kind in (told := beat.phases.get(phase, {})):
                    gauges.set(f"tandem_torch_memory_phase_{kind}_bytes", told[kind], **where, phase=phase)
        if beat.step_floor is not None:
            gauges.set("tandem_torch_memory_step_floor_bytes", beat.step_floor, **where)
        if "host_pinned" in beat.memory:
            gauges.set("tandem_torch_host_pinned_bytes", beat.memory["host_pinned"], rank=rank)

    def _count(self, rank: str, before: Beat | None, beat: Beat) -> None:
        """A rank's process counts from 0 in each attempt; what is told here goes on from attempt to attempt."""
        for key, name in _COUNTED.items():
            if key in beat.memory and beat.uuid is not None:
                earlier = 0 if before is None else before.memory.get(key, 0)
                self.counts.inc(name, max(beat.memory[key] - earlier, 0), uuid=beat.uuid, rank=rank)
