"""Healthy stacks, as Prometheus sees them minute by minute."""

import re
from collections.abc import Callable
from functools import partial

from monitoring.series import CLOCK, MINUTES, TARGETS, Stack, Value, histogram, per_minute, put

GIB = 2**30
MIB = 2**20
TRAINER_GPUS = ("GPU-0", "GPU-1")
INFERENCE_GPU = "GPU-2"
TOTAL = 140.0 * GIB
_ENGINE = {"model_name": "tiny", "engine": "0"}


def replicas() -> Stack:
    """Two inference servers behind one address, with merged weights."""
    stack = training()
    put(stack, "inference", "tandem_replicas_wanted", 2)
    put(stack, "inference", "tandem_merged_runs", 1)
    for series in [series for series in stack if 'job="tandem-vllm"' in series]:
        values = stack.pop(series)
        for replica in "01":
            stack[series.replace("{", f'{{replica="{replica}",')] = list(values)
    for series in [series for series in stack if re.search('program="(vllm|publisher)"', series)]:
        values = stack.pop(series)
        for replica in "01":
            name = re.sub(r'program="(\w+)"', rf'program="\1-{replica}"', series)
            stack[name] = list(values)
    for replica in "01":
        phase_of_merged(stack, lambda _: "served", replica)
        # The second server is ready only after minute 10. A slow publication makes the second
        # server unready from minute 60 to minute 66.
        late = (lambda m: float(m > 10 and not 60 <= m < 66)) if replica == "1" else 1
        put(stack, "inference", "tandem_replica_ready", late, replica=replica)
    return stack


def idle(*, gpus: bool = True) -> Stack:
    """All programs run and are idle; the last job was long ago."""
    stack: Stack = {}
    for target in TARGETS:
        put(stack, target, "up", 1)
    for target in ("controller", "trainer", "inference"):
        put(stack, target, "tandem_build_info", 1, version="0.1.0", revision="abc")
        sizes = {"shared": 1000 * GIB, "downloads": 100 * GIB}
        if target != "controller":
            sizes |= {"shm": 16 * GIB, "cache": 100 * GIB, "tmp": 8 * GIB}
        for volume, size in sizes.items():
            put(stack, target, "tandem_volume_total_bytes", size, volume=volume)
            put(
                stack,
                target,
                "tandem_volume_free_bytes",
                (0.8 if volume == "shared" else 0.25) * size,
                volume=volume,
            )
        put(stack, target, "tandem_volume_write_probe_seconds", 0.004, volume="shared")
    put(stack, "controller", "process_start_time_seconds", 5)
    for state in ("queued", "running"):
        put(stack, "controller", "tandem_jobs", 0, state=state)
    for kind in ("job", "name", "run"):
        put(stack, "controller", "tandem_spool_damaged", 0, kind=kind)
    _requests(stack, ok=per_minute(1), errors=0)
    for target, programs in (
        ("trainer", ("runner", "exporter")),
        ("inference", ("vllm", "publisher", "exporter")),
    ):
        for program in programs:
            put(stack, target, "tandem_supervisor_process_up", 1, program=program)
            put(stack, target, "tandem_supervisor_process_start_time_seconds", 5, program=program)
        for collector in ("nvml", "volumes", "supervisor"):
            put(stack, target, "tandem_collector_success", 1, collector=collector)
        put(stack, target, "tandem_policy_version", 7, side=target, run="math")
    put(stack, "trainer", "tandem_train_active", 0)
    for outcome in ("succeeded", "failed", "cancelled"):
        put(stack, "trainer", "tandem_jobs_finished_total", 0, outcome=outcome)
    for error in ("oom", "rank_crashed", "rank_hung", "runner_stopped", "non_finite"):
        put(stack, "trainer", "tandem_job_attempts_failed_total", 0, error=error)
    # A run of another base model, trained long ago: its last step will never be served.
    put(stack, "trainer", "tandem_policy_version", 3, side="trainer", run="old")
    put(stack, "inference", "tandem_policy_version", 2, side="inference", run="old")
    put(stack, "inference", "tandem_policy_refused", 0, run="math")
    put(stack, "inference", "tandem_policy_refused", 1, run="old")
    _vllm(stack, pace=0)
    if gpus:
        for uuid in TRAINER_GPUS:
            _gpu(stack, "trainer", uuid, used=0)
            put(stack, "trainer", "tandem_job_gpu_left_bytes", 3 * MIB, uuid=uuid)
        # vLLM may have nearly all memory of its GPU, and takes a little more at its first long
        # request.
        _gpu(
            stack,
            "inference",
            INFERENCE_GPU,
            used=lambda minute: 0.975 * TOTAL + (minute > 200) * GIB,
        )
    return stack


