"""Every metric that Tandem exports, once: nothing is exported that is not here, and docs/metrics.md is made from here.

The labels that say where a series comes from (job, instance, namespace, pod, role) belong to the scrape and are in none
of these. Devices are named by UUID, since an index restarts at 0 in each container; "cpu" stands for a machine without.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

Kind = Literal["gauge", "counter", "histogram"]
Exporter = Literal["trainer", "inference", "controller"]
CollectorName = Literal[
    "build", "nvml", "ranks", "jobs", "policy", "publish", "checkpoints", "supervisor", "volumes", "queue"
]
COLLECTORS: tuple[CollectorName, ...] = get_args(CollectorName)
Source = CollectorName | Literal["collectors", "process", "http"]
"""Who makes a metric's samples; the last three are no collectors, so nothing is told about their success."""

PHASES = (
    "rendezvous", "data", "build", "rehearsal", "base_weights", "state", "probe",
    "old_logprobs", "reference", "forward_backward", "optimizer", "checkpoint", "offload",
)  # fmt: skip
"""What a rank does, in this order; from "old_logprobs" to "optimizer" once per optimizer step, if at all. Only ranks
that stay between jobs offload, and only on a GPU is a new model's first pass rehearsed."""
KINDS = ("rl", "sft")
OUTCOMES = ("succeeded", "failed", "cancelled")
ERRORS = (
    "oom", "rank_crashed", "rank_hung", "rank_error", "launch_failed", "no_checkpoint", "deadline", "non_finite",
    "runner_lost", "runner_stopped", "invalid_input", "conflict", "checkpoint_damaged", "base_missing",
    "spool_unusable", "inference_unavailable", "gpus_not_freed", "other",
)  # fmt: skip
"""Why an attempt failed (docs/jobs.md); what is none of these counts as "other"."""
VOLUMES = ("shared", "shm", "cache", "tmp")
PROGRAM_STATES = ("stopped", "starting", "running", "backoff", "stopping", "exited", "fatal", "unknown")
THROTTLE_REASONS = ("hw_thermal", "sw_thermal", "hw_power_brake", "sw_power_cap")
PUBLISH_STAGES = ("copy", "load", "verify", "since_checkpoint")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "other")
STATUS_CLASSES = ("1xx", "2xx", "3xx", "4xx", "5xx")

OPEN: tuple[str, ...] = ()
"""Of a label whose values are not known beforehand."""

