"""Collects metrics of the ranks of running jobs, from the heartbeats that ranks write to the
attempt's work directory, and from the requests of sessions."""

import time
from dataclasses import dataclass, field
from functools import partial

from tandem.metrics.collector import OpenSpool, SpoolCollector
from tandem.metrics.metric import JOB_KINDS, OPEN, PHASES, STALE_SECONDS, Metric, Samples
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.spool.schema import Beat, Job

_CPU = "; on the CPU, the process's resident set size"
_RUN = {"run": OPEN}  # a run has at most one running job
_RANK = _RUN | {"rank": OPEN}
_RANK_AND_GPU = {"uuid": OPEN, "rank": OPEN}

# The keys of the following three dictionaries are keys of a heartbeat's `memory` or `phases`.
# `tandem memory` shows the other values of a heartbeat. A heartbeat's other values are not
# exported, because no alert needs them, and each would add a series per rank.
_ALLOCATOR_BYTES = {
    "allocated": (
        f"Bytes in tensors, according to torch's allocator{_CPU}.",
        "allocated_bytes.all.current",
    ),
    "allocated_peak": (
        f"Largest number of bytes in tensors since the attempt began{_CPU}.",
        "allocated_bytes.all.peak",
    ),
    "reserved": (
        f"Bytes that torch holds on the device, in use or cached{_CPU}.",
        "reserved_bytes.all.current",
    ),
    "reserved_peak": (
        f"Largest number of bytes that torch held on the device since the attempt began{_CPU}.",
        "reserved_bytes.all.peak",
    ),
    "inactive_split": (
        "Free bytes that torch's allocator can't return to the device, because other parts of "
        "their blocks are in use; absent on the CPU.",
        "inactive_split_bytes.all.current",
    ),
}
_ALLOCATOR_COUNTS = {
    "alloc_retries": (
        "tandem_torch_memory_alloc_retries_total",
        "num_alloc_retries",
        "Allocations that torch's allocator tried again after it had emptied its cache.",
    ),
    "ooms": (
        "tandem_torch_memory_ooms_total",
        "num_ooms",
        "Allocations that failed because the device's memory was full.",
    ),
}
_PHASE_BYTES = {
    "allocated": (
        f"Bytes in tensors when the phase last ended{_CPU}.",
        "allocated_bytes.all.current",
    ),
    "device_used": (
        (
            "Bytes in use on the whole device by all processes when the phase last ended; on the "
            "CPU, the machine's memory in use."
        ),
        "cudaMemGetInfo",
    ),
    "peak": (
        f"Largest number of bytes in tensors during the phase's last execution{_CPU}.",
        "allocated_bytes.all.peak, reset as each phase begins",
    ),
}