def _gpu(stack: Stack, target: str, uuid: str, used: Value) -> None:
    put(stack, target, "tandem_gpu_info", 1, uuid=uuid, name="H200")
    put(stack, target, "tandem_gpu_memory_total_bytes", TOTAL, uuid=uuid)
    put(stack, target, "tandem_gpu_memory_used_bytes", used, uuid=uuid)
    put(stack, target, "tandem_gpu_utilization_ratio", 0, uuid=uuid)
    put(stack, target, "tandem_gpu_ecc_uncorrected_errors_total", 2, uuid=uuid)
    for reason in ("hw_thermal", "sw_power_cap"):
        put(stack, target, "tandem_gpu_throttle_active", 0, uuid=uuid, reason=reason)


def _requests(stack: Stack, *, ok: Value, errors: Value) -> None:
    for status_class, count in (("2xx", ok), ("5xx", errors)):
        put(
            stack,
            "controller",
            "tandem_http_requests_total",
            count,
            route="/v1/jobs",
            method="GET",
            status_class=status_class,
        )


def _vllm(stack: Stack, *, pace: float) -> None:
    """Sets vLLM's series. With `pace` 1 vLLM is busy; with `pace` 0 it is idle."""

    engine = partial(put, stack, "vllm", **_ENGINE)
    engine("vllm:num_requests_running", 16 * pace)
    # Each batch of prompts is a burst.
    engine("vllm:num_requests_waiting", lambda minute: 200 * pace * (minute % 5 == 0))
    engine("vllm:kv_cache_usage_perc", 0.97 * pace)
    engine("vllm:num_preemptions_total", per_minute(6 * pace))
    engine("vllm:generation_tokens_total", per_minute(60000 * pace))
    # Bursts of other traffic hit the prefix cache less often.
    engine("vllm:prefix_cache_queries_total", per_minute(40000 * pace))
    engine("vllm:prefix_cache_hits_total", lambda m: pace * (30000 * m - 10000 * min(m % 90, 30)))
    engine("vllm:iteration_tokens_total_count", per_minute(1000 * pace))
    engine("vllm:request_generation_tokens_bucket", 0, le="1.0")
    for reason, share in (("stop", 95), ("length", 5), ("abort", 0)):
        engine("vllm:request_success_total", per_minute(share * pace), finished_reason=reason)
    for status, share in (("2xx", 100), ("5xx", 0)):
        put(
            stack,
            "vllm",
            "http_requests_total",
            per_minute(share * pace),
            handler="/v1/completions",
            method="POST",
            status=status,
        )
    # The publisher sends a request in each turn of its loop.
    put(
        stack,
        "vllm",
        "http_requests_total",
        per_minute(120),
        handler="/v1/models",
        method="GET",
        status="2xx",
    )


def resident_idle() -> Stack:
    """The stack `idle`. The last job's ranks stay and keep 2.8 GiB of each device."""
    return _with_ranks_kept(idle())


def _with_ranks_kept(stack: Stack) -> Stack:
    for uuid in TRAINER_GPUS:
        for series, values in stack.items():
            if series.startswith("tandem_gpu_memory_used_bytes") and f'uuid="{uuid}"' in series:
                values[:] = [value if value is None else max(value, 2.8 * GIB) for value in values]
        put(stack, "trainer", "tandem_job_gpu_resident_bytes", 2.8 * GIB, uuid=uuid)
        put(stack, "trainer", "tandem_job_gpu_left_bytes", 0, uuid=uuid)
    return stack


def on_cpu() -> Stack:
    """The stack `idle` on a machine without GPUs, in the middle of one long job. The memory that a
    rank reports is the memory of its process."""
    stack = idle(gpus=False)
    _run_long_job(stack, kind="sft")
    put(stack, "trainer", "tandem_rank_up", 1, run="math", rank="0")
    put(stack, "trainer", "tandem_torch_memory_reserved_bytes", GIB, rank="0", uuid="cpu")
    put(
        stack,
        "trainer",
        "tandem_torch_memory_step_floor_bytes",
        per_minute(MIB),
        rank="0",
        uuid="cpu",
    )
    return stack


