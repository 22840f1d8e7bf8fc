"""Faults, each as a healthy stack with some of its series changed, and what fires when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from monitoring.stacks import (
    GIB,
    MIB,
    MINUTES,
    TOTAL,
    Stack,
    Values,
    each,
    histogram,
    idle,
    resident_idle,
    series,
    training,
)

Expected = tuple[int, set[str]]


@dataclass(frozen=True, eq=False)
class Fault:
    name: str
    base: Callable[[], Stack]
    change: Callable[[Stack], None]
    expected: tuple[Expected, ...]
    """(after how many minutes, which alerts fire then): one moment before, one at which they do."""

    def stack(self) -> Stack:
        made = self.base()
        self.change(made)
        return made


CASES: list[Fault] = []


def fault(name: str, base: Callable[[], Stack], *expected: Expected) -> Callable[[Callable[[Stack], None]], None]:
    def add(change: Callable[[Stack], None]) -> None:
        CASES.append(Fault(name, base, change, expected))

    return add


def put(stack: Stack, target: str, name: str, value: Callable[[int], float | None] | float, **labels: str) -> None:
    stack[series(target, name, **labels)] = each(value)


def drop(stack: Stack, target: str, prefix: str = "", *, since: int = 0) -> None:
    """No samples of the target's series of this name from minute `since` on."""
    own = series(target, "up").split("{")[1].removesuffix("}").split(",")
    for key, values in stack.items():
        if key.startswith(prefix) and all(label in key for label in own):
            values[since:] = [None] * len(values[since:])


def from_minute(begin: int, value: float, before: float | None = 0.0) -> Callable[[int], float | None]:
    return lambda minute: value if minute >= begin else before


def gone(stack: Stack, target: str, since: int) -> None:
    """The target stops answering at minute `since`."""
    drop(stack, target, since=since)
    put(stack, target, "up", from_minute(since, 0, before=1))


def long_job(stack: Stack) -> None:
    """One job for the whole time, instead of one after another."""
    for key in [key for key in stack if key.startswith("tandem_job_info")]:
        del stack[key]
    put(stack, "trainer", "tandem_job_info", 1, job_id="long", run="math", kind="rl")
    put(stack, "trainer", "tandem_train_active", 1)
    put(stack, "controller", "tandem_jobs", 1, state="running")
    put(stack, "trainer", "tandem_train_last_step_timestamp_seconds", lambda minute: 60.0 * minute)
    put(stack, "trainer", "tandem_job_last_progress_timestamp_seconds", lambda minute: 60.0 * minute)
    fills: dict[str, Callable[[int], float | None] | float] = {
        "tandem_torch_memory_reserved_bytes": 120.0 * GIB,
        "tandem_torch_memory_inactive_split_bytes": 24.0 * GIB,
        "tandem_torch_memory_step_floor_bytes": 16.0 * GIB,
        "tandem_gpu_memory_used_bytes": 0.92 * TOTAL,
        "tandem_gpu_utilization_ratio": 0.9,
    }
    for key in stack:
        name = key.split("{")[0]
        if name in fills and 'pod="trainer"' in key:
            stack[key] = each(fills[name])
    for rank in "01":
        put(stack, "trainer", "tandem_rank_up", 1, rank=rank)


def in_long_job() -> Stack:
    stack = training()
    long_job(stack)
    return stack


# ---------------------------------------------------------------- targets and processes


@fault("an exporter is gone", idle, (22, set()), (24, {"TandemTargetDown"}))
def _(stack: Stack) -> None:
    gone(stack, "inference", 20)


@fault("the controller is gone", training, (22, set()), (24, {"TandemTargetDown"}), (60, {"TandemTargetDown"}))
def _(stack: Stack) -> None:
    gone(stack, "controller", 20)


@fault("vLLM does not come up", idle, (9, set()), (10, {"TandemVLLMDown"}))
def _(stack: Stack) -> None:
    gone(stack, "vllm", 0)


for _target in ("controller", "trainer", "inference", "vllm"):

    @fault(f"no {_target} is discovered", idle, (33, set()), (36, {"TandemTargetAbsent"}))
    def _(stack: Stack, target: str = _target) -> None:
        drop(stack, target, since=20)


@fault("another build", idle, (29, set()), (30, {"TandemVersionMismatch"}))
def _(stack: Stack) -> None:
    drop(stack, "trainer", "tandem_build_info")
    put(stack, "trainer", "tandem_build_info", 1, version="0.1.0", revision="def")


