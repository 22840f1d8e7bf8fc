"""What Prometheus would have of whole stacks, minute by minute: healthy ones, in the notation of promtool's tests.

A stack is {series: value per minute}; None is a minute without a sample.
"""

from __future__ import annotations

from collections.abc import Callable

MINUTES = 600
GIB = 2**30
MIB = 2**20

Values = list[float | None]
Stack = dict[str, Values]

_TARGETS = {
    "controller": ("tandem-controller", "controller", "controller:8080"),
    "trainer": ("tandem-trainer", "trainer", "trainer:9400"),
    "inference": ("tandem-inference", "inference", "inference:9401"),
    "vllm": ("tandem-vllm", "inference", "inference:8000"),
}
TRAINER_GPUS = ("GPU-0", "GPU-1")
INFERENCE_GPU = "GPU-2"
TOTAL = 140.0 * GIB


def series(target: str, metric: str, /, **labels: str) -> str:
    """`metric{...}` as scraped from one of the four targets."""
    job, pod, instance = _TARGETS[target]
    every = {"job": job, "namespace": "compose", "pod": pod, "role": pod, "instance": instance} | labels
    return metric + "{" + ",".join(f'{key}="{value}"' for key, value in sorted(every.items())) + "}"


def each(value: Callable[[int], float | None] | float) -> Values:
    """A value for each minute."""
    return [value(minute) if callable(value) else float(value) for minute in range(MINUTES + 1)]


def histogram(stack: Stack, target: str, name: str, count: Callable[[int], float], *, at: str,
              buckets: tuple[str, ...], seconds: float, **labels: str) -> None:  # fmt: skip
    """A histogram whose `count` observations so far took `seconds` each and fell into bucket `at`."""
    reached = False
    for le in (*buckets, "+Inf"):
        reached = reached or le == at
        stack[series(target, f"{name}_bucket", le=le, **labels)] = each(count if reached else 0)
    stack[series(target, f"{name}_sum", **labels)] = each(lambda minute: count(minute) * seconds)
    stack[series(target, f"{name}_count", **labels)] = each(count)


def idle(*, gpus: bool = True) -> Stack:
    """Everything runs, nothing is asked of it; the last job was long ago."""
    stack: Stack = {}
    for target in _TARGETS:
        stack[series(target, "up")] = each(1)
    for target in ("controller", "trainer", "inference"):
        stack[series(target, "tandem_build_info", version="0.1.0", revision="abc")] = each(1)
        for volume, size in (("shared", 1000 * GIB), ("shm", 16 * GIB), ("cache", 100 * GIB), ("tmp", 8 * GIB)):
            stack[series(target, "tandem_volume_total_bytes", volume=volume)] = each(size)
            free = 0.8 if volume == "shared" else 0.25
            stack[series(target, "tandem_volume_free_bytes", volume=volume)] = each(free * size)
        stack[series(target, "tandem_volume_write_probe_seconds", volume="shared")] = each(0.004)
    stack[series("controller", "process_start_time_seconds")] = each(5)
    for state in ("queued", "running"):
        stack[series("controller", "tandem_jobs", state=state)] = each(0)
    for status_class, every in (("2xx", 1), ("5xx", 0)):
        key = series("controller", "tandem_http_requests_total", route="/v1/jobs", method="GET",
                     status_class=status_class)  # fmt: skip
        stack[key] = each(lambda minute, every=every: minute * every)
    for target, programs in (("trainer", ("runner", "exporter")), ("inference", ("vllm", "publisher", "exporter"))):
        for program in programs:
            stack[series(target, "tandem_supervisor_process_up", program=program)] = each(1)
            stack[series(target, "tandem_supervisor_process_start_time_seconds", program=program)] = each(5)
        for collector in ("nvml", "volumes", "supervisor"):
            stack[series(target, "tandem_collector_success", collector=collector)] = each(1)
    stack[series("trainer", "tandem_train_active")] = each(0)
    for outcome in ("succeeded", "failed", "cancelled"):
        stack[series("trainer", "tandem_jobs_finished_total", outcome=outcome)] = each(0)
    for error in ("oom", "rank_crashed", "rank_hung", "runner_stopped", "non_finite"):
        stack[series("trainer", "tandem_job_attempts_failed_total", error=error)] = each(0)
    for target, side in (("trainer", "trainer"), ("inference", "inference")):
        stack[series(target, "tandem_policy_version", side=side, run="math")] = each(7)
    # A run of another base model, trained long ago: nobody will ever serve its last step.
    stack[series("trainer", "tandem_policy_version", side="trainer", run="old")] = each(3)
    stack[series("inference", "tandem_policy_version", side="inference", run="old")] = each(2)
    stack[series("inference", "tandem_policy_refused", run="math")] = each(0)
    stack[series("inference", "tandem_policy_refused", run="old")] = each(1)
    _vllm(stack, busy=False)
    if gpus:
        _gpus(stack)
    return stack