def _run_long_job(stack: Stack, kind: str) -> None:
    put(stack, "controller", "tandem_jobs", 1, state="running")
    put(stack, "trainer", "tandem_train_active", 1)
    put(stack, "trainer", "tandem_job_info", 1, job_id="long", run="math", kind=kind)
    put(stack, "trainer", "tandem_train_last_step_timestamp_seconds", CLOCK, run="math")
    put(stack, "trainer", "tandem_job_last_progress_timestamp_seconds", CLOCK, run="math")


def waiting() -> Stack:
    """The stack `idle` with an attempt that waits for the start of its ranks. The stack has the
    metrics that the exporter exports for a waiting attempt."""
    stack = idle()
    put(stack, "controller", "tandem_jobs", 1, state="running")
    put(stack, "trainer", "tandem_train_active", 1)
    put(stack, "trainer", "tandem_job_info", 1, job_id="queued", run="math", kind="rl")
    put(stack, "trainer", "tandem_job_last_progress_timestamp_seconds", CLOCK, run="math")
    put(stack, "trainer", "tandem_job_waiting_seconds", CLOCK, run="math")
    return stack


def starting() -> Stack:
    """The first minutes: containers start one after another, and vLLM loads its model for eight
    minutes."""
    stack = idle()
    for series, values in stack.items():
        of_vllm = 'job="tandem-vllm"' in series
        for minute in range(8 if of_vllm else 2):
            values[minute] = 0 if series.startswith("up") else None
    return stack


JOB, PAUSE = 8, 2
CYCLE = JOB + PAUSE
"""The minutes of each job of `training`, the minutes between two jobs, and the sum of both."""


def _during_jobs(value: Value, *, first: int = 0) -> Value:
    """Gives `value` from minute `first` of each job to the job's end, and None at other times."""

    def at(minute: int) -> float | None:
        if not first <= minute % CYCLE < JOB:
            return None
        return value(minute) if callable(value) else value

    return at


def _jobs_done(minute: int) -> int:
    return (minute + PAUSE) // CYCLE