_STEP_BUCKETS = (0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_JOB_BUCKETS = (1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600)
_PUBLISH_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_RELEASE_BUCKETS = (0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20)
_HTTP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

BOTH: tuple[Exporter, ...] = ("trainer", "inference")
ALL: tuple[Exporter, ...] = ("trainer", "inference", "controller")


@dataclass(frozen=True)
class Metric:
    """`name` as PromQL has it (counters end in `_total`; histograms add `_bucket`, `_sum`, `_count`)."""

    name: str
    kind: Kind
    help: str
    source: str
    collector: Source
    exporters: tuple[Exporter, ...]
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Label -> its values where they are known beforehand: those counters and histograms exist from the start, at 0."""
    unit: str = ""
    buckets: tuple[float, ...] = ()
    perishable: bool = False
    """A measurement: not exported any more once its collector has had no success for STALE_SECONDS."""


STALE_SECONDS = 60.0
"""After this long without news, a rank is not up, and what was measured is not told as if it were so now."""

_UUID, _RANK = {"uuid": OPEN}, {"rank": OPEN}
_UUID_RANK = _UUID | _RANK


def _gpu(name: str, text: str, source: str, unit: str = "", kind: Kind = "gauge",
         labels: dict[str, tuple[str, ...]] | None = None) -> Metric:  # fmt: skip
    labels = _UUID | ({} if labels is None else labels)
    return Metric(f"tandem_gpu_{name}", kind, text, source, "nvml", BOTH, labels, unit, perishable=kind == "gauge")


def _rank(name: str, text: str, source: str, unit: str = "", kind: Kind = "gauge", *, perishable: bool = False,
          labels: dict[str, tuple[str, ...]] | None = None) -> Metric:  # fmt: skip
    labels = {} if labels is None else labels
    return Metric(name, kind, text, source, "ranks", ("trainer",), labels, unit, perishable=perishable)


def _job(name: str, text: str, source: str, unit: str = "", kind: Kind = "gauge",
         labels: dict[str, tuple[str, ...]] | None = None, buckets: tuple[float, ...] = ()) -> Metric:  # fmt: skip
    return Metric(name, kind, text, source, "jobs", ("trainer",), {} if labels is None else labels, unit, buckets)


_NOW = {
    "allocated": "in tensors",
    "reserved": "taken from the device, in use or cached",
    "active": "in blocks that are in use or may not be reused yet",
    "inactive_split": "free in blocks that are split, so not to be given back",
    "requested": "asked for, before rounding up to blocks",
}
_CPU = "; on the CPU the resident set"

PHASE_MEMORY = {
    "allocated": (f"Bytes in tensors when the phase last ended{_CPU}", "allocated_bytes.all.current"),
    "reserved": (f"Bytes taken from the device when the phase last ended{_CPU}", "reserved_bytes.all.current"),
    "device_used": ("Bytes in use on the whole device, by anybody, when the phase last ended; on the CPU the machine's "
                    "memory", "cudaMemGetInfo"),
    "host_pinned": ("Page-locked host memory that torch held when the phase last ended; 0 on the CPU",
                    "torch.cuda.host_memory_stats"),
    "peak": (f"Most bytes allocated in the last such phase{_CPU}",
             "allocated_bytes.all.peak, reset as each phase begins"),
}  # fmt: skip
"""What is told of each phase and rank: kind -> (text, where from)."""


def _torch() -> list[Metric]:
    """The allocator of each rank."""
    metrics = []
    for kind, text in _NOW.items():
        cpu = _CPU if kind in ("allocated", "reserved") else "; not on the CPU"
        stat = f"memory_stats {kind}_bytes.all"
        current = f"Bytes of torch's allocator {text}{cpu}."
        peak = f"Most bytes {text}, since the attempt began{cpu.replace('the resident', 'the largest resident')}."
        name = f"tandem_torch_memory_{kind}"
        metrics += [
            _rank(f"{name}_bytes", current, f"{stat}.current", "bytes", labels=_UUID_RANK, perishable=True),
            _rank(f"{name}_peak_bytes", peak, f"{stat}.peak", "bytes", labels=_UUID_RANK, perishable=True),
        ]
    counters = {
        "tandem_torch_memory_alloc_retries_total": ("Allocations that needed the cache emptied first.",
                                                    "num_alloc_retries"),
        "tandem_torch_memory_ooms_total": ("Allocations that failed for want of memory.", "num_ooms"),
        "tandem_torch_device_allocs_total": ("Blocks taken from the device (cudaMalloc).", "num_device_alloc"),
        "tandem_torch_device_frees_total": ("Blocks given back to the device (cudaFree).", "num_device_free"),
    }  # fmt: skip
    for name, (text, source) in counters.items():
        text = f"{text} Summed over attempts; not on the CPU."
        metrics.append(_rank(name, text, f"memory_stats {source}", kind="counter", labels=_UUID_RANK))
    return metrics


_SUPERVISED = {"program": OPEN}
_PROCESS: tuple[tuple[str, Kind, str, str], ...] = (
    ("start_time_seconds", "gauge", "seconds", "When the process started."),
    ("cpu_seconds_total", "counter", "seconds", "CPU time."),
    ("resident_memory_bytes", "gauge", "bytes", "Resident memory."),
    ("virtual_memory_bytes", "gauge", "bytes", "Address space."),
    ("open_fds", "gauge", "", "Open file descriptors."),
    ("max_fds", "gauge", "", "How many file descriptors there may be."),
)

CATALOGUE: tuple[Metric, ...] = (
    # ---------------------------------------------------------------- what this is
    Metric("tandem_build_info", "gauge", "1; versions of this container. Empty: not installed.",
           "package metadata, TANDEM_REVISION", "build", ALL,
           dict.fromkeys(("version", "revision", "python", "torch", "cuda", "vllm", "megatron"), OPEN)),
    Metric("tandem_collector_success", "gauge", "1 if the collector's last collection succeeded, 0 if it failed, or "
           "hangs for more than a minute.", "exporter", "collectors", ALL, {"collector": COLLECTORS}),
    Metric("tandem_collector_duration_seconds", "gauge", "How long the last finished collection took.", "exporter",
           "collectors", ALL, {"collector": COLLECTORS}, "seconds"),
    Metric("tandem_collector_last_success_timestamp_seconds", "gauge", "When the collector last succeeded; 0: never.",
           "exporter", "collectors", ALL, {"collector": COLLECTORS}, "seconds"),
    *(
        Metric(f"process_{name}", kind, f"{text} Of the exporter, or the controller, itself.", "prometheus_client",
               "process", ALL, unit=unit)
        for name, kind, unit, text in _PROCESS
    ),
    # ---------------------------------------------------------------- devices
    _gpu("info", "1; what the device is. MIG devices have UUIDs of their own.", "NVML",
         labels=dict.fromkeys(("index", "name", "driver_version", "cuda_version", "pci_bus_id", "mig_profile"), OPEN)),
    _gpu("memory_total_bytes", "Memory of the device.", "nvmlDeviceGetMemoryInfo v2", "bytes"),
    _gpu("memory_free_bytes", "Memory nobody uses.", "nvmlDeviceGetMemoryInfo v2", "bytes"),
    _gpu("memory_reserved_bytes", "Memory the driver keeps for itself.", "nvmlDeviceGetMemoryInfo v2", "bytes"),
    _gpu("memory_used_bytes", "Memory in use by anybody, other containers included: total - free - reserved.",
         "nvmlDeviceGetMemoryInfo v2", "bytes"),
    _gpu("compute_processes", "Processes with a context on the device, as far as the driver tells this container.",
         "nvmlDeviceGetComputeRunningProcesses"),
    _gpu("utilization_ratio", "Share of the last sample period with a kernel running; not for MIG devices.",
         "nvmlDeviceGetUtilizationRates", "ratio"),
    _gpu("temperature_celsius", "Temperature of the GPU.", "nvmlDeviceGetTemperatureV", "celsius"),
    _gpu("energy_joules_total", "Energy used since the driver was loaded; rate() is watts.",
         "nvmlDeviceGetTotalEnergyConsumption", "joules", "counter"),
    _gpu("power_limit_watts", "Power the device may draw.", "nvmlDeviceGetEnforcedPowerLimit", "watts"),
    _gpu("throttle_active", "1 while clocks are held down for this reason.",
         "nvmlDeviceGetCurrentClocksEventReasons", labels={"reason": THROTTLE_REASONS}),
    _gpu("ecc_uncorrected_errors_total", "Uncorrected ECC errors since the driver was loaded.",
         "nvmlDeviceGetTotalEccErrors", "", "counter"),
    # ---------------------------------------------------------------- ranks
    _rank("tandem_rank_up", f"1 if the rank's heartbeat changed within {STALE_SECONDS:.0f} s; absent without a job.",
          "beat.<rank>", labels=_RANK, perishable=True),
    *_torch(),
    *(_rank(f"tandem_torch_memory_phase_{kind}_bytes", f"{text}.", source, "bytes", perishable=True,
            labels=_UUID_RANK | {"phase": PHASES}) for kind, (text, source) in PHASE_MEMORY.items()),
    _rank("tandem_torch_memory_step_floor_bytes", "Bytes allocated right after zero_grad, once per optimizer step: "
          f"constant unless something leaks{_CPU}.", "allocated_bytes.all.current", "bytes", perishable=True,
          labels=_UUID_RANK),
    _rank("tandem_torch_host_pinned_bytes", "Page-locked host memory that torch holds; not on the CPU.",
          "torch.cuda.host_memory_stats", "bytes", perishable=True, labels=_RANK),
    _rank("tandem_train_active", "1 while a job is running.", "jobs/running"),
    _rank("tandem_train_step", "Optimizer steps done by the running job; absent without one.", "beat.0"),
    _rank("tandem_train_steps", "Optimizer steps that the running job has in all; absent without one.", "beat.0"),
    _rank("tandem_train_rank_step", "Optimizer steps done by each rank of the running job.", "beat.<rank>",
          labels=_RANK),
    _rank("tandem_job_last_progress_timestamp_seconds", "When the rank that is silent for longest gave its last sign "
          "of life, or the attempt began; absent without a job.", "beat.<rank>", "seconds"),
    _rank("tandem_job_info", "1; the running job, and only that.", "jobs/running",
          labels={"job_id": OPEN, "run": OPEN, "kind": KINDS}),
    # ---------------------------------------------------------------- training
    _job("tandem_train_last_step_timestamp_seconds", "When the running job last finished an optimizer step; absent "
         "before its first, and without a job.", "event step", "seconds"),
    _job("tandem_train_step_duration_seconds", "Forward, backward and optimizer of one step, on the slowest rank.",
         "event step", "seconds", "histogram", buckets=_STEP_BUCKETS),
    _job("tandem_train_phase_duration_seconds", "Each phase: on the slowest rank where it belongs to a step, else on "
         "rank 0.", "events loaded, step, checkpoint", "seconds", "histogram", {"phase": PHASES}, _STEP_BUCKETS),
    _job("tandem_train_tokens_total", "Tokens of the rows trained on, padding excluded, shared prefixes once.",
         "event step", kind="counter"),
    _job("tandem_train_trainable_tokens_total", "Tokens with a loss.", "event step", kind="counter"),
    _job("tandem_train_samples_total", "Trajectories (RL) or examples (SFT) trained on.", "event step",
         kind="counter"),
    *(
        _job(f"tandem_train_{name}", f"{text} Of the last optimizer step; stays between jobs.", f"event step, {key}",
             unit)
        for name, key, unit, text in (
            ("loss", "loss", "", "The loss."),
            ("grad_norm", "grad_norm", "", "Norm of the gradient before clipping."),
            ("learning_rate", "learning_rate", "", "The learning rate."),
            ("entropy", "entropy", "nats", "Mean entropy of the policy per token."),
            ("kl", "kl_reference", "nats", "KL to the reference; absent where none is measured."),
            ("kl_sampler", "kl_sampler", "nats", "KL of the sampler to the trainer (RL)."),
            ("logprob_mismatch", "sampler_logprob_difference", "nats",
             "Mean absolute difference of the trainer's and the sampler's log-probs (RL)."),
            ("clip_ratio", "clip_fraction", "ratio", "Share of tokens whose importance ratio was clipped (RL)."),
            ("importance_ratio_max", "ratio_max", "ratio", "Largest importance ratio (RL)."),
            ("reward_mean", "reward_mean", "", "Mean reward (RL)."),
            ("reward_std", "reward_std", "", "Standard deviation of the rewards (RL)."),
        )
    ),
    # ---------------------------------------------------------------- jobs
    _job("tandem_jobs_finished_total", "Jobs that ended.", "events succeeded, failed, cancelled", kind="counter",
         labels={"outcome": OUTCOMES}),
    _job("tandem_job_attempts_failed_total", "Attempts that ended without their checkpoint, by docs/jobs.md's error "
         "type; cancelled ones not counted.", "events requeued, failed", kind="counter", labels={"error": ERRORS}),
    _job("tandem_job_queue_wait_seconds", "From submission to the first claim.", "event claimed", "seconds",
         "histogram", {"kind": KINDS}, _JOB_BUCKETS),
    _job("tandem_job_duration_seconds", "From the first claim to the end.", "terminal events", "seconds",
         "histogram", {"kind": KINDS}, _JOB_BUCKETS),
    _job("tandem_job_gpu_released_bytes", "Device memory that the last attempt gave back: most in use while it ran, "
         "less what was left.", "event released", "bytes", labels=_UUID),
    _job("tandem_job_gpu_left_bytes", "Device memory in use after the last attempt's ranks were gone, or beyond what "
         "ranks keep that stay.",
         "event released", "bytes", labels=_UUID),
    _job("tandem_job_gpu_resident_bytes", "Device memory that ranks keep between jobs; only where they stay "
         "(TANDEM_LAUNCH=resident).", "event released", "bytes", labels=_UUID),
    _job("tandem_job_release_seconds", "From the last rank's end to free devices.", "event released", "seconds",
         "histogram", buckets=_RELEASE_BUCKETS),
    _job("tandem_checkpoint_duration_seconds", "How long the last checkpoint took to make, hash and commit.",
         "event checkpoint", "seconds"),
    Metric("tandem_checkpoint_last_success_timestamp_seconds", "gauge", "When the newest checkpoint of any job was "
           "made; absent before the first.", "manifests", "checkpoints", ("trainer",), unit="seconds"),
    Metric("tandem_checkpoint_size_bytes", "gauge", "Size of that checkpoint.", "manifests", "checkpoints",
           ("trainer",), unit="bytes"),
    # ---------------------------------------------------------------- policy
    Metric("tandem_policy_version", "gauge", "Newest step of each run: made (side trainer), verified and served (side "
           "inference). The 20 runs that changed last.", "checkpoints, served.json", "policy", BOTH,
           {"side": BOTH, "run": OPEN}),
    Metric("tandem_policy_refused", "gauge", "1 while a step of the run is refused, 0 while none is; the same runs.",
           "served.json", "policy", ("inference",), {"run": OPEN}),
    Metric("tandem_publish_total", "counter", "Steps that were verified and served, or refused.", "served.json",
           "publish", ("inference",), {"outcome": ("served", "refused")}),
    Metric("tandem_publish_duration_seconds", "histogram", "Stages of serving a step; since_checkpoint is from the "
           "commit to served.", "event served", "publish", ("inference",), {"stage": PUBLISH_STAGES}, "seconds",
           _PUBLISH_BUCKETS),
    Metric("tandem_publish_logprob_error_nats", "gauge", "Mean absolute log-prob difference of trainer and vLLM in the "
           "last verification that served a step.", "served.json", "publish", ("inference",), unit="nats"),
    # ---------------------------------------------------------------- the container
    Metric("tandem_supervisor_process_up", "gauge", "1 if the program runs.", "supervisord", "supervisor", BOTH,
           _SUPERVISED, perishable=True),
    Metric("tandem_supervisor_process_state", "gauge", "1 for the state the program is in.", "supervisord",
           "supervisor", BOTH, _SUPERVISED | {"state": PROGRAM_STATES}, perishable=True),
    Metric("tandem_supervisor_process_restarts_total", "counter", "Times the program was started again.",
           "supervisord", "supervisor", BOTH, _SUPERVISED),
    Metric("tandem_supervisor_process_start_time_seconds", "gauge", "When the program's process started.",
           "/proc/<pid>/stat", "supervisor", BOTH, _SUPERVISED, "seconds", perishable=True),
    Metric("tandem_volume_total_bytes", "gauge", "Size of the file system.", "statvfs", "volumes", ALL,
           {"volume": VOLUMES}, "bytes", perishable=True),
    Metric("tandem_volume_free_bytes", "gauge", "What this user may still write.", "statvfs", "volumes", ALL,
           {"volume": VOLUMES}, "bytes", perishable=True),
    Metric("tandem_volume_write_probe_seconds", "gauge", "How long a write of 4 KiB with fsync and rename took; once a "
           "minute, on the shared volume.", "write probe", "volumes", ALL, {"volume": VOLUMES}, "seconds",
           perishable=True),
    # ---------------------------------------------------------------- the controller
    Metric("tandem_jobs", "gauge", "Jobs that are not done.", "jobs/queued, jobs/running", "queue", ("controller",),
           {"state": ("queued", "running")}, perishable=True),
    Metric("tandem_runs", "gauge", "Runs on the volume.", "runs/", "queue", ("controller",), perishable=True),
    Metric("tandem_jobs_submitted_total", "counter", "Jobs that were queued; the same id twice is one job.",
           "controller", "http", ("controller",), {"kind": KINDS}),
    Metric("tandem_http_requests_total", "counter", "Requests answered. Route is the template, or \"other\".",
           "controller", "http", ("controller",),
           {"route": OPEN, "method": METHODS, "status_class": STATUS_CLASSES}),
    Metric("tandem_http_request_duration_seconds", "histogram", "From the request's first byte to the answer's last; "
           "event streams not counted.", "controller", "http", ("controller",), {"route": OPEN}, "seconds",
           _HTTP_BUCKETS),
)  # fmt: skip


def _vllm(name: str, kind: Kind, text: str, buckets: tuple[float, ...] = (), **labels: tuple[str, ...]) -> Metric:
    everywhere = {"model_name": OPEN, "engine": OPEN}
    return Metric(f"vllm:{name}", kind, text, "vLLM 0.32", "http", (), everywhere | labels, buckets=buckets)


_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_LENGTH = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
          2560)  # fmt: skip
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_BATCH = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

VLLM_METRICS: tuple[Metric, ...] = (
    _vllm("num_requests_running", "gauge", "Requests in execution batches."),
    _vllm("num_requests_waiting", "gauge", "Requests waiting."),
    _vllm("num_requests_waiting_by_reason", "gauge", "Requests waiting, by reason.", reason=("capacity", "deferred")),
    _vllm("kv_cache_usage_perc", "gauge", "KV-cache usage, 0 to 1."),
    _vllm("engine_sleep_state", "gauge", "The engine's sleep state.",
          sleep_state=("awake", "weights_offloaded", "discard_all")),
    _vllm("num_preemptions_total", "counter", "Preemptions."),
    _vllm("prompt_tokens_total", "counter", "Prompt tokens."),
    _vllm("prompt_tokens_cached_total", "counter", "Prompt tokens that were cached."),
    _vllm("generation_tokens_total", "counter", "Generated tokens."),
    _vllm("prefix_cache_queries_total", "counter", "Tokens looked up in the prefix cache."),
    _vllm("prefix_cache_hits_total", "counter", "Tokens found in the prefix cache."),
    _vllm("request_success_total", "counter", "Finished requests.",
          finished_reason=("stop", "length", "abort", "error", "repetition")),
    _vllm("iteration_tokens_total", "histogram", "Tokens per engine step; its count is the engine's heartbeat.",
          _BATCH),
    _vllm("request_prompt_tokens", "histogram", "Prompt lengths.", _LENGTH),
    _vllm("request_generation_tokens", "histogram", "Completion lengths.", _LENGTH),
    _vllm("time_to_first_token_seconds", "histogram", "Time to the first token.", _FIRST),
    _vllm("inter_token_latency_seconds", "histogram", "Time between tokens.", _BETWEEN),
    _vllm("e2e_request_latency_seconds", "histogram", "Time of a whole request.", _LATENCY),
    _vllm("request_queue_time_seconds", "histogram", "Time a request waited.", _LATENCY),
    _vllm("request_prefill_time_seconds", "histogram", "Time in prefill.", _LATENCY),
    _vllm("request_decode_time_seconds", "histogram", "Time in decode.", _LATENCY),
    Metric("vllm:cache_config_info", "gauge", "1; the KV cache's configuration (of its labels, these).", "vLLM 0.32",
           "http", (), dict.fromkeys(("engine", "block_size", "cache_dtype", "gpu_memory_utilization", "num_gpu_blocks",
                                    "enable_prefix_caching"), OPEN)),
    Metric("vllm:lora_requests_info", "gauge", "Unix time at which these adapters were last seen.", "vLLM 0.32", "http",
           (), dict.fromkeys(("max_lora", "waiting_lora_adapters", "running_lora_adapters"), OPEN)),
    Metric("http_requests_total", "counter", "Requests to vLLM's server.", "vLLM 0.32", "http", (),
           {"handler": OPEN, "method": ("GET", "POST"), "status": STATUS_CLASSES}),
)  # fmt: skip
"""What vLLM itself exports (job tandem-vllm), as far as dashboards and rules use it."""

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in CATALOGUE + VLLM_METRICS}
