"""The dashboard shows how much GPU memory each program uses, and whether jobs free their memory."""

from limits import LIMITS
from panels import (
    RED,
    YELLOW,
    Json,
    bars,
    dashboard,
    gpu,
    query,
    row,
    stat,
    table,
    timeline,
    timeseries,
)

DEVICE = "namespace, pod, uuid"


def build() -> Json:
    return dashboard(
        "tandem-gpu-memory",
        "Tandem / GPU memory",
        "How much GPU memory is in use, by which program, and whether jobs give it back.",
        *_what_jobs_give_back(),
        *_each_device(),
        *_ranks(),
        *_inference(),
        *_devices(),
    )


def _what_jobs_give_back() -> list[Json]:
    return [
        row("What jobs give back"),
        timeseries(
            "In use",
            "Device memory in use, by any process: `tandem_gpu_memory_used_bytes`. The trainer's "
            "devices are empty between jobs; dashed: from 256 MiB on the runner starts no job.",
            "bytes",
            query(gpu("tandem_gpu_memory_used_bytes{@gpu}"), "{{pod}} {{gpu}}"),
            width=12,
            none="no GPU",
            limits=[(YELLOW, LIMITS["TandemGPUMemoryOrphaned"])],
            line=True,
            defaults={"min": 0},
        ),
        stat(
            "Released by the last job",
            "Device memory the last attempt gave back when its ranks exited: "
            "`tandem_job_gpu_released_bytes`.",
            "bytes",
            query(gpu("tandem_job_gpu_released_bytes{@pod}"), "{{gpu}}", kind="instant"),
            none="no job yet",
            height=8,
        ),
        stat(
            "Left by the last job",
            "Device memory still in use after the last attempt's ranks were gone: "
            "`tandem_job_gpu_left_bytes`. Red as TandemJobLeftMemory.",
            "bytes",
            query(gpu("tandem_job_gpu_left_bytes{@pod}"), "{{gpu}}", kind="instant"),
            none="no job yet",
            height=8,
            limits=[(RED, LIMITS["TandemJobLeftMemory"])],
        ),
        stat(
            "Time until free",
            "Time from the end of an attempt's last rank until the memory of its devices is free:"
            " mean and 95th percentile of the range shown, `tandem_job_release_seconds`.",
            "s",
            query(
                "sum(increase(tandem_job_release_seconds_sum{@pod}[$__range])) / "
                "sum(increase(tandem_job_release_seconds_count{@pod}[$__range]))",
                "mean",
                kind="instant",
            ),
            query(
                "histogram_quantile(0.95, sum by (le) "
                "(increase(tandem_job_release_seconds_bucket{@pod}[$__range])))",
                "p95",
                kind="instant",
            ),
            none="no job yet",
            height=8,
            limits=[(RED, LIMITS["TandemReleaseSlow"])],
        ),
    ]


def _each_device() -> list[Json]:
    return [
        row("Each device"),
        timeseries(
            "$uuid",
            "All of one device's memory: torch's tensors (`tandem_torch_memory_allocated_bytes`),"
            " torch's cache (`tandem_torch_memory_reserved_bytes` less that), not torch's"
            " (`tandem:gpu_memory_nontorch:bytes`: contexts, NCCL, vLLM, others), kept by the"
            " driver (`tandem_gpu_memory_reserved_bytes`), free (`tandem_gpu_memory_free_bytes`).",
            "bytes",
            query(
                f'sum by ({DEVICE}) (tandem_torch_memory_allocated_bytes{{@pod,uuid=~"$uuid"}})',
                "{{pod}} tensors",
            ),
            query(
                f'sum by ({DEVICE}) (tandem_torch_memory_reserved_bytes{{@pod,uuid=~"$uuid"}} - '
                'tandem_torch_memory_allocated_bytes{@pod,uuid=~"$uuid"})',
                "{{pod}} torch's cache",
            ),
            query("tandem:gpu_memory_nontorch:bytes{@gpu}", "{{pod}} not torch's"),
            query("tandem_gpu_memory_reserved_bytes{@gpu}", "{{pod}} driver"),
            query("tandem_gpu_memory_free_bytes{@gpu}", "{{pod}} free"),
            stack="normal",
            width=12,
            repeat="uuid",
            repeatDirection="h",
            maxPerRow=2,
            defaults={"min": 0},
        ),
    ]