def training() -> Stack:
    """One job after another. Each job takes eight minutes, and two minutes pass before the next
    job. A job's step is served a minute after the job's end. Requests to vLLM come all the time."""
    stack = idle()
    _vllm(stack, pace=1)
    put(stack, "controller", "tandem_jobs", 3, state="queued")
    put(stack, "controller", "tandem_jobs", lambda minute: minute % CYCLE < JOB, state="running")
    _requests(stack, ok=CLOCK, errors=lambda minute: minute > 25)
    trainer = partial(put, stack, "trainer")
    trainer("tandem_train_active", lambda minute: minute % CYCLE < JOB)
    for number in range(MINUTES // CYCLE + 1):
        mine = lambda minute, number=number: 1 if minute // CYCLE == number else None  # noqa: E731
        trainer(
            "tandem_job_info", _during_jobs(mine), job_id=f"job-{number}", run="math", kind="rl"
        )
    trainer("tandem_train_last_step_timestamp_seconds", _during_jobs(CLOCK, first=2), run="math")
    trainer("tandem_job_last_progress_timestamp_seconds", _during_jobs(CLOCK), run="math")
    histogram(
        stack,
        "trainer",
        "tandem_train_step_duration_seconds",
        per_minute(1),
        at="60",
        buckets=("60", "300"),
        seconds=40.0,
    )
    for rank, uuid in enumerate(TRAINER_GPUS):
        where = {"rank": str(rank), "uuid": uuid}
        trainer("tandem_rank_up", _during_jobs(1), run="math", rank=str(rank))
        for kind, size in (("reserved", 120), ("allocated", 16), ("inactive_split", 24)):
            trainer(f"tandem_torch_memory_{kind}_bytes", _during_jobs(size * GIB), **where)
        # The jobs need different amounts of memory.
        floor = _during_jobs(lambda minute: (16 + 44 * (minute // CYCLE % 3)) * GIB, first=2)
        trainer("tandem_torch_memory_step_floor_bytes", floor, **where)
        trainer(
            "tandem_torch_memory_alloc_retries_total",
            lambda minute: 3 * _jobs_done(minute),
            **where,
        )
        trainer("tandem_torch_memory_ooms_total", 0, **where)
        trainer(
            "tandem_gpu_memory_used_bytes",
            lambda minute: 0.92 * TOTAL if minute % CYCLE < JOB else MIB,
            uuid=uuid,
        )
        trainer("tandem_job_gpu_left_bytes", 200 * MIB, uuid=uuid)
        trainer(
            "tandem_gpu_utilization_ratio",
            lambda minute: 0.9 * (2 <= minute % CYCLE < JOB),
            uuid=uuid,
        )
        trainer("tandem_gpu_throttle_active", 1, uuid=uuid, reason="sw_power_cap")
    trainer("tandem_jobs_finished_total", _jobs_done, outcome="succeeded")
    trainer("tandem_jobs_finished_total", lambda minute: minute > 100, outcome="cancelled")
    trainer("tandem_job_attempts_failed_total", lambda minute: minute > 200, error="rank_crashed")
    trainer(
        "tandem_job_attempts_failed_total",
        lambda minute: 5 * (minute > 200),
        error="runner_stopped",
    )
    histogram(
        stack,
        "trainer",
        "tandem_job_release_seconds",
        _jobs_done,
        at="2",
        buckets=("1", "2", "10"),
        seconds=1.5,
    )
    _publish(stack)
    return stack


def _publish(stack: Stack) -> None:
    """Each job's checkpoint takes 100 MiB of the shared volume. The checkpoint is served a minute
    after the job's end."""
    put(
        stack,
        "trainer",
        "tandem_policy_version",
        lambda minute: 7 + _jobs_done(minute),
        side="trainer",
        run="math",
    )
    put(
        stack,
        "inference",
        "tandem_policy_version",
        lambda minute: 7 + _jobs_done(max(minute - 1, 0)),
        side="inference",
        run="math",
    )
    for stage, le in (("copy", "1"), ("load", "1"), ("verify", "1"), ("since_checkpoint", "60")):
        histogram(
            stack,
            "inference",
            "tandem_publish_duration_seconds",
            _jobs_done,
            at=le,
            buckets=("1", "60"),
            seconds=float(le),
            stage=stage,
        )
    for target in ("controller", "trainer", "inference"):
        put(
            stack,
            target,
            "tandem_volume_free_bytes",
            lambda minute: 800 * GIB - 100 * MIB * _jobs_done(minute),
            volume="shared",
        )


def merged() -> Stack:
    """The stack `training` with merged weights. Prometheus sees a swap of the weights when a step
    arrives. There is no run in the first hour."""
    stack = training()
    put(stack, "inference", "tandem_merged_runs", lambda minute: minute >= 60)
    phase_of_merged(
        stack,
        lambda m: (
            "empty" if m < 60 else ("unverified", "swapping")[m % 2] if m % CYCLE < 2 else "served"
        ),
    )
    return stack


def phase_of_merged(stack: Stack, phase: Callable[[int], str], replica: str = "") -> None:
    for name in ("empty", "swapping", "unverified", "served", "torn"):
        put(
            stack,
            "inference",
            "tandem_merged_phase",
            lambda minute, name=name: phase(minute) == name,
            phase=name,
            replica=replica,
        )


def merged_and_sharing() -> Stack:
    """The stack `sharing` with merged weights. vLLM restarts during a job of the trainer, so vLLM
    serves its first step only after the job."""
    stack = sharing()
    put(stack, "inference", "tandem_merged_runs", 1)
    phase_of_merged(stack, lambda minute: "served" if minute < 40 or minute >= 102 else "empty")
    return stack


def resident() -> Stack:
    """The stack `training` with ranks that stay between jobs and keep 2.8 GiB of each device."""
    return _with_ranks_kept(training())


def in_long_job() -> Stack:
    """The stack `training` with one job for the whole time."""
    stack = training()
    for series in [series for series in stack if series.startswith("tandem_job_info")]:
        del stack[series]
    _run_long_job(stack, kind="rl")
    trainer = partial(put, stack, "trainer")
    for rank, uuid in enumerate(TRAINER_GPUS):
        for kind, size in (("reserved", 120), ("inactive_split", 24), ("step_floor", 16)):
            trainer(f"tandem_torch_memory_{kind}_bytes", size * GIB, rank=str(rank), uuid=uuid)
        trainer("tandem_gpu_memory_used_bytes", 0.92 * TOTAL, uuid=uuid)
        trainer("tandem_gpu_utilization_ratio", 0.9, uuid=uuid)
        trainer("tandem_rank_up", 1, run="math", rank=str(rank))
    return stack


def in_session() -> Stack:
    """The stack `in_long_job` with a session's job. The client sends a request every ten minutes.
    Every third request is an optimizer step."""
    stack = in_long_job()
    for series in [series for series in stack if series.startswith("tandem_job_info")]:
        del stack[series]
    trainer = partial(put, stack, "trainer", run="math")
    trainer("tandem_job_info", 1, job_id="calls", kind="session")
    trainer("tandem_session_idle_seconds", lambda minute: 60 * (minute % 10))
    trainer("tandem_train_last_step_timestamp_seconds", lambda minute: 1800 * (minute // 30))
    for name in ("tandem_train_step", "tandem_train_steps"):
        trainer(name, lambda minute: minute // 30)
    return stack


def sharing() -> Stack:
    """Trainer and vLLM on one GPU: a job trains for 60 of every 100 minutes, while vLLM sleeps and
    keeps its requests."""
    stack = idle()
    _vllm(stack, pace=1)

    def asleep(minute: int) -> bool:
        return minute % 100 >= 40

    def awake_so_far(minute: int) -> int:
        return minute // 100 * 40 + min(minute % 100, 40)

    engine = partial(put, stack, "vllm", **_ENGINE)
    engine("vllm:iteration_tokens_total_count", lambda minute: 1000 * awake_so_far(minute))
    engine("vllm:generation_tokens_total", lambda minute: 60000 * awake_so_far(minute))
    engine("vllm:num_requests_waiting", lambda minute: 200 * asleep(minute))
    engine("vllm:engine_sleep_state", lambda minute: not asleep(minute), sleep_state="awake")
    engine("vllm:engine_sleep_state", asleep, sleep_state="weights_offloaded")
    for series in [series for series in stack if any(uuid in series for uuid in TRAINER_GPUS)]:
        del stack[series]
    for target in ("trainer", "inference"):
        put(stack, target, "tandem_gpu_memory_total_bytes", TOTAL, uuid=INFERENCE_GPU)
        put(
            stack,
            target,
            "tandem_gpu_memory_used_bytes",
            lambda minute: (0.5 + 0.1 * (minute > 300) if asleep(minute) else 0.975) * TOTAL,
            uuid=INFERENCE_GPU,
        )
    trainer = partial(put, stack, "trainer")
    trainer("tandem_gpu_info", 1, uuid=INFERENCE_GPU, name="H200")
    trainer("tandem_gpu_utilization_ratio", lambda minute: 0.9 * asleep(minute), uuid=INFERENCE_GPU)
    trainer("tandem_job_gpu_left_bytes", 0, uuid=INFERENCE_GPU)
    trainer("tandem_train_active", asleep)
    trainer(
        "tandem_job_info",
        lambda minute: 1 if asleep(minute) else None,
        job_id="job",
        run="math",
        kind="rl",
    )
    for kind, share in (("reserved", 0.45), ("inactive_split", 0.05), ("step_floor", 0.1)):
        trainer(
            f"tandem_torch_memory_{kind}_bytes",
            lambda minute, share=share: share * TOTAL if asleep(minute) else None,
            rank="0",
            uuid=INFERENCE_GPU,
        )
    put(stack, "controller", "tandem_jobs", asleep, state="running")
    return stack


def sharing_in_one_pod() -> Stack:
    """The stack `sharing` in Kubernetes: the containers of trainer and inference are in one pod."""
    stack = sharing()
    in_one_pod(stack)
    return stack


def in_one_pod(stack: Stack) -> None:
    for series in list(stack):
        values = stack.pop(series)
        stack[re.sub(r'\bpod="(trainer|inference)"', 'pod="tandem-engine-0"', series)] = values


def only_verifying() -> Stack:
    """The stack `training` without sampling: vLLM answers only the publisher's requests for one
    token."""
    stack = training()
    _vllm(stack, pace=0)
    for metric, labels in (
        ("generation_tokens_total", {}),
        ("request_success_total", {"finished_reason": "length"}),
        ("request_generation_tokens_bucket", {"le": "1.0"}),
    ):
        put(
            stack,
            "vllm",
            f"vllm:{metric}",
            lambda minute: 8 * _jobs_done(minute),
            **_ENGINE,
            **labels,
        )
    return stack