@fault("the publisher stays down", idle, (24, set()), (25, {"TandemProcessDown"}))
def _(stack: Stack) -> None:
    put(stack, "inference", "tandem_supervisor_process_up", from_minute(20, 0, before=1), program="publisher")


@fault("vLLM crashes every four minutes", idle, (30, set()), (46, {"TandemProcessFlapping"}))
def _(stack: Stack) -> None:
    put(stack, "inference", "tandem_supervisor_process_start_time_seconds",
        lambda minute: 60.0 * (minute // 4 * 4) if minute > 30 else 5.0, program="vllm")  # fmt: skip


@fault("a program is started again three times", idle, (46, set()))
def _(stack: Stack) -> None:
    put(stack, "inference", "tandem_supervisor_process_start_time_seconds",
        lambda minute: 60.0 * (min(minute, 42) // 4 * 4) if minute > 31 else 5.0, program="vllm")  # fmt: skip


@fault("the controller crashes every four minutes", idle, (30, set()), (46, {"TandemProcessFlapping"}))
def _(stack: Stack) -> None:
    put(stack, "controller", "process_start_time_seconds",
        lambda minute: 60.0 * (minute // 4 * 4) if minute > 30 else 5.0)  # fmt: skip


@fault("a collector fails", idle, (24, set()), (25, {"TandemCollectorFailing"}))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_collector_success", from_minute(20, 0, before=1), collector="nvml")
    drop(stack, "trainer", "tandem_gpu_", since=20)


# ---------------------------------------------------------------- jobs


@fault("the runner does not claim", idle, (29, set()), (30, {"TandemJobQueueStalled"}))
def _(stack: Stack) -> None:
    put(stack, "controller", "tandem_jobs", from_minute(20, 2), state="queued")


@fault("the runner hangs with its ranks", in_long_job, (20, set()), (92, {"TandemTrainerStuck"}),
       (93, {"TandemJobStuck", "TandemTrainerStuck"}))  # fmt: skip
def _(stack: Stack) -> None:
    for name in ("tandem_train_last_step_timestamp_seconds", "tandem_job_last_progress_timestamp_seconds"):
        put(stack, "trainer", name, lambda minute: 60.0 * min(minute, 60))


@fault("ranks are silent for twenty minutes, as the job allows", in_long_job, (81, set()), (90, set()))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_job_last_progress_timestamp_seconds",
        lambda minute: 60.0 * (60 if 60 <= minute <= 80 else minute))  # fmt: skip


@fault("a job beats but makes no steps", in_long_job, (75, set()), (78, {"TandemTrainerStuck"}))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_train_last_step_timestamp_seconds", lambda minute: 60.0 * min(minute, 60))


@fault("steps take ten minutes, as they always did", in_long_job, (300, set()), (438, set()),
       (445, {"TandemTrainerStuck"}))  # fmt: skip
def _(stack: Stack) -> None:
    histogram(stack, "trainer", "tandem_train_step_duration_seconds", lambda minute: min(minute, 400) // 10, at="+Inf",
              buckets=("60", "300"), seconds=600.0)  # fmt: skip
    put(stack, "trainer", "tandem_train_last_step_timestamp_seconds", lambda minute: 600.0 * (min(minute, 400) // 10))


@fault("the first steps in hours never come", in_long_job, (416, set()), (418, {"TandemTrainerStuck"}))
def _(stack: Stack) -> None:
    histogram(stack, "trainer", "tandem_train_step_duration_seconds", lambda _: 50, at="60", buckets=("60", "300"),
              seconds=40.0)  # fmt: skip
    put(stack, "trainer", "tandem_train_last_step_timestamp_seconds", lambda minute: 60.0 * min(minute, 400))


@fault("a rank falls silent", in_long_job, (24, set()), (25, {"TandemRankDown"}))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_rank_up", from_minute(20, 0, before=1), rank="1")


@fault("a job fails", training, (20, set()), (22, {"TandemJobFailed"}), (60, set()))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_jobs_finished_total", from_minute(21, 1), outcome="failed")


@fault("attempts fail again and again", training, (35, set()), (45, {"TandemAttemptsFailing"}), (120, set()))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_job_attempts_failed_total",
        lambda minute: float(min(max((minute - 10) // 10, 0), 4)), error="rank_hung")  # fmt: skip


@fault("a gradient is infinite", training, (20, set()), (22, {"TandemNonFinite", "TandemJobFailed"}))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_job_attempts_failed_total", from_minute(21, 1), error="non_finite")
    put(stack, "trainer", "tandem_jobs_finished_total", from_minute(21, 1), outcome="failed")


# ---------------------------------------------------------------- memory


@fault("an attempt runs out of memory", training, (20, set()), (22, {"TandemOutOfMemory"}))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_job_attempts_failed_total", from_minute(21, 1), error="oom")


@fault("a rank counts an out of memory", training, (20, set()), (22, {"TandemOutOfMemory"}))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_torch_memory_ooms_total", from_minute(21, 1), rank="0", uuid="GPU-0")


@fault("somebody else uses the trainer's GPU", idle, (22, set()), (23, {"TandemGPUMemoryOrphaned"}))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_gpu_memory_used_bytes", from_minute(20, 700.0 * MIB), uuid="GPU-1")


@fault("a driver's own bookkeeping", idle, (59, set()))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_gpu_memory_used_bytes", 200.0 * MIB, uuid="GPU-1")
    put(stack, "trainer", "tandem_job_gpu_left_bytes", 200.0 * MIB, uuid="GPU-1")
    put(stack, "inference", "tandem_supervisor_process_up", from_minute(55, 0, before=1), program="vllm")
    put(
        stack,
        "inference",
        "tandem_gpu_memory_used_bytes",
        from_minute(55, 1.0 * GIB, before=0.86 * TOTAL),
        uuid="GPU-2",
    )


@fault("a killed vLLM leaves a little", idle, (22, set()), (23, {"TandemGPUMemoryOrphaned"}))
def _(stack: Stack) -> None:
    put(stack, "inference", "tandem_supervisor_process_up", from_minute(20, 0, before=1), program="vllm")
    put(
        stack,
        "inference",
        "tandem_gpu_memory_used_bytes",
        from_minute(20, 3.0 * GIB, before=0.86 * TOTAL),
        uuid="GPU-2",
    )


@fault("a killed vLLM's engine stays on the GPU", idle, (22, set()), (23, {"TandemGPUMemoryOrphaned"}))
def _(stack: Stack) -> None:
    put(stack, "inference", "tandem_supervisor_process_up", from_minute(20, 0, before=1), program="vllm")


@fault("resident ranks keep more and more", resident_idle, (20, set()), (26, {"TandemGPUMemoryOrphaned"}))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_gpu_memory_used_bytes", from_minute(21, 9.0 * GIB, before=2.8 * GIB), uuid="GPU-0")


@fault("jobs leave memory, one after another", in_long_job, (20, set()), (22, {"TandemJobLeftMemory"}))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_job_gpu_left_bytes", from_minute(21, 300.0 * MIB), uuid="GPU-0")


@fault("what was left is gone by now", idle, (20, set()))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_job_gpu_left_bytes", 900.0 * MIB, uuid="GPU-0")


@fault("memory comes back late", training, (5, set()), (30, {"TandemReleaseSlow"}))
def _(stack: Stack) -> None:
    histogram(stack, "trainer", "tandem_job_release_seconds", lambda minute: minute // 10, at="10",
              buckets=("1", "2", "5", "10", "20"), seconds=8.0)  # fmt: skip


@fault("a device is nearly full", in_long_job, (29, set()), (31, {"TandemGPUMemoryNearlyFull"}))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_gpu_memory_used_bytes", from_minute(20, 0.98 * TOTAL, before=0.9 * TOTAL),
        uuid="GPU-0")  # fmt: skip


@fault("a step leaks", in_long_job, (44, set()), (65, {"TandemTorchLeakPredictsOOM"}))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_torch_memory_step_floor_bytes",
        lambda minute: (16 + 2 * max(minute - 40, 0)) * GIB, rank="1", uuid="GPU-1")  # fmt: skip


@fault("memory is in pieces, and full", in_long_job, (29, set()), (31, {"TandemTorchFragmentation"}))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_torch_memory_inactive_split_bytes",
        from_minute(20, 50.0 * GIB, before=1.0 * GIB), rank="0", uuid="GPU-0")  # fmt: skip


@fault("memory is in pieces, and plenty", in_long_job, (60, set()))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_torch_memory_inactive_split_bytes", 50.0 * GIB, rank="0", uuid="GPU-0")
    put(stack, "trainer", "tandem_gpu_memory_used_bytes", 0.8 * TOTAL, uuid="GPU-0")


@fault("allocations at the limit", in_long_job, (20, set()), (28, {"TandemTorchAllocRetries"}))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_torch_memory_alloc_retries_total",
        lambda minute: float(max(minute - 20, 0)), rank="0", uuid="GPU-0")  # fmt: skip


@fault("vLLM's memory grows", idle, (410, set()), (440, {"TandemInferenceMemoryDrift"}))
def _(stack: Stack) -> None:
    # Warm-up, which is no drift, then 10 MiB a minute.
    put(stack, "inference", "tandem_gpu_memory_used_bytes",
        lambda minute: (0.5 if minute < 3 else 0.8) * TOTAL + 10 * MIB * minute, uuid="GPU-2")  # fmt: skip


@fault("a job computes nothing", in_long_job, (50, set()), (60, {"TandemGPUIdleWhileAllocated"}))
def _(stack: Stack) -> None:
    for uuid in ("GPU-0", "GPU-1"):
        put(stack, "trainer", "tandem_gpu_utilization_ratio", from_minute(20, 0.015, before=0.9), uuid=uuid)


@fault("a job computes a little", in_long_job, (60, set()))
def _(stack: Stack) -> None:
    for uuid in ("GPU-0", "GPU-1"):
        put(stack, "trainer", "tandem_gpu_utilization_ratio", 0.05, uuid=uuid)


@fault("a job reads its data before it takes the GPU", in_long_job, (60, set()))
def _(stack: Stack) -> None:
    for uuid in ("GPU-0", "GPU-1"):
        put(stack, "trainer", "tandem_gpu_utilization_ratio", 0, uuid=uuid)
        put(stack, "trainer", "tandem_gpu_memory_used_bytes", 0.05 * TOTAL, uuid=uuid)


@fault("a large model is loaded after an hour without jobs", idle, (68, set()), (72, set()))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_train_active", from_minute(60, 1))
    put(stack, "trainer", "tandem_job_info", from_minute(60, 1, before=None), job_id="long", run="math", kind="rl")
    put(stack, "trainer", "tandem_gpu_memory_used_bytes", from_minute(61, 0.3 * TOTAL), uuid="GPU-0")


@fault("/dev/shm fills", idle, (24, set()), (25, {"TandemShmNearlyFull"}))
def _(stack: Stack) -> None:
    put(stack, "inference", "tandem_volume_free_bytes", from_minute(20, GIB, before=16.0 * GIB), volume="shm")


# ---------------------------------------------------------------- the volume


def _shared(stack: Stack, value: Callable[[int], float | None]) -> None:
    for target in ("controller", "trainer", "inference"):
        put(stack, target, "tandem_volume_free_bytes", value, volume="shared")


@fault("the volume is nearly full", idle, (24, set()), (26, {"TandemVolumeNearlyFull"}))
def _(stack: Stack) -> None:
    _shared(stack, from_minute(20, 50.0 * GIB, before=150.0 * GIB))


@fault("the volume fills within a day", idle, (200, set()), (240, {"TandemVolumeFilling"}))
def _(stack: Stack) -> None:
    _shared(stack, lambda minute: 800.0 * GIB - GIB * minute)


@fault("a model is downloaded in the first minutes", idle, (30, set()), (120, set()), (230, set()))
def _(stack: Stack) -> None:
    _shared(stack, lambda minute: 800.0 * GIB - 10 * GIB * min(minute, 14))


@fault("the volume is slow", idle, (29, set()), (30, {"TandemVolumeSlow"}))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_volume_write_probe_seconds", from_minute(20, 4, before=0.004), volume="shared")


# ---------------------------------------------------------------- serving


@fault("a checkpoint is refused", training, (20, set()), (22, {"TandemPublishRefused"}))
def _(stack: Stack) -> None:
    put(stack, "inference", "tandem_policy_refused", from_minute(21, 1), run="math")


@fault("nothing more is served", training, (40, set()), (54, {"TandemPolicyLag"}))
def _(stack: Stack) -> None:
    served: Values = each(lambda minute: 7.0 + (min(minute, 30) + 1) // 10)
    stack[series("inference", "tandem_policy_version", side="inference", run="math")] = served


@fault("a new run's first steps are never served", training, (24, set()), (34, {"TandemPolicyLag"}))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_policy_version", from_minute(17, 1), side="trainer", run="new")


@fault("publishing is slow", training, (20, set()), (60, {"TandemPublishSlow"}))
def _(stack: Stack) -> None:
    histogram(stack, "inference", "tandem_publish_duration_seconds",
              lambda minute: max(minute - 20, 0) // 10, at="60", buckets=("1", "30", "60"), seconds=50.0,
              stage="copy")  # fmt: skip


@fault("the engine hangs", training, (30, set()), (33, {"TandemVLLMEngineHung"}))
def _(stack: Stack) -> None:
    engine = {"model_name": "tiny", "engine": "0"}
    put(stack, "vllm", "vllm:iteration_tokens_total_count", lambda minute: 1000.0 * min(minute, 20), **engine)


@fault("requests queue", training, (35, set()), (41, {"TandemVLLMQueueBackedUp"}))
def _(stack: Stack) -> None:
    put(stack, "vllm", "vllm:num_requests_waiting", from_minute(20, 100), model_name="tiny", engine="0")


@fault("the KV cache is too small", training, (29, set()), (35, {"TandemVLLMKVThrash"}))
def _(stack: Stack) -> None:
    put(stack, "vllm", "vllm:num_preemptions_total", lambda minute: 60.0 * max(minute - 20, 0), model_name="tiny",
        engine="0")  # fmt: skip


@fault("half of the samples are cut off", training, (20, set()), (70, {"TandemTruncationHigh"}))
def _(stack: Stack) -> None:
    put(stack, "vllm", "vllm:request_success_total", lambda minute: 95.0 * max(minute - 20, 0), model_name="tiny",
        engine="0", finished_reason="length")  # fmt: skip


@fault("vLLM answers 500", training, (24, set()), (30, {"TandemVLLMErrors"}))
def _(stack: Stack) -> None:
    put(stack, "vllm", "http_requests_total", lambda minute: 10.0 * max(minute - 20, 0),
        handler="/v1/completions", method="POST", status="5xx")  # fmt: skip


@fault("the controller answers 503", training, (24, set()), (30, {"TandemControllerErrors"}))
def _(stack: Stack) -> None:
    put(stack, "controller", "tandem_http_requests_total", lambda minute: 10.0 * max(minute - 20, 0),
        route="/v1/jobs", method="GET", status_class="5xx")  # fmt: skip


# ---------------------------------------------------------------- devices


@fault("one of two GPUs is gone", idle, (28, set()), (31, {"TandemGPUMissing"}))
def _(stack: Stack) -> None:
    for key in [key for key in stack if 'uuid="GPU-1"' in key]:
        stack[key][15:] = [None] * (MINUTES - 14)


@fault("the only GPU is gone", idle, (28, set()), (35, {"TandemGPUMissing"}))
def _(stack: Stack) -> None:
    for key in [key for key in stack if 'uuid="GPU-2"' in key]:
        stack[key][15:] = [None] * (MINUTES - 14)


@fault("ECC", idle, (20, set()), (22, {"TandemGPUUncorrectableECC"}), (90, set()))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_gpu_ecc_uncorrected_errors_total", from_minute(21, 3, before=2), uuid="GPU-0")


@fault("a GPU is too hot", training, (24, set()), (25, {"TandemGPUThrottled"}))
def _(stack: Stack) -> None:
    put(stack, "trainer", "tandem_gpu_throttle_active", from_minute(20, 1), uuid="GPU-0", reason="hw_thermal")


# ---------------------------------------------------------------- Kubernetes


def _pod(stack: Stack, name: str, value: Callable[[int], float | None] | float, **labels: str) -> None:
    every = {"job": "kube-state-metrics", "namespace": "rl", "pod": "tandem-trainer-0"} | labels
    stack[name + "{" + ",".join(f'{key}="{text}"' for key, text in every.items()) + "}"] = each(value)


@fault("a container is killed for its memory", idle, (20, set()), (22, {"TandemContainerOOMKilled"}), (50, set()))
def _(stack: Stack) -> None:
    _pod(stack, "kube_pod_container_status_restarts_total", from_minute(21, 1), container="trainer")
    _pod(stack, "kube_pod_container_status_last_terminated_reason", from_minute(21, 1), container="trainer",
         reason="OOMKilled")  # fmt: skip


@fault("a container restarts", idle, (20, set()), (29, {"TandemContainerRestarting"}))
def _(stack: Stack) -> None:
    _pod(stack, "kube_pod_container_status_restarts_total", lambda minute: float(max(min(minute, 40) - 20, 0) // 2),
         container="controller")  # fmt: skip


@fault("a pod has no node", idle, (34, set()), (35, {"TandemPodPending"}))
def _(stack: Stack) -> None:
    _pod(stack, "kube_pod_status_phase", from_minute(20, 1), phase="Pending")
