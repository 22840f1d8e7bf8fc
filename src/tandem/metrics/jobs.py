"""Collects metrics of jobs from the jobs' events. Each event is counted once. Counters count only
events that are written after the exporter's start.

The cost of a collection does not grow with the number of queued or finished jobs. The collector
reads only jobs that have begun. It ignores the jobs that ended before the exporter's start, except
the last one. A directory of finished jobs is listed again only after the directory has changed.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tandem.errors import NotFound
from tandem.metrics.collector import OpenSpool, SpoolCollector
from tandem.metrics.metric import JOB_KINDS, OPEN, PHASES, Metric, Samples, number
from tandem.spool import Spool
from tandem.spool.fence import LivingAttempts
from tandem.spool.paths import JobDir
from tandem.spool.schema import TERMINAL, Event
from tandem.system.gpus import beyond

ERRORS = (
    "oom",
    "rank_crashed",
    "rank_hung",
    "rank_error",
    "launch_failed",
    "no_checkpoint",
    "deadline",
    "non_finite",
    "runner_lost",
    "runner_stopped",
    "preempted",
    "host_lost",
    "job_deleted",
    "job_failed",
    "invalid_input",
    "conflict",
    "checkpoint_damaged",
    "base_missing",
    "spool_unusable",
    "hub_unreachable",
    "hosts_differ",
    "nothing_to_learn",
    "inference_unavailable",
    "gpus_not_freed",
    "job_damaged",
    "other",
)
"""Reasons why an attempt failed (docs/jobs.md); an error that is not listed counts as "other"."""

_STEP_BUCKETS = (0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
# To find the job that ended last, a new exporter reads this many jobs of each terminal state.
_MOST_ENDED = 20
_JOB_BUCKETS = (1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600)

# Key in the event `step` -> the name and the meaning of the gauge tandem_train_<name>.
_LAST_STEP = {
    "loss": ("loss", "Training loss"),
    "grad_norm": ("grad_norm", "Norm of the gradient before clipping"),
    "learning_rate": ("learning_rate", "Learning rate"),
    "entropy": ("entropy", "Mean entropy of the policy per token in nats"),
    "kl_reference": ("kl", "KL divergence from the reference in nats, if the job measures it"),
    "kl_sampler": ("kl_sampler", "KL divergence of the sampler from the trainer in nats (RL)"),
    "sampler_logprob_difference": (
        "logprob_mismatch",
        "Mean absolute difference between the trainer's and the sampler's log-probs in nats (RL)",
    ),
    "sampler_logprob_difference_fresh": (
        "logprob_mismatch_fresh",
        "Mean absolute difference between the trainer's and the sampler's log-probs in nats over "
        "tokens sampled by the job's base step (RL); absent without such tokens",
    ),
    "sampler_logprob_difference_stale": (
        "logprob_mismatch_stale",
        "Mean absolute difference between the trainer's and the sampler's log-probs in nats over "
        "tokens sampled before the job's base step (RL); absent without such tokens",
    ),
    "clip_fraction": ("clip_ratio", "Share of tokens whose importance ratio was clipped (RL)"),
    "ratio_max": ("importance_ratio_max", "Largest importance ratio of all trained tokens (RL)"),
    "reward_mean": ("reward_mean", "Mean reward of the trained trajectories (RL)"),
    "reward_std": ("reward_std", "Standard deviation of the trained trajectories' rewards (RL)"),
    "off_policy_steps_max": (
        "off_policy_steps",
        "Job's base step minus the oldest step that sampled one of the job's turns (RL)",
    ),
}
_HELD_OUT = "tandem_train_held_out_loss"
_LAST_STEP_AT = "tandem_train_last_step_timestamp_seconds"
# For each key in the event `step`, the name and the meaning of the counter that sums the values.
_TOTALS = {
    "tokens": (
        "tandem_train_tokens_total",
        "Tokens of the trained rows without padding; a shared prefix counts once.",
    ),
    "trainable_tokens": ("tandem_train_trainable_tokens_total", "Tokens that have a loss."),
    "trajectories": (
        "tandem_train_samples_total",
        "Trained trajectories (RL), examples (SFT) or answers (DPO, two per pair).",
    ),
}

_counter = partial(Metric, kind="counter")
_histogram = partial(Metric, kind="histogram")
METRICS = (
    Metric(
        _HELD_OUT,
        "Loss of the held-out examples of the last job that had held-out examples (SFT, DPO).",
        "event evaluated",
    ),
    Metric(
        _LAST_STEP_AT,
        "Unix time at which the running job last finished an optimizer step; absent before the "
        "attempt's first step, and without a running job.",
        "event step",
        labels={"run": OPEN},
    ),
    _histogram(
        "tandem_train_step_duration_seconds",
        "Seconds of a step's forward, backward and update on the slowest rank (sessions: rank 0).",
        "event step",
        buckets=_STEP_BUCKETS,
    ),
    _histogram(
        "tandem_train_phase_duration_seconds",
        "Seconds that each phase took: an optimizer step's phases on the slowest rank (in "
        "sessions, rank 0), other phases on rank 0.",
        "events loaded, step, checkpoint",
        labels={"phase": PHASES},
        buckets=_STEP_BUCKETS,
    ),
    *(_counter(name, text, "event step") for name, text in _TOTALS.values()),
    *(
        Metric(
            f"tandem_train_{name}",
            f"{text}. Value of the last optimizer step of any run, exported until the next step.",
            f"event step, {key}",
        )
        for key, (name, text) in _LAST_STEP.items()
    ),
    _counter(
        "tandem_jobs_finished_total",
        "Jobs that ended, by outcome.",
        "events succeeded, failed, cancelled",
        labels={"outcome": ("succeeded", "failed", "cancelled")},
    ),
    _counter(
        "tandem_job_attempts_failed_total",
        "Attempts that failed or were put back into the queue, by the error type of docs/jobs.md; "
        "cancelled attempts are not counted.",
        "events requeued, failed",
        labels={"error": ERRORS},
    ),
    _histogram(
        "tandem_job_queue_wait_seconds",
        "Seconds from a job's submission until a runner first claims the job.",
        "event claimed",
        labels={"kind": JOB_KINDS},
        buckets=_JOB_BUCKETS,
    ),
    _histogram(
        "tandem_job_duration_seconds",
        "Seconds from a runner's first claim of a job to the job's end.",
        "terminal events",
        labels={"kind": JOB_KINDS},
        buckets=_JOB_BUCKETS,
    ),
    Metric(
        "tandem_job_gpu_released_bytes",
        "Device memory in bytes that the last attempt freed: the peak during the attempt minus "
        "the memory left in use.",
        "event released",
        labels={"uuid": OPEN},
    ),
    Metric(
        "tandem_job_gpu_left_bytes",
        "Device memory in bytes still in use after the last attempt, without the memory of "
        "resident ranks and of a sleeping vLLM.",
        "event released",
        labels={"uuid": OPEN},
    ),
    Metric(
        "tandem_job_gpu_resident_bytes",
        "Device memory in bytes that resident ranks (TANDEM_LAUNCH=resident) keep between jobs; "
        "absent without resident ranks.",
        "event released",
        labels={"uuid": OPEN},
    ),
    _histogram(
        "tandem_job_release_seconds",
        "Seconds from the end of an attempt's last rank until the memory of its devices is free.",
        "event released",
        buckets=(0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20),
    ),
    Metric(
        "tandem_checkpoint_duration_seconds",
        "Seconds that it took to write, hash and commit the last checkpoint.",
        "event checkpoint",
    ),
)


@dataclass
class _Followed:
    kind: str
    run: str
    created: float  # Unix seconds
    offset: int = 0  # bytes of the job's event file that have been read
    attempts: LivingAttempts = field(default_factory=LivingAttempts)
    first_claimed: float | None = None  # Unix seconds
    # whether the terminal event, which is written before the job's directory moves, was read
    ended: bool = False


class JobsCollector(SpoolCollector):
    name = "jobs"
    metrics = METRICS
    interval = 2.0

    def __init__(self, open_spool: OpenSpool) -> None:
        super().__init__(open_spool)
        self._followed: dict[str, _Followed] = {}
        # The ids of jobs that could not be read yet.
        self._unread: set[str] = set()
        # The last listing of each directory of ended jobs.
        self._listed: dict[Path, tuple[JobDir, ...]] = {}
        self._caught_up = False
        # Events from before the exporter's start set only gauges. Their counts go here, unused.
        self._uncounted = Samples(self.metrics)
        self._last: dict[str, float] = {}  # gauges without labels
        # run -> time of the last step of its running job, Unix seconds
        self._last_step_at: dict[str, float] = {}
        self._per_device: dict[str, dict[str, float]] = {}  # gauge -> UUID -> bytes

    def collect(self, gauges: Samples) -> None:
        spool = self.spool()
        if not self._caught_up:
            self.try_each(self._begun(spool), lambda job_id: self._follow(spool, job_id))
        found = self._find(spool)
        # An ended job stays in `_followed` until its directory moves, so no job is counted twice.
        self._followed = {
            known: job for known, job in self._followed.items() if known in found or not job.ended
        }
        self._unread = found - self._followed.keys()
        self.try_each(sorted(self._unread), lambda job_id: self._follow(spool, job_id))
        self.try_each(list(self._followed), lambda job_id: self._read_job(spool, job_id))
        self._caught_up = True
        for name, value in self._last.items():
            gauges.set(name, value)
        for run, at in self._last_step_at.items():
            gauges.set(_LAST_STEP_AT, at, run=run)
        for name, values in self._per_device.items():
            for uuid, value in values.items():
                gauges.set(name, value, uuid=uuid)

    def _begun(self, spool: Spool) -> list[str]:
        """Ids of jobs whose attempts began before this process: the job that ended last, requeued
        jobs, and running jobs. Running jobs come last, so that the gauges have the running jobs'
        values. `_find` lists the running jobs again, because a requeued job may have been claimed
        meanwhile."""
        running = [key.id for key in spool.jobs.index.running()]
        requeued = []
        for head in spool.jobs.index.heads():
            with suppress(NotFound):
                if spool.jobs.get(head.id)[1].attempt:
                    requeued.append(head.id)
        return list(dict.fromkeys([*_last_ended(spool), *requeued, *running]))

    def _find(self, spool: Spool) -> set[str]:
        """Ids of running jobs, of jobs that ended since the last collection, and of jobs that the
        last collection could not read."""
        index = spool.jobs.index
        # The list of running jobs is read before the list of ended jobs, so a job that ends between
        # the two reads is in at least one of the lists.
        found = self._unread | {key.id for key in index.running()}
        listed = index.ended()
        for directory, ended in listed.items() if self._caught_up else ():
            if (before := self._listed.get(directory, ())) is not ended:
                found |= {entry.key.id for entry in set(ended).difference(before)}
        self._listed = listed
        return found

    def _follow(self, spool: Spool, job_id: str) -> None:
        with suppress(NotFound):  # the job's record was damaged and has been set aside
            spec = spool.jobs.get(job_id)[1].spec
            self._followed[job_id] = _Followed(spec.kind, spec.run, spec.created)
        self._unread.discard(job_id)

    def _read_job(self, spool: Spool, job_id: str) -> None:
        job = self._followed[job_id]
        if not job.ended:
            events, job.offset, _ = spool.events.since(job_id, job.offset)
            job.ended = any(event.type in TERMINAL for event in events)
            self.try_each(events, lambda event: self._read_event(event, job))

    def _read_event(self, event: Event, job: _Followed) -> None:
        counts, data = self.counts if self._caught_up else self._uncounted, event.data
        if not job.attempts.admits(event):
            return
        if event.type in (*TERMINAL, "requeued", "claimed"):
            self._last_step_at.pop(job.run, None)
        if event.type == "claimed" and job.first_claimed is None:
            job.first_claimed = event.time
            counts.observe(
                "tandem_job_queue_wait_seconds", max(event.time - job.created, 0.0), kind=job.kind
            )
        elif event.type == "loaded":
            _count_phases(counts, data.get("seconds"))
        elif event.type == "step":
            self._last_step_at[job.run] = event.time
            self._read_step(data.get("metrics"), counts)
        elif event.type == "evaluated":
            _count_phases(counts, data.get("seconds"))
            if (loss := number(data.get("metrics"), "held_out_loss")) is not None:
                self._last[_HELD_OUT] = loss
        elif event.type == "checkpoint" and (seconds := number(data, "seconds")) is not None:
            self._last["tandem_checkpoint_duration_seconds"] = seconds
            _count_phases(counts, {"checkpoint": seconds})
        elif event.type == "released":
            self._per_device = _device_memory(data)
            if (seconds := number(data, "seconds")) is not None:
                counts.observe("tandem_job_release_seconds", seconds)
        if event.type in ("requeued", "failed"):
            error = data.get("error")
            kind = error.get("type") if isinstance(error, dict) else None
            counts.inc(
                "tandem_job_attempts_failed_total", error=kind if kind in ERRORS else "other"
            )
        if event.type in TERMINAL:
            counts.inc("tandem_jobs_finished_total", outcome=event.type)
            if job.first_claimed is not None:
                seconds = max(event.time - job.first_claimed, 0.0)
                counts.observe("tandem_job_duration_seconds", seconds, kind=job.kind)

    def _read_step(self, metrics: object, counts: Samples) -> None:
        for key, (name, _) in _LAST_STEP.items():
            self._last.pop(f"tandem_train_{name}", None)
            if (value := number(metrics, key)) is not None:
                self._last[f"tandem_train_{name}"] = value
        _count_phases(counts, metrics, prefix="seconds_")
        parts = [
            number(metrics, f"seconds_{name}") or 0.0 for name in ("forward_backward", "optimizer")
        ]
        counts.observe("tandem_train_step_duration_seconds", sum(parts))
        for key, (name, _) in _TOTALS.items():
            counts.inc(name, number(metrics, key) or 0.0)


def _last_ended(spool: Spool) -> list[str]:
    """A list with one element, the id of the last job that ended after an attempt. The list is
    empty if no such job has ended since the newest runner's start. Jobs of earlier runners have
    left no memory on the devices, because resident ranks end with their runner."""
    ended = list[tuple[float, str]]()
    runner = spool.runner()
    for key in (
        key
        for state in TERMINAL
        for key in islice(spool.jobs.index.newest_first(state), _MOST_ENDED)
    ):
        with suppress(NotFound):
            _, job = spool.jobs.get(key.id)
            if (
                job.attempt
                and job.result
                and (runner is None or job.result.finished >= runner.since)
            ):
                ended.append((job.result.finished, key.id))
    return [job_id for _, job_id in sorted(ended)[-1:]]


def _count_phases(counts: Samples, values: object, prefix: str = "") -> None:
    for phase in PHASES:
        if (seconds := number(values, f"{prefix}{phase}")) is not None:
            counts.observe("tandem_train_phase_duration_seconds", seconds, phase=phase)


def _device_memory(released: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The bytes for each gauge and each GPU's UUID, computed from the data of an event `released`.
    If the event has None as a size, the size could not be measured."""
    before, left, floor, kept = (
        released.get(key) or {} for key in ("before", "devices", "floor", "resident")
    )
    resident = {uuid: size for uuid, size in kept.items() if size is not None}
    # A sleeping vLLM keeps the memory below the floor, and resident ranks keep other memory. The
    # job has left neither of them behind.
    before, left = beyond(before, floor), beyond(beyond(left, floor), resident)
    measured = {uuid: size for uuid, size in left.items() if size is not None}
    given_back = {
        uuid: max((size or 0) - measured[uuid], 0)
        for uuid, size in before.items()
        if uuid in measured
    }
    return {
        "tandem_job_gpu_resident_bytes": resident,
        "tandem_job_gpu_left_bytes": measured,
        "tandem_job_gpu_released_bytes": given_back,
    }