def _gpus(stack: Stack) -> None:
    for target, uuids in (("trainer", TRAINER_GPUS), ("inference", (INFERENCE_GPU,))):
        for uuid in uuids:
            stack[series(target, "tandem_gpu_info", uuid=uuid, name="H200")] = each(1)
            stack[series(target, "tandem_gpu_memory_total_bytes", uuid=uuid)] = each(TOTAL)
            # vLLM may be given nearly all, and takes a little more with its first long request.
            vllm = each(lambda minute: 0.975 * TOTAL + (minute > 200) * GIB)
            stack[series(target, "tandem_gpu_memory_used_bytes", uuid=uuid)] = each(0) if target == "trainer" else vllm
            stack[series(target, "tandem_gpu_utilization_ratio", uuid=uuid)] = each(0)
            stack[series(target, "tandem_gpu_ecc_uncorrected_errors_total", uuid=uuid)] = each(2)
            for reason in ("hw_thermal", "sw_power_cap"):
                stack[series(target, "tandem_gpu_throttle_active", uuid=uuid, reason=reason)] = each(0)
    for uuid in TRAINER_GPUS:
        stack[series("trainer", "tandem_job_gpu_left_bytes", uuid=uuid)] = each(3 * MIB)


def _vllm(stack: Stack, *, busy: bool) -> None:
    engine = {"model_name": "tiny", "engine": "0"}
    pace = 1.0 if busy else 0.0

    def put(name: str, value: Callable[[int], float] | float, **labels: str) -> None:
        stack[series("vllm", name, **engine, **labels)] = each(value)

    put("vllm:num_requests_running", 16 * pace)
    put("vllm:num_requests_waiting", lambda minute: 200 * pace * (minute % 5 == 0))  # each batch of prompts, a burst
    put("vllm:kv_cache_usage_perc", 0.97 * pace)
    put("vllm:num_preemptions_total", lambda minute: 6 * pace * minute)
    put("vllm:generation_tokens_total", lambda minute: 60000 * pace * minute)
    put("vllm:iteration_tokens_total_count", lambda minute: 1000 * pace * minute)
    for reason, share in (("stop", 95), ("length", 5), ("abort", 0)):
        put("vllm:request_success_total", lambda minute, share=share: share * pace * minute, finished_reason=reason)
    for status, share in (("2xx", 100), ("5xx", 0)):
        key = series("vllm", "http_requests_total", handler="/v1/completions", method="POST", status=status)
        stack[key] = each(lambda minute, share=share: share * pace * minute)


JOB, PAUSE = 8, 2
"""Minutes of each job of `training`, and between two."""