def _ranks() -> list[Json]:
    return [
        row("Ranks"),
        timeseries(
            "Allocator",
            "Memory that torch took from the device, and its part in tensors:"
            " `tandem_torch_memory_{reserved,allocated}_bytes`. On a CPU the resident set.",
            "bytes",
            *(
                query(f"tandem_torch_memory_{kind}_bytes{{@pod}}", f"rank {{{{rank}}}} {kind}")
                for kind in ("reserved", "allocated")
            ),
            none="no job",
            defaults={"min": 0},
        ),
        timeseries(
            "Peaks of the attempt",
            "Most bytes since the attempt began:"
            " `tandem_torch_memory_{reserved,allocated}_peak_bytes`. A difference between"
            " ranks is an imbalance.",
            "bytes",
            *(
                query(f"tandem_torch_memory_{kind}_peak_bytes{{@pod}}", f"rank {{{{rank}}}} {kind}")
                for kind in ("reserved", "allocated")
            ),
            none="no job",
            defaults={"min": 0},
        ),
        bars(
            "Peak by phase",
            "Most bytes allocated in each phase when it last ran, on the fullest rank; the last "
            "hour's highest: `tandem_torch_memory_phase_peak_bytes`.",
            "bytes",
            query(
                "max by (phase) (max_over_time(tandem_torch_memory_phase_peak_bytes{@pod}[1h]))",
                "{{phase}}",
                kind="instant",
            ),
            none="no job yet",
        ),
        timeseries(
            "Held after each phase",
            "Memory of a rank's tensors when each phase ends, and all memory in use on its device:"
            " `tandem_torch_memory_phase_{allocated,device_used}_bytes`. `tandem memory"
            " <job>` prints it for one job.",
            "bytes",
            *(
                query(
                    f"max by (rank, phase) (tandem_torch_memory_phase_{kind}_bytes{{@pod}})",
                    f"rank {{{{rank}}}} {{{{phase}}}} {kind}",
                )
                for kind in ("allocated", "device_used")
            ),
            none="no job",
            defaults={"min": 0},
        ),
        timeseries(
            "Floor of each step",
            "Allocated right after zero_grad: constant unless something leaks. Dashed: "
            "20 minutes of it extrapolated by an hour, as in TandemTorchLeakPredictsOOM: "
            "`tandem_torch_memory_step_floor_bytes`.",
            "bytes",
            query("tandem_torch_memory_step_floor_bytes{@pod}", "rank {{rank}}"),
            query(
                "predict_linear(tandem_torch_memory_step_floor_bytes{@pod}[20m], 3600)",
                "rank {{rank}} in 1 h",
            ),
            none="no job",
            defaults={"min": 0},
            overrides=[
                {
                    "matcher": {"id": "byFrameRefID", "options": "B"},
                    "properties": [
                        {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 8]}}
                    ],
                }
            ],
        ),
        timeseries(
            "Fragmentation",
            "Share of what torch reserved that is free, but in pieces of blocks in use:"
            " `tandem:torch_memory_fragmentation:ratio`, from"
            " `tandem_torch_memory_inactive_split_bytes`. Dashed: TandemTorchFragmentation, on a"
            " device over 85 % full.",
            "percentunit",
            query("tandem:torch_memory_fragmentation:ratio{@pod}", "rank {{rank}}"),
            none="no job on a GPU",
            limits=[(RED, LIMITS["TandemTorchFragmentation"])],
            line=True,
            defaults={"min": 0, "max": 1},
        ),
        timeseries(
            "Retries and failures",
            "Allocations that succeeded after the cache was emptied, and that failed: "
            "`tandem_torch_memory_alloc_retries_total`, `tandem_torch_memory_ooms_total`.",
            "short",
            query(
                "increase(tandem_torch_memory_alloc_retries_total{@pod}[$__rate_interval])",
                "rank {{rank}} retries",
            ),
            query(
                "increase(tandem_torch_memory_ooms_total{@pod}[$__rate_interval])",
                "rank {{rank}} failures",
            ),
            none="no job on a GPU yet",
            custom={"drawStyle": "bars", "fillOpacity": 60},
            defaults={"min": 0},
        ),
        timeseries(
            "Host memory",
            "Page-locked memory of each rank (`tandem_torch_host_pinned_bytes`) and use "
            "of /dev/shm (`tandem_volume_total_bytes` - `tandem_volume_free_bytes`).",
            "bytes",
            query("tandem_torch_host_pinned_bytes{@pod}", "{{run}} rank {{rank}} pinned"),
            query(
                'tandem_volume_total_bytes{@pod,volume="shm"} -'
                ' tandem_volume_free_bytes{@pod,volume="shm"}',
                "{{pod}} shm",
            ),
            none="none",
            defaults={"min": 0},
        ),
    ]