_measured = partial(Metric, labels=_RANK_AND_GPU, perishable=True)
METRICS = (
    _measured(
        "tandem_rank_up",
        f"1 if the rank's heartbeat changed within the last {STALE_SECONDS:.0f} s, else 0; absent "
        "without a running job.",
        "beat.<rank>",
        labels=_RANK,
    ),
    *(
        _measured(
            f"tandem_torch_memory_{key}_bytes",
            text,
            f"memory_stats {stat}",
        )
        for key, (text, stat) in _ALLOCATOR_BYTES.items()
    ),
    *(
        Metric(
            name,
            f"{text} Counts all attempts since the exporter's start; absent on the CPU.",
            f"memory_stats {stat}",
            "counter",
            labels=_RANK_AND_GPU,
        )
        for name, stat, text in _ALLOCATOR_COUNTS.values()
    ),
    *(
        _measured(
            f"tandem_torch_memory_phase_{key}_bytes",
            text,
            source,
            labels=_RANK_AND_GPU | {"phase": PHASES},
        )
        for key, (text, source) in _PHASE_BYTES.items()
    ),
    _measured(
        "tandem_torch_memory_step_floor_bytes",
        "Bytes in tensors right after zero_grad of the last optimizer step, constant unless memory "
        f"leaks{_CPU}.",
        "allocated_bytes.all.current",
    ),
    _measured(
        "tandem_torch_host_pinned_bytes",
        "Bytes of page-locked host memory that torch holds; absent on the CPU.",
        "torch.cuda.host_memory_stats",
        labels=_RANK,
    ),
    Metric("tandem_train_active", "1 while a job is running, else 0.", "jobs/active"),
    Metric(
        "tandem_train_step",
        "Optimizer steps that the running job has done; absent without a running job.",
        "beat.0",
        labels=_RUN,
    ),
    Metric(
        "tandem_train_steps",
        "Number of all optimizer steps of the running job, done and to be done; absent without a "
        "running job.",
        "beat.0",
        labels=_RUN,
    ),
    Metric(
        "tandem_train_rank_step",
        "Optimizer steps that each rank of the running job has done.",
        "beat.<rank>",
        labels=_RANK,
    ),
    Metric(
        "tandem_job_last_progress_timestamp_seconds",
        "Unix time of the oldest of the ranks' last heartbeats; until every rank has a heartbeat, "
        "the time when the attempt began or last waited. Absent without a running job.",
        "beat.<rank>",
        labels=_RUN,
    ),
    Metric(
        "tandem_job_waiting_seconds",
        "Seconds for which the running attempt has waited for a quota, nodes or hosts to start "
        "its ranks; absent once the ranks run. `tandem jobs` shows the reason.",
        "lease.json",
        labels=_RUN,
    ),
    Metric(
        "tandem_session_idle_seconds",
        "Seconds for which the ranks of a running session job have had no request, counted from "
        "the exporter's start at the earliest; 0 while a request waits or is computed. Absent "
        "without a running session job, and while the job waits for its ranks' start.",
        "requests/",
        labels=_RUN,
    ),
    Metric(
        "tandem_job_info",
        "1 for each running job; other jobs have no series.",
        "jobs/active",
        labels={"job_id": OPEN, "run": OPEN, "kind": JOB_KINDS},
    ),
)


@dataclass
class _AttemptSeries:
    job: Job
    number: int
    waited: float | None  # seconds that the attempt has waited; None if its ranks run
    seen_since: float = field(default_factory=time.time)
    seen_since_monotonic: float = field(default_factory=time.monotonic)
    # For each rank, the last heartbeat, and the monotonic time at which this process first saw this
    # heartbeat. A rank's silence is measured by the monotonic time, because the rank's clock may be
    # wrong.
    ranks: dict[int, tuple[Beat, float]] = field(default_factory=dict)
    # The number of a session's last request, and the monotonic time at which this process last saw
    # a new, waiting or running request. Other jobs have no requests.
    last_request: int = 0
    requested_at: float = field(default_factory=time.monotonic)

    def waits(self, seconds: float | None) -> None:
        """Records for how many seconds the attempt has waited; `seconds` is None if the attempt's
        ranks run. While the attempt waits, no rank counts as silent."""
        self.waited = seconds
        if seconds is not None:
            self.seen_since, self.seen_since_monotonic = time.time(), time.monotonic()
            self.requested_at = self.seen_since_monotonic

    def idle(self, last_request: int, *, computing: bool) -> float:
        """Seconds for which the session's ranks have had no request.

        Args:
            last_request: the number of the run's last request; 0 if there is none.
            computing: whether a request waits or is being computed.
        """
        now = time.monotonic()
        # A request may arrive and be answered between two collections.
        if computing or last_request != self.last_request:
            self.last_request, self.requested_at = last_request, now
        return now - self.requested_at


