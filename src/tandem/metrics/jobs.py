"""Jobs, from their events: counted from the exporter's start on, each once, and read as they grow.

Finished jobs cost nothing: only the jobs that are pending are looked at, and the directories of the finished ones are
listed when they have changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from tandem.metrics.catalogue import ERRORS, PHASES, CollectorName
from tandem.metrics.collector import Collector, PartlyFailed, each
from tandem.metrics.samples import Gauges
from tandem.spool import Spool
from tandem.spool.schema import PENDING, TERMINAL, Event, JobState
from tandem.system.gpus import beyond

# What is told of the last optimizer step, and the step's own name for it.
_LAST_STEP = {
    "tandem_train_loss": "loss",
    "tandem_train_grad_norm": "grad_norm",
    "tandem_train_learning_rate": "learning_rate",
    "tandem_train_entropy": "entropy",
    "tandem_train_kl": "kl_reference",
    "tandem_train_kl_sampler": "kl_sampler",
    "tandem_train_logprob_mismatch": "sampler_logprob_difference",
    "tandem_train_clip_ratio": "clip_fraction",
    "tandem_train_importance_ratio_max": "ratio_max",
    "tandem_train_reward_mean": "reward_mean",
    "tandem_train_reward_std": "reward_std",
}
_TOTALS = {
    "tandem_train_tokens_total": "tokens",
    "tandem_train_trainable_tokens_total": "trainable_tokens",
    "tandem_train_samples_total": "trajectories",
}
_LAST_STEP_AT = "tandem_train_last_step_timestamp_seconds"


@dataclass
class _Job:
    kind: str
    created: float
    offset: int = 0  # into its events
    claimed: float | None = None  # first


class JobsCollector(Collector):
    name: ClassVar[CollectorName] = "jobs"
    interval = 2.0

    def __init__(self, spool: Callable[[], Spool]) -> None:
        super().__init__()
        self._spool = spool
        self._followed: dict[str, _Job] = {}
        self._done: set[str] = set()  # ids of jobs that ended before this process, or were followed to their end
        self._looked: dict[JobState, int] = {}  # mtimes of the finished jobs' directories when they were listed
        self._caught_up = False
        self._last: dict[str, float] = {}
        self._devices: dict[str, dict[str, float]] = {}

    def collect(self, gauges: Gauges) -> None:
        spool = self._spool()
        troubles = each(self._new(spool), lambda job_id: self._follow(spool, job_id))
        for job_id, followed in list(self._followed.items()):
            # What happened before this process was there sets gauges, but is not counted.
            if self._advance(spool, job_id, followed, counts=self._caught_up):
                del self._followed[job_id]
                self._done.add(job_id)
        self._caught_up = True
        for name, value in self._last.items():
            gauges.set(name, value)
        for name, values in self._devices.items():
            for uuid, value in values.items():
                gauges.set(name, value, uuid=uuid)
        if troubles:
            raise PartlyFailed(*troubles)

    def _new(self, spool: Spool) -> list[str]:
        """Jobs not met before: pending ones, and those that came and ended between two looks."""
        # Pending ones first: a job that ends meanwhile is met in one of the two.
        found = {job_id for state in PENDING for job_id in spool.jobs.ids(state)}
        for state in TERMINAL:
            stamp = spool.paths.state_dir(state).stat().st_mtime_ns
            if self._looked.get(state) != stamp:
                ids = set(spool.jobs.ids(state))
                self._looked[state] = stamp
                if self._caught_up:
                    found |= ids
                else:
                    self._done |= ids
        return sorted(found - self._done - self._followed.keys())

    def _follow(self, spool: Spool, job_id: str) -> None:
        _, job = spool.jobs.get(job_id)
        self._followed[job_id] = _Job(job.spec.kind, job.spec.created)

    def _advance(self, spool: Spool, job_id: str, job: _Job, *, counts: bool) -> bool:
        """Take in the events that are new; True when the job has ended."""
        events, job.offset = spool.events.since(job_id, job.offset)
        ended = False
        for event in events:
            self._set(event)
            if counts:
                self._count(event, job)
            if event.type == "claimed" and job.claimed is None:
                job.claimed = event.time
            ended = ended or event.type in TERMINAL
        return ended

    def _set(self, event: Event) -> None:
        """Gauges: of the last step, checkpoint and release."""
        data = event.data
        if event.type == "step":
            self._last[_LAST_STEP_AT] = event.time
            for name, key in _LAST_STEP.items():
                self._last.pop(name, None)
                if (value := _number(data.get("metrics"), key)) is not None:
                    self._last[name] = value
        elif event.type == "checkpoint" and (seconds := _number(data, "seconds")) is not None:
            self._last["tandem_checkpoint_duration_seconds"] = seconds
        elif event.type == "released":
            before, left, floor = (data.get(key) or {} for key in ("before", "devices", "floor"))
            resident = {uuid: size for uuid, size in (data.get("resident") or {}).items() if size is not None}
            self._devices["tandem_job_gpu_resident_bytes"] = resident
            # Not left by the job: what was in use beside it, by a vLLM that sleeps, and what ranks keep that stay.
            before, left = beyond(before, floor), beyond(beyond(left, floor), resident)
            self._devices["tandem_job_gpu_left_bytes"] = {uuid: size for uuid, size in left.items() if size is not None}
            self._devices["tandem_job_gpu_released_bytes"] = {
                uuid: max((size or 0) - (left[uuid] or 0), 0)
                for uuid, size in before.items()
                if left.get(uuid) is not None
            }
        if event.type in (*TERMINAL, "requeued", "claimed"):
            self._last.pop(_LAST_STEP_AT, None)

    def _count(self, event: Event, job: _Job) -> None:
        counts, data = self.counts, event.data
        if event.type == "claimed" and job.claimed is None:
            counts.observe("tandem_job_queue_wait_seconds", max(event.time - job.created, 0.0), kind=job.kind)
        elif event.type == "loaded":
            self._phases(data.get("seconds"), "")
        elif event.type == "step":
            metrics = data.get("metrics")
            self._phases(metrics, "seconds_")
            parts = [_number(metrics, f"seconds_{name}") or 0.0 for name in ("forward_backward", "optimizer")]
            counts.observe("tandem_train_step_duration_seconds", sum(parts))
            for name, key in _TOTALS.items():
                counts.inc(name, _number(metrics, key) or 0.0)
        elif event.type == "checkpoint":
            self._phases({"checkpoint": data.get("seconds")}, "")
        elif event.type == "released" and (seconds := _number(data, "seconds")) is not None:
            counts.observe("tandem_job_release_seconds", seconds)
        if event.type in ("requeued", "failed"):
            error = (data.get("error") or {}).get("type", "other")
            counts.inc("tandem_job_attempts_failed_total", error=error if error in ERRORS else "other")
        if event.type in TERMINAL:
            counts.inc("tandem_jobs_finished_total", outcome=event.type)
            if job.claimed is not None:
                counts.observe("tandem_job_duration_seconds", max(event.time - job.claimed, 0.0), kind=job.kind)

    def _phases(self, values: object, prefix: str) -> None:
        for phase in PHASES:
            if (seconds := _number(values, f"{prefix}{phase}")) is not None:
                self.counts.observe("tandem_train_phase_duration_seconds", seconds, phase=phase)


def _number(values: Any, key: str) -> float | None:
    """`values[key]` where that is a number; events hold null for what was not finite."""
    value = values.get(key) if isinstance(values, dict) else None
    return float(value) if isinstance(value, int | float) else None