def training() -> Stack:
    """One job after another, each eight minutes and then two without, served a minute after it ended; vLLM is busy."""
    stack = idle()
    _vllm(stack, busy=True)
    cycle = JOB + PAUSE

    def during(value: Callable[[int], float] | float, *, first: int = 0) -> Values:
        """From minute `first` of each job to its end."""

        def now(minute: int) -> float | None:
            if not first <= minute % cycle < JOB:
                return None
            return value(minute) if callable(value) else value

        return each(now)

    def done(minute: int) -> int:
        return (minute + PAUSE) // cycle

    def t(name: str, **labels: str) -> str:
        return series("trainer", name, **labels)

    stack[series("controller", "tandem_jobs", state="queued")] = each(3)
    stack[series("controller", "tandem_jobs", state="running")] = each(lambda minute: float(minute % cycle < JOB))
    stack[t("tandem_train_active")] = each(lambda minute: float(minute % cycle < JOB))
    for number in range(MINUTES // cycle + 1):
        info = t("tandem_job_info", job_id=f"job-{number}", run="math", kind="rl")
        mine = range(number * cycle, number * cycle + JOB)
        stack[info] = each(lambda minute, mine=mine: 1 if minute in mine else None)
    stack[t("tandem_train_last_step_timestamp_seconds")] = during(lambda minute: 60.0 * minute, first=2)
    stack[t("tandem_job_last_progress_timestamp_seconds")] = during(lambda minute: 60.0 * minute)
    histogram(stack, "trainer", "tandem_train_step_duration_seconds", lambda minute: minute, at="60",
              buckets=("60", "300"), seconds=40.0)  # fmt: skip
    for rank, uuid in enumerate(TRAINER_GPUS):
        labels = {"rank": str(rank), "uuid": uuid}
        stack[t("tandem_rank_up", rank=str(rank))] = during(1)
        stack[t("tandem_torch_memory_reserved_bytes", **labels)] = during(120 * GIB)
        stack[t("tandem_torch_memory_allocated_bytes", **labels)] = during(16 * GIB)
        stack[t("tandem_torch_memory_inactive_split_bytes", **labels)] = during(24 * GIB)
        floor = during(lambda minute: (16 + 44 * (minute // cycle % 3)) * GIB, first=2)  # jobs of different sizes
        stack[t("tandem_torch_memory_step_floor_bytes", **labels)] = floor
        stack[t("tandem_torch_memory_alloc_retries_total", **labels)] = each(lambda minute: 3.0 * done(minute))
        stack[t("tandem_torch_memory_ooms_total", **labels)] = each(0)
        in_use = each(lambda minute: 0.92 * TOTAL if minute % cycle < JOB else 1.0 * MIB)
        stack[t("tandem_gpu_memory_used_bytes", uuid=uuid)] = in_use
        stack[t("tandem_job_gpu_left_bytes", uuid=uuid)] = each(200 * MIB)
        stack[t("tandem_gpu_utilization_ratio", uuid=uuid)] = each(lambda minute: 0.9 * (2 <= minute % cycle < JOB))
        stack[t("tandem_gpu_throttle_active", uuid=uuid, reason="sw_power_cap")] = each(1)
    stack[t("tandem_jobs_finished_total", outcome="succeeded")] = each(lambda minute: float(done(minute)))
    stack[t("tandem_jobs_finished_total", outcome="cancelled")] = each(lambda minute: float(minute > 100))
    stack[t("tandem_job_attempts_failed_total", error="rank_crashed")] = each(lambda minute: float(minute > 200))
    stack[t("tandem_job_attempts_failed_total", error="runner_stopped")] = each(lambda minute: 5.0 * (minute > 200))
    histogram(stack, "trainer", "tandem_job_release_seconds", done, at="2", buckets=("1", "2", "10"), seconds=1.5)
    stack[t("tandem_policy_version", side="trainer", run="math")] = each(lambda minute: 7.0 + done(minute))
    served = each(lambda minute: 7.0 + done(max(minute - 1, 0)))
    stack[series("inference", "tandem_policy_version", side="inference", run="math")] = served
    for stage, le in (("copy", "1"), ("load", "1"), ("verify", "1"), ("since_checkpoint", "60")):
        histogram(stack, "inference", "tandem_publish_duration_seconds", done, at=le, buckets=("1", "60"),
                  seconds=float(le), stage=stage)  # fmt: skip
    # A checkpoint of 100 MiB each.
    shared = each(lambda minute: 800 * GIB - 100 * MIB * done(minute))
    for target in ("controller", "trainer", "inference"):
        stack[series(target, "tandem_volume_free_bytes", volume="shared")] = shared
    route = {"route": "/v1/jobs", "method": "GET"}
    for status_class, times in (("2xx", lambda minute: 60.0 * minute), ("5xx", lambda minute: float(minute > 25))):
        stack[series("controller", "tandem_http_requests_total", **route, status_class=status_class)] = each(times)
    return stack


def resident() -> Stack:
    """As `training`, with ranks that stay between jobs and keep 2.8 GiB of each device."""
    stack = training()
    kept = 2.8 * GIB
    for uuid in TRAINER_GPUS:
        used = stack[series("trainer", "tandem_gpu_memory_used_bytes", uuid=uuid)]
        used[:] = [value if value is None else max(value, kept) for value in used]
        stack[series("trainer", "tandem_job_gpu_resident_bytes", uuid=uuid)] = each(kept)
        stack[series("trainer", "tandem_job_gpu_left_bytes", uuid=uuid)] = each(0)
    return stack


def resident_idle() -> Stack:
    """As `idle`, the last job's ranks still there."""
    stack = idle()
    for uuid in TRAINER_GPUS:
        stack[series("trainer", "tandem_gpu_memory_used_bytes", uuid=uuid)] = each(2.8 * GIB)
        stack[series("trainer", "tandem_job_gpu_resident_bytes", uuid=uuid)] = each(2.8 * GIB)
        stack[series("trainer", "tandem_job_gpu_left_bytes", uuid=uuid)] = each(0)
    return stack


def sharing() -> Stack:
    """Trainer and vLLM on one GPU: a job trains for 60 of every 100 minutes, while vLLM sleeps on its requests."""
    stack = idle()
    _vllm(stack, busy=True)

    def asleep(minute: int) -> bool:
        return minute % 100 >= 40

    def awake_so_far(minute: int) -> int:
        return minute // 100 * 40 + min(minute % 100, 40)

    engine = {"model_name": "tiny", "engine": "0"}
    for name, pace in (("iteration_tokens_total_count", 1000), ("generation_tokens_total", 60000)):
        stack[series("vllm", f"vllm:{name}", **engine)] = each(lambda minute, pace=pace: pace * awake_so_far(minute))
    stack[series("vllm", "vllm:num_requests_waiting", **engine)] = each(lambda minute: 200 * asleep(minute))
    for state, of in (("awake", lambda m: not asleep(m)), ("weights_offloaded", asleep)):
        key = series("vllm", "vllm:engine_sleep_state", sleep_state=state, **engine)
        stack[key] = each(lambda minute, of=of: float(of(minute)))
    for uuid in TRAINER_GPUS:
        for key in [key for key in stack if uuid in key]:
            del stack[key]
    used = each(lambda minute: (0.5 + 0.1 * (minute > 300) if asleep(minute) else 0.9) * TOTAL)
    for target in ("trainer", "inference"):
        stack[series(target, "tandem_gpu_memory_total_bytes", uuid=INFERENCE_GPU)] = each(TOTAL)
        stack[series(target, "tandem_gpu_memory_used_bytes", uuid=INFERENCE_GPU)] = used
    stack[series("trainer", "tandem_job_gpu_left_bytes", uuid=INFERENCE_GPU)] = each(0)
    stack[series("trainer", "tandem_train_active")] = each(lambda minute: float(asleep(minute)))
    stack[series("controller", "tandem_jobs", state="running")] = each(lambda minute: float(asleep(minute)))
    return stack


def on_cpu() -> Stack:
    """`idle` on a machine without GPUs, in the middle of one long job: the ranks' memory is the process's."""
    stack = idle(gpus=False)
    labels = {"rank": "0", "uuid": "cpu"}
    stack[series("controller", "tandem_jobs", state="running")] = each(1)
    stack[series("trainer", "tandem_train_active")] = each(1)
    stack[series("trainer", "tandem_job_info", job_id="job", run="math", kind="sft")] = each(1)
    stack[series("trainer", "tandem_rank_up", rank="0")] = each(1)
    stack[series("trainer", "tandem_torch_memory_reserved_bytes", **labels)] = each(GIB)
    stack[series("trainer", "tandem_torch_memory_step_floor_bytes", **labels)] = each(lambda minute: minute * MIB)
    stack[series("trainer", "tandem_train_last_step_timestamp_seconds")] = each(lambda minute: 60.0 * minute)
    stack[series("trainer", "tandem_job_last_progress_timestamp_seconds")] = each(lambda minute: 60.0 * minute)
    return stack


def starting() -> Stack:
    """The first minutes: containers come up one after another, and vLLM loads for eight minutes."""
    stack = idle()
    late = {"up": 8, "vllm:": 8, "http_requests": 8}
    for key, values in stack.items():
        after = next((n for name, n in late.items() if key.startswith(name) and 'job="tandem-vllm"' in key), 2)
        for minute in range(after):
            values[minute] = 0 if key.startswith("up") else None
    return stack