class RanksCollector(SpoolCollector):
    """`ranks`: the number of ranks that an attempt starts."""

    name = "ranks"
    metrics = METRICS
    interval = 2.0

    def __init__(self, open_spool: OpenSpool, ranks: int) -> None:
        super().__init__(open_spool)
        self._expected = ranks
        self._attempts: list[_AttemptSeries] = []
        self._caught_up = False

    def collect(self, gauges: Samples) -> None:
        spool = self.spool()
        self._attempts = self._running_attempts(spool)
        gauges.set("tandem_train_active", float(bool(self._attempts)))
        self.try_each(self._attempts, lambda attempt: self._collect(spool, attempt, gauges))
        self._caught_up = True

    def _collect(self, spool: Spool, attempt: _AttemptSeries, gauges: Samples) -> None:
        spec = attempt.job.spec
        gauges.set("tandem_job_info", 1, job_id=spec.id, run=spec.run, kind=spec.kind)
        if attempt.waited is not None:
            gauges.set("tandem_job_waiting_seconds", attempt.waited, run=spec.run)
        now = time.monotonic()
        for rank, beat in Attempt(spool, spec.id, attempt.number).beats().items():
            last, _ = attempt.ranks.get(rank, (None, now))
            if last != beat:
                # Counts that a rank had before this process started are left out, because an
                # earlier exporter has counted them.
                self._count(str(rank), last if self._caught_up else beat, beat)
                attempt.ranks[rank] = beat, now
        for rank, (beat, seen_at) in attempt.ranks.items():
            _set_rank(gauges, spec.run, str(rank), beat, up=now - seen_at <= STALE_SECONDS)
        for rank in set(range(self._expected)) - set(attempt.ranks):
            if now - attempt.seen_since_monotonic > STALE_SECONDS:
                gauges.set("tandem_rank_up", 0, run=spec.run, rank=str(rank))
        beats = [beat.time for beat, _ in attempt.ranks.values()]
        progress = min(beats) if len(beats) >= self._expected else attempt.seen_since
        gauges.set("tandem_job_last_progress_timestamp_seconds", progress, run=spec.run)
        if spec.kind == "session" and attempt.waited is None:
            computing = spool.requests.next(spec.run) is not None
            idle = attempt.idle(spool.requests.last(spec.run), computing=computing)
            gauges.set("tandem_session_idle_seconds", idle, run=spec.run)

    def _running_attempts(self, spool: Spool) -> list[_AttemptSeries]:
        known = {(one.job.spec.id, one.number): one for one in self._attempts}
        found = []
        for job_id in (key.id for key in spool.jobs.index.running()):
            lease = spool.leases.get(job_id)
            if lease is None:
                continue
            if (one := known.get((job_id, lease.attempt))) is not None:
                one.waits(lease.waited)
                found.append(one)
                continue
            state, job = spool.jobs.get(job_id)
            if state == "running":
                found.append(_AttemptSeries(job, lease.attempt, lease.waited))
        return found

    def _count(self, rank: str, before: Beat | None, beat: Beat) -> None:
        """Continues the counters across attempts, because a rank's own counts begin at 0 in each
        attempt, even in a resident rank."""
        for key, (name, *_) in _ALLOCATOR_COUNTS.items():
            if key in beat.memory and beat.uuid is not None:
                earlier = 0 if before is None else before.memory.get(key, 0)
                self.counts.inc(name, max(beat.memory[key] - earlier, 0), uuid=beat.uuid, rank=rank)


def _set_rank(gauges: Samples, run: str, rank: str, beat: Beat, *, up: bool) -> None:
    gauges.set("tandem_rank_up", float(up), run=run, rank=rank)
    gauges.set("tandem_train_rank_step", beat.step, run=run, rank=rank)
    if rank == "0":
        gauges.set("tandem_train_step", beat.step, run=run)
        if beat.steps:
            gauges.set("tandem_train_steps", beat.steps, run=run)
    if not up or beat.uuid is None:
        return  # the memory values of a rank that was silent for a minute are out of date
    where = {"uuid": beat.uuid, "rank": rank}
    for key in _ALLOCATOR_BYTES:
        if key in beat.memory:
            gauges.set(f"tandem_torch_memory_{key}_bytes", beat.memory[key], **where)
    for phase in PHASES:
        memory = beat.phases.get(phase, {})
        for key in _PHASE_BYTES.keys() & memory.keys():
            gauges.set(f"tandem_torch_memory_phase_{key}_bytes", memory[key], **where, phase=phase)
    if beat.step_floor is not None:
        gauges.set("tandem_torch_memory_step_floor_bytes", beat.step_floor, **where)
    if "host_pinned" in beat.memory:
        pinned = beat.memory["host_pinned"]
        gauges.set("tandem_torch_host_pinned_bytes", pinned, run=run, rank=rank)
