"""Faults. Each fault changes some series of a stack, and names the alerts that fire and their
times."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from monitoring.series import Stack, Value, drop, histogram, put
from monitoring.stacks import (
    GIB,
    INFERENCE_GPU,
    MIB,
    TOTAL,
    TRAINER_GPUS,
    idle,
    in_long_job,
    in_one_pod,
    in_session,
    merged,
    only_verifying,
    phase_of_merged,
    replicas,
    resident_idle,
    sharing,
    training,
    waiting,
)

Change = Callable[[Stack], None]
NONE: set[str] = set()


@dataclass(frozen=True)
class Case:
    name: str
    base: Callable[[], Stack]
    expected: dict[int, set[str]]
    """Minute -> the only alerts that fire in this minute. A fault has one minute before its alert,
    and one minute after it."""
    changes: tuple[Change, ...] = ()

    def stack(self) -> Stack:
        stack = self.base()
        for change in self.changes:
            change(stack)
        return stack


FAULTS: list[Case] = []


def fault(
    name: str, base: Callable[[], Stack], expected: dict[int, set[str]], *changes: Change
) -> None:
    FAULTS.append(Case(name, base, expected, changes))


def _as_change(function: Callable[..., None]) -> Callable[..., Change]:
    """Turns `function`, whose first argument is the stack, into a function that returns a change.
    The returned function takes the other arguments of `function`. The change takes the stack."""
    return lambda *arguments, **named: lambda stack: function(stack, *arguments, **named)


setting, dropping, counting = _as_change(put), _as_change(drop), _as_change(histogram)
phase = _as_change(phase_of_merged)


def since(begin: int, value: float, before: float | None = 0.0) -> Value:
    """A value that changes from `before` to `value` at minute `begin`."""
    return lambda minute: value if minute >= begin else before


def growing(begin: int, per_minute: float) -> Value:
    """The value is 0 until minute `begin`, and then grows by `per_minute` each minute."""
    return lambda minute: per_minute * max(minute - begin, 0)


def stopping(last: int) -> Value:
    """The time in seconds, which stops at minute `last`."""
    return lambda minute: 60.0 * min(minute, last)


def gone(target: str, begin: int) -> tuple[Change, Change]:
    """The target does not answer from minute `begin` on."""
    return dropping(target, since=begin), setting(target, "up", since(begin, 0, before=1))


def shared_volume(value: Value) -> list[Change]:
    """Free bytes of the shared volume, as all containers see it."""
    return [
        setting(target, "tandem_volume_free_bytes", value, volume="shared")
        for target in ("controller", "trainer", "inference")
    ]


def used(uuid: str, value: Value) -> Change:
    target = "inference" if uuid == INFERENCE_GPU else "trainer"
    return setting(target, "tandem_gpu_memory_used_bytes", value, uuid=uuid)


def of_trainer_gpus(name: str, value: Value) -> list[Change]:
    return [setting("trainer", name, value, uuid=uuid) for uuid in TRAINER_GPUS]


kube = partial(setting, "kube-state-metrics")
GPU_0, GPU_1 = TRAINER_GPUS
RANK_0, RANK_1 = {"rank": "0", "uuid": GPU_0}, {"rank": "1", "uuid": GPU_1}
ENGINE = {"model_name": "tiny", "engine": "0"}
LAST_STEP = "tandem_train_last_step_timestamp_seconds"
PROGRESS = "tandem_job_last_progress_timestamp_seconds"
IDLE, STUCK = "tandem_session_idle_seconds", "TandemTrainerStuck"
STEPS = "tandem_train_step_duration_seconds"
STEPS_OF_VLLM = "vllm:iteration_tokens_total_count"
START = "tandem_supervisor_process_start_time_seconds"
UP = "tandem_supervisor_process_up"
NEW_POD = {"pod": "tandem-controller-2", "instance": "tandem-controller-2:8080"}
FAILED = "tandem_job_attempts_failed_total"
FINISHED = "tandem_jobs_finished_total"
SPLIT = "tandem_torch_memory_inactive_split_bytes"
UTILIZATION = "tandem_gpu_utilization_ratio"
VLLM_IS_DOWN = setting("inference", UP, since(20, 0, before=1), program="vllm")

fault("an exporter is gone", idle, {22: NONE, 24: {"TandemTargetDown"}}, *gone("inference", 20))
fault(
    "the controller is gone",
    training,
    {22: NONE, 24: {"TandemTargetDown"}, 60: {"TandemTargetDown"}},
    *gone("controller", 20),
)
fault(
    "an exporter of a shared pod is gone",
    sharing,
    {12: NONE, 14: {"TandemTargetDown"}, 30: {"TandemTargetDown"}, 120: {"TandemTargetDown"}},
    *gone("inference", 10),
    in_one_pod,
)
fault("vLLM does not come up", idle, {9: NONE, 10: {"TandemVLLMDown"}}, *gone("vllm", 0))
for _target in ("controller", "trainer", "inference", "vllm"):
    fault(
        f"no {_target} is discovered",
        idle,
        {33: NONE, 36: {"TandemTargetAbsent"}},
        dropping(_target, since=20),
    )
fault(
    "another build",
    idle,
    {29: NONE, 30: {"TandemVersionMismatch"}},
    dropping("trainer", "tandem_build_info"),
    setting("trainer", "tandem_build_info", 1, version="0.1.0", revision="def"),
)
fault(
    "the publisher stays down",
    idle,
    {24: NONE, 25: {"TandemProcessDown"}},
    setting("inference", UP, since(20, 0, before=1), program="publisher"),
)
fault(
    "vLLM crashes every four minutes",
    idle,
    {30: NONE, 46: {"TandemProcessFlapping"}},
    setting("inference", START, lambda m: 60.0 * (m // 4 * 4) if m > 30 else 5.0, program="vllm"),
)
fault(
    "a program is started again three times",
    idle,
    {46: NONE},
    setting(
        "inference",
        START,
        lambda m: 60.0 * (min(m, 42) // 4 * 4) if m > 31 else 5.0,
        program="vllm",
    ),
)
fault(
    "the controller crashes every four minutes",
    idle,
    {30: NONE, 46: {"TandemProcessFlapping"}},
    setting(
        "controller", "process_start_time_seconds", lambda m: 60.0 * (m // 4 * 4) if m > 30 else 5.0
    ),
)
fault(
    "a collector fails",
    idle,
    {24: NONE, 25: {"TandemCollectorFailing"}, 45: {"TandemCollectorFailing"}},
    setting("trainer", "tandem_collector_success", since(20, 0, before=1), collector="nvml"),
    dropping("trainer", "tandem_gpu_", since=20),
)

fault(
    "the runner does not claim",
    idle,
    {29: NONE, 30: {"TandemJobQueueStalled"}},
    setting("controller", "tandem_jobs", since(20, 2), state="queued"),
)
fault(
    "Kueue admits no job for hours",
    waiting,
    {40: NONE, 239: NONE, 242: {"TandemJobWaiting"}, 320: {"TandemJobWaiting"}},
)
SILENT = [
    setting("trainer", IDLE, growing(20, 60), run="math"),
    setting("trainer", LAST_STEP, stopping(20), run="math"),
    *of_trainer_gpus(UTILIZATION, since(20, 0.0, before=0.9)),
]
fault(
    "a session's client sends nothing for hours, and its ranks stay",
    in_session,
    {49: NONE, 51: {"TandemSessionIdle"}, 60: {"TandemSessionIdle"}, 200: {"TandemSessionIdle"}},
    *SILENT,
)
fault(
    "a session's client sends a request every half an hour",
    in_session,
    {49: NONE, 51: NONE, 80: NONE},
    setting("trainer", IDLE, lambda m: 60.0 * (m % 30), run="math"),
)
fault(
    "a session's ranks compute one request for hours",
    in_session,
    {50: NONE, 60: {"TandemGPUIdleWhileAllocated"}, 145: {"TandemGPUIdleWhileAllocated", STUCK}},
    *SILENT,
    setting("trainer", IDLE, 0, run="math"),
)
fault(
    "the runner hangs with its ranks",
    in_long_job,
    {20: NONE, 92: {"TandemTrainerStuck"}, 93: {"TandemJobStuck", "TandemTrainerStuck"}},
    setting("trainer", LAST_STEP, stopping(60), run="math"),
    setting("trainer", PROGRESS, stopping(60), run="math"),
)
fault(
    "ranks are silent for twenty minutes, as the job allows",
    in_long_job,
    {81: NONE, 90: NONE},
    setting("trainer", PROGRESS, lambda m: 60.0 * (60 if 60 <= m <= 80 else m), run="math"),
)
fault(
    "a job beats but makes no steps",
    in_long_job,
    {75: NONE, 78: {"TandemTrainerStuck"}},
    setting("trainer", LAST_STEP, stopping(60), run="math"),
)
fault(
    "after its last step a job writes its checkpoint for long, and then hangs",
    in_long_job,
    {78: NONE, 170: NONE, 190: {"TandemTrainerStuck"}},
    setting("trainer", "tandem_train_step", lambda _: 8, run="math"),
    setting("trainer", "tandem_train_steps", lambda _: 8, run="math"),
    setting("trainer", LAST_STEP, stopping(60), run="math"),
)
fault(
    "steps take ten minutes, as they always did",
    in_long_job,
    {300: NONE, 438: NONE, 445: {"TandemTrainerStuck"}},
    counting(
        "trainer",
        STEPS,
        lambda m: min(m, 400) // 10,
        at="+Inf",
        buckets=("60", "300"),
        seconds=600.0,
    ),
    setting("trainer", LAST_STEP, lambda m: 600.0 * (min(m, 400) // 10), run="math"),
)
fault(
    "the first steps in hours never come",
    in_long_job,
    {416: NONE, 418: {"TandemTrainerStuck"}},
    counting("trainer", STEPS, lambda _: 50, at="60", buckets=("60", "300"), seconds=40.0),
    setting("trainer", LAST_STEP, stopping(400), run="math"),
)
fault(
    "a rank falls silent",
    in_long_job,
    {24: NONE, 25: {"TandemRankDown"}},
    setting("trainer", "tandem_rank_up", since(20, 0, before=1), run="math", rank="1"),
)
fault(
    "a job fails",
    training,
    {20: NONE, 22: {"TandemJobFailed"}, 60: NONE},
    setting("trainer", FINISHED, since(21, 1), outcome="failed"),
)
fault(
    "attempts fail again and again",
    training,
    {35: NONE, 45: {"TandemAttemptsFailing"}, 120: NONE},
    setting("trainer", FAILED, lambda m: min(max((m - 10) // 10, 0), 4), error="rank_hung"),
)
fault(
    "Kueue preempts attempts again and again",
    training,
    {45: NONE},
    setting("trainer", FAILED, lambda m: min(max((m - 10) // 10, 0), 4), error="preempted"),
)
fault(
    "a gradient is infinite",
    training,
    {20: NONE, 22: {"TandemNonFinite", "TandemJobFailed"}},
    setting("trainer", FAILED, since(21, 1), error="non_finite"),
    setting("trainer", FINISHED, since(21, 1), outcome="failed"),
)

fault(
    "an attempt runs out of memory",
    training,
    {20: NONE, 22: {"TandemOutOfMemory"}},
    setting("trainer", FAILED, since(21, 1), error="oom"),
)
fault(
    "a rank recovers from an out of memory",
    training,
    {59: NONE},
    setting("trainer", "tandem_torch_memory_ooms_total", since(21, 1), **RANK_0),
)
fault(
    "another program uses the trainer's GPU",
    idle,
    {22: NONE, 23: {"TandemGPUMemoryOrphaned"}},
    used(GPU_1, since(20, 700.0 * MIB)),
)
fault(
    "the driver's own bookkeeping",
    idle,
    {59: NONE},
    used(GPU_1, 200.0 * MIB),
    setting("trainer", "tandem_job_gpu_left_bytes", 200.0 * MIB, uuid=GPU_1),
    setting("inference", UP, since(55, 0, before=1), program="vllm"),
    used(INFERENCE_GPU, since(55, 1.0 * GIB, before=0.86 * TOTAL)),
)
fault(
    "a killed vLLM leaves a little",
    idle,
    {22: NONE, 23: {"TandemGPUMemoryOrphaned"}},
    VLLM_IS_DOWN,
    used(INFERENCE_GPU, since(20, 3.0 * GIB, before=0.86 * TOTAL)),
)
fault(
    "a killed vLLM's engine stays on the GPU",
    idle,
    {22: NONE, 23: {"TandemGPUMemoryOrphaned"}},
    VLLM_IS_DOWN,
)
fault(
    "resident ranks keep more and more",
    resident_idle,
    {20: NONE, 26: {"TandemGPUMemoryOrphaned"}},
    used(GPU_0, since(21, 9.0 * GIB, before=2.8 * GIB)),
)
fault(
    "jobs leave memory, one after another",
    in_long_job,
    {20: NONE, 22: {"TandemJobLeftMemory"}},
    setting("trainer", "tandem_job_gpu_left_bytes", since(21, 300.0 * MIB), uuid=GPU_0),
)
fault(
    "what was left is gone by now",
    idle,
    {20: NONE},
    setting("trainer", "tandem_job_gpu_left_bytes", 900.0 * MIB, uuid=GPU_0),
)
fault(
    "memory comes back late",
    training,
    {5: NONE, 30: {"TandemReleaseSlow"}},
    counting(
        "trainer",
        "tandem_job_release_seconds",
        lambda m: m // 10,
        at="10",
        buckets=("1", "2", "5", "10", "20"),
        seconds=8.0,
    ),
)
fault(
    "a device is nearly full",
    in_long_job,
    {29: NONE, 31: {"TandemGPUMemoryNearlyFull"}},
    used(GPU_0, since(20, 0.98 * TOTAL, before=0.9 * TOTAL)),
)
fault(
    "a step leaks",
    in_long_job,
    {44: NONE, 65: {"TandemTorchLeakPredictsOOM"}},
    setting(
        "trainer",
        "tandem_torch_memory_step_floor_bytes",
        lambda m: (16 + 2 * max(m - 40, 0)) * GIB,
        **RANK_1,
    ),
)
fault(
    "memory is in pieces, and full",
    in_long_job,
    {29: NONE, 31: {"TandemTorchFragmentation"}},
    setting("trainer", SPLIT, since(20, 50.0 * GIB, before=1.0 * GIB), **RANK_0),
)
fault(
    "memory is in pieces, and plenty",
    in_long_job,
    {60: NONE},
    setting("trainer", SPLIT, 50.0 * GIB, **RANK_0),
    used(GPU_0, 0.8 * TOTAL),
)
fault(
    "allocations at the limit",
    in_long_job,
    {20: NONE, 28: {"TandemTorchAllocRetries"}},
    setting("trainer", "tandem_torch_memory_alloc_retries_total", growing(20, 1), **RANK_0),
)
# The memory jumps in a warm-up, which does not count as drift, and grows by 10 MiB a minute.
fault(
    "vLLM's memory grows",
    idle,
    {410: NONE, 440: {"TandemInferenceMemoryDrift"}},
    used(INFERENCE_GPU, lambda m: (0.5 if m < 3 else 0.8) * TOTAL + 10 * MIB * m),
)
fault(
    "a job computes nothing",
    in_long_job,
    {50: NONE, 60: {"TandemGPUIdleWhileAllocated"}},
    *of_trainer_gpus(UTILIZATION, since(20, 0.015, before=0.9)),
)
fault("a job computes a little", in_long_job, {60: NONE}, *of_trainer_gpus(UTILIZATION, 0.05))
fault(
    "a job reads its data before it takes the GPU",
    in_long_job,
    {60: NONE},
    *of_trainer_gpus(UTILIZATION, 0),
    *of_trainer_gpus("tandem_gpu_memory_used_bytes", 0.05 * TOTAL),
)
fault(
    "a large model is loaded after an hour without jobs",
    idle,
    {68: NONE, 72: NONE},
    setting("trainer", "tandem_train_active", since(60, 1)),
    setting(
        "trainer",
        "tandem_job_info",
        since(60, 1, before=None),
        job_id="long",
        run="math",
        kind="rl",
    ),
    used(GPU_0, since(61, 0.3 * TOTAL)),
)
fault(
    "/dev/shm fills",
    idle,
    {24: NONE, 25: {"TandemShmNearlyFull"}},
    setting(
        "inference", "tandem_volume_free_bytes", since(20, GIB, before=16.0 * GIB), volume="shm"
    ),
)

fault(
    "the volume is nearly full",
    idle,
    {24: NONE, 26: {"TandemVolumeNearlyFull"}},
    *shared_volume(since(20, 50.0 * GIB, before=150.0 * GIB)),
)
fault(
    "a model leaves little room for the next",
    idle,
    {24: NONE, 26: {"TandemVolumeNearlyFull"}},
    setting(
        "inference",
        "tandem_volume_free_bytes",
        since(20, 5.0 * GIB, before=25.0 * GIB),
        volume="downloads",
    ),
)
fault(
    "the volume fills within a day",
    idle,
    {200: NONE, 240: {"TandemVolumeFilling"}},
    *shared_volume(lambda m: 800.0 * GIB - GIB * m),
)
fault(
    "a model is downloaded in the first minutes",
    idle,
    {30: NONE, 120: NONE, 230: NONE},
    *shared_volume(lambda m: 800.0 * GIB - 10 * GIB * min(m, 14)),
)
fault(
    "a model is downloaded for an hour, as old containers see",
    idle,
    {239: NONE, 260: NONE, 310: NONE, 400: NONE, 449: NONE},
    *shared_volume(lambda m: 800.0 * GIB - 6 * GIB * min(max(m - 200, 0), 60)),
)
fault(
    "a new controller downloads a model",
    idle,
    {229: NONE, 250: NONE, 320: NONE, 379: NONE, 390: NONE},
    dropping("controller", "tandem_volume_", since=200, volume="downloads"),
    setting(
        "controller",
        "tandem_volume_total_bytes",
        since(200, 200 * GIB, before=None),
        volume="downloads",
        **NEW_POD,
    ),
    setting(
        "controller",
        "tandem_volume_free_bytes",
        lambda m: None if m < 200 else (200 - 6 * min(m - 200, 10)) * GIB,
        volume="downloads",
        **NEW_POD,
    ),
)
fault(
    "the volume is slow",
    idle,
    {29: NONE, 30: {"TandemVolumeSlow"}},
    setting(
        "trainer", "tandem_volume_write_probe_seconds", since(20, 4, before=0.004), volume="shared"
    ),
)
fault(
    "a job's file is damaged",
    idle,
    {24: NONE, 26: {"TandemSpoolDamaged"}},
    setting("controller", "tandem_spool_damaged", since(20, 1), kind="job"),
)

fault(
    "a checkpoint is refused",
    training,
    {20: NONE, 22: {"TandemPublishRefused"}},
    setting("inference", "tandem_policy_refused", since(21, 1), run="math"),
)
fault(
    "nothing more is served",
    training,
    {40: NONE, 54: {"TandemPolicyLag"}},
    setting(
        "inference",
        "tandem_policy_version",
        lambda m: 7.0 + (min(m, 30) + 1) // 10,
        side="inference",
        run="math",
    ),
)
fault(
    "a new run's first steps are never served",
    training,
    {24: NONE, 34: {"TandemPolicyLag"}},
    setting("trainer", "tandem_policy_version", since(17, 1), side="trainer", run="new"),
)
fault(
    "publishing is slow",
    training,
    {20: NONE, 60: {"TandemPublishSlow"}},
    counting(
        "inference",
        "tandem_publish_duration_seconds",
        lambda m: max(m - 20, 0) // 10,
        at="60",
        buckets=("1", "30", "60"),
        seconds=50.0,
        stage="copy",
    ),
)
fault(
    "an inference server refuses what the others serve",
    replicas,
    {34: NONE, 36: {"TandemReplicaNotReady"}},
    setting("inference", "tandem_replica_ready", lambda m: float(m < 20), replica="1"),
)
fault(
    "an inference server is gone for good",
    replicas,
    {28: NONE, 40: {"TandemReplicaGone"}},
    setting("inference", "tandem_replica_ready", lambda m: 1.0 if m < 20 else None, replica="1"),
)
fault(
    "one of two inference servers is given no weights",
    replicas,
    {95: NONE},
    phase(lambda m: "served" if m < 70 else "empty", "1"),
)
fault(
    "both inference servers are given no weights",
    replicas,
    {79: NONE, 81: {"TandemMergedNotServed"}},
    phase(lambda m: "served" if m < 70 else "empty", "0"),
    phase(lambda m: "served" if m < 70 else "empty", "1"),
)
fault(
    "the engine of one of two inference servers hangs",
    replicas,
    {81: NONE, 85: {"TandemVLLMEngineHung"}},
    setting("vllm", STEPS_OF_VLLM, lambda m: 1000.0 * min(m, 70), **ENGINE, replica="1"),
)
fault(
    "requests of a rollout go to all inference servers",
    replicas,
    {435: NONE, 449: {"TandemPrefixCacheCold"}},
    *(
        setting(
            "vllm",
            "vllm:prefix_cache_hits_total",
            lambda m: 30000.0 * min(m, 420) + 2000 * max(m - 420, 0),
            **ENGINE,
            replica=replica,
        )
        for replica in "01"
    ),
)
fault(
    "clients of one inference server change what they ask",
    training,
    {449: NONE},
    setting("vllm", "vllm:prefix_cache_hits_total", lambda m: 30000.0 * min(m, 400), **ENGINE),
)
fault(
    "one of two vLLM of a machine is gone, and the other has the GPU",
    replicas,
    {70: {"TandemProcessDown"}},
    setting("inference", UP, since(20, 0, before=1), program="vllm-1"),
)
fault(
    "vLLM starts again and is given no weights",
    merged,
    {79: NONE, 80: {"TandemMergedNotServed"}},
    phase(lambda m: "served" if m < 70 else "empty"),
)
fault(
    "requests never end for a swap",
    merged,
    {79: NONE, 80: {"TandemMergedNotServed"}},
    phase(lambda m: "served" if m < 70 else "swapping"),
)
fault(
    "the publisher dies before it announces, and starts again",
    merged,
    {79: NONE, 81: NONE},
    phase(lambda m: "unverified" if 70 <= m < 79 else "served"),
)
fault(
    "a swap fails in its middle",
    merged,
    {69: NONE, 70: {"TandemMergedTorn"}, 90: {"TandemMergedTorn"}},
    phase(lambda m: "served" if m < 70 else "torn"),
)
fault(
    "the engine hangs",
    training,
    {30: NONE, 33: {"TandemVLLMEngineHung"}},
    setting("vllm", "vllm:iteration_tokens_total_count", lambda m: 1000.0 * min(m, 20), **ENGINE),
)
fault(
    "requests queue",
    training,
    {35: NONE, 41: {"TandemVLLMQueueBackedUp"}},
    setting("vllm", "vllm:num_requests_waiting", since(20, 100), **ENGINE),
)
fault(
    "the KV cache is too small",
    training,
    {29: NONE, 35: {"TandemVLLMKVThrash"}},
    setting("vllm", "vllm:num_preemptions_total", growing(20, 60), **ENGINE),
)
fault(
    "half of the samples are cut off",
    training,
    {20: NONE, 70: {"TandemTruncationHigh"}},
    setting(
        "vllm", "vllm:request_success_total", growing(20, 95), **ENGINE, finished_reason="length"
    ),
)
fault(
    "a few long samples beside verifications",
    only_verifying,
    {70: NONE, 120: NONE},
    setting("vllm", "vllm:generation_tokens_total", growing(0, 2000), **ENGINE),
    setting(
        "vllm", "vllm:request_success_total", growing(0, 0.1), **ENGINE, finished_reason="stop"
    ),
)
fault(
    "half of a few samples are cut off",
    only_verifying,
    {70: NONE, 120: NONE},
    setting("vllm", "vllm:generation_tokens_total", growing(0, 2000), **ENGINE),
    setting(
        "vllm", "vllm:request_success_total", growing(0, 0.1), **ENGINE, finished_reason="stop"
    ),
    setting(
        "vllm",
        "vllm:request_success_total",
        lambda m: 8 * ((m + 2) // 10) + 0.1 * m,
        **ENGINE,
        finished_reason="length",
    ),
)
fault(
    "vLLM answers 500",
    training,
    {24: NONE, 30: {"TandemVLLMErrors"}},
    setting(
        "vllm",
        "http_requests_total",
        growing(20, 10),
        handler="/v1/completions",
        method="POST",
        status="5xx",
    ),
)
fault(
    "one of ten requests gets 500 from a vLLM that has little to do",
    idle,
    {24: NONE, 30: {"TandemVLLMErrors"}},
    setting(
        "vllm",
        "http_requests_total",
        growing(0, 0.9),
        handler="/v1/completions",
        method="POST",
        status="2xx",
    ),
    setting(
        "vllm",
        "http_requests_total",
        growing(20, 0.1),
        handler="/v1/completions",
        method="POST",
        status="5xx",
    ),
)
fault(
    "the controller answers 503",
    training,
    {24: NONE, 30: {"TandemControllerErrors"}},
    setting(
        "controller",
        "tandem_http_requests_total",
        growing(20, 10),
        route="/v1/jobs",
        method="GET",
        status_class="5xx",
    ),
)

fault(
    "one of two GPUs falls off the bus",
    idle,
    {28: {"TandemCollectorFailing"}, 31: {"TandemCollectorFailing", "TandemGPUMissing"}},
    setting("trainer", "tandem_collector_success", since(15, 0, before=1), collector="nvml"),
    dropping("trainer", since=15, uuid=GPU_1),
)
fault(
    "a container gets one of two GPUs",
    idle,
    {28: NONE, 31: {"TandemGPUMissing"}},
    dropping("trainer", since=15, uuid=GPU_1),
)
fault(
    "the only GPU is gone",
    idle,
    {28: NONE, 35: {"TandemGPUMissing"}},
    dropping("inference", since=15, uuid=INFERENCE_GPU),
)
fault(
    "ECC",
    idle,
    {20: NONE, 22: {"TandemGPUUncorrectableECC"}, 90: NONE},
    setting(
        "trainer", "tandem_gpu_ecc_uncorrected_errors_total", since(21, 3, before=2), uuid=GPU_0
    ),
)
fault(
    "a GPU is too hot",
    training,
    {24: NONE, 25: {"TandemGPUThrottled"}},
    setting("trainer", "tandem_gpu_throttle_active", since(20, 1), uuid=GPU_0, reason="hw_thermal"),
)

RESTARTS = "kube_pod_container_status_restarts_total"
fault(
    "a container is killed for its memory",
    idle,
    {20: NONE, 22: {"TandemContainerOOMKilled"}, 50: NONE},
    kube(RESTARTS, since(21, 1), container="trainer"),
    kube(
        "kube_pod_container_status_last_terminated_reason",
        since(21, 1),
        container="trainer",
        reason="OOMKilled",
    ),
)
fault(
    "a container restarts",
    idle,
    {20: NONE, 29: {"TandemContainerRestarting"}},
    kube(RESTARTS, lambda m: max(min(m, 40) - 20, 0) // 2, container="controller"),
)
fault(
    "a pod does not start",
    idle,
    {34: NONE, 35: {"TandemPodPending"}},
    kube("kube_pod_status_phase", since(20, 1), phase="Pending"),
)
fault(
    "the pod of trainer and inference does not start",
    idle,
    {34: NONE, 35: {"TandemPodPending"}},
    kube("kube_pod_status_phase", since(20, 1), phase="Pending", pod="tandem-engine-0"),
)