def _inference() -> list[Json]:
    return [
        row("Inference"),
        timeseries(
            "vLLM's device and KV cache",
            "vLLM takes its memory when it starts; what changes afterwards is how much of the KV"
            " cache is filled: `tandem:gpu_memory_used:ratio`, `vllm:kv_cache_usage_perc`.",
            "percentunit",
            query(
                gpu('tandem:gpu_memory_used:ratio{@pod,role="inference",uuid=~"$uuid"}'),
                "{{gpu}} device",
            ),
            query("vllm:kv_cache_usage_perc{@pod}", "{{pod}} {{replica}} KV cache"),
            width=12,
            defaults={"min": 0, "max": 1},
        ),
        timeseries(
            "Processes on the device",
            "Processes with a context, of those that the driver shows to the "
            "container: `tandem_gpu_compute_processes`. On a trainer's device none between jobs.",
            "short",
            query(gpu("tandem_gpu_compute_processes{@gpu}"), "{{pod}} {{gpu}}"),
            width=12,
            none="no GPU",
            defaults={"min": 0},
        ),
    ]


def _devices() -> list[Json]:
    return [
        row("Devices"),
        timeseries(
            "Utilization",
            "Share of time with a kernel running: `tandem_gpu_utilization_ratio`.",
            "percentunit",
            query(gpu("tandem_gpu_utilization_ratio{@gpu}"), "{{pod}} {{gpu}}"),
            width=6,
            none="no GPU",
            defaults={"min": 0, "max": 1},
        ),
        timeseries(
            "Power",
            "From the energy counter, and the limit: `tandem_gpu_energy_joules_total`, "
            "`tandem_gpu_power_limit_watts`.",
            "watt",
            query(
                gpu("rate(tandem_gpu_energy_joules_total{@gpu}[$__rate_interval])"),
                "{{pod}} {{gpu}}",
            ),
            query(gpu("tandem_gpu_power_limit_watts{@gpu}"), "{{pod}} {{gpu}} limit"),
            width=6,
            none="no GPU",
            defaults={"min": 0},
        ),
        timeseries(
            "Temperature",
            "`tandem_gpu_temperature_celsius`.",
            "celsius",
            query(gpu("tandem_gpu_temperature_celsius{@gpu}"), "{{pod}} {{gpu}}"),
            width=6,
            none="no GPU",
        ),
        timeseries(
            "Uncorrected ECC errors",
            "Since the driver was loaded; any growth is TandemGPUUncorrectableECC: "
            "`tandem_gpu_ecc_uncorrected_errors_total`.",
            "short",
            query(gpu("tandem_gpu_ecc_uncorrected_errors_total{@gpu}"), "{{pod}} {{gpu}}"),
            width=6,
            none="no GPU",
            defaults={"min": 0},
        ),
        timeline(
            "Reduced clocks",
            "Why clocks are reduced: `tandem_gpu_throttle_active`. sw_power_cap is normal "
            "under load; hw_thermal and hw_power_brake are TandemGPUThrottled.",
            "none",
            query(gpu("tandem_gpu_throttle_active{@gpu}"), "{{pod}} {{gpu}} {{reason}}"),
            width=12,
            none="no GPU",
            texts={"0": ("no", "transparent"), "1": ("yes", "orange")},
        ),
        table(
            "Device details",
            "`tandem_gpu_info` with `tandem_gpu_memory_total_bytes`. The index is the container's "
            "own.",
            query(
                "tandem_gpu_memory_total_bytes{@gpu} * on (namespace, pod, role, uuid) group_left"
                " (index, name, driver_version, cuda_version, pci_bus_id, mig_profile)"
                " tandem_gpu_info{@gpu}",
                kind="table",
            ),
            columns={
                "pod": "Pod",
                "index": "Index",
                "name": "Device",
                "Value": "Memory",
                "uuid": "UUID",
                "mig_profile": "MIG",
                "driver_version": "Driver",
                "cuda_version": "CUDA",
                "pci_bus_id": "Bus",
            },
            unit="bytes",
            width=12,
            none="no GPU",
        ),
    ]
