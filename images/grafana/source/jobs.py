"""The dashboard shows jobs, programs, exporters, volumes and the controller."""

from limits import LIMITS
from panels import (
    GREEN,
    GREY,
    RED,
    UP_DOWN,
    YES_NO,
    Json,
    dashboard,
    query,
    row,
    stat,
    table,
    timeline,
    timeseries,
)


def quantile(share: float, metric: str, by: str, window: str, where: str = "@pod") -> str:
    return (
        f"histogram_quantile({share}, sum by ({by}, le)"
        f" (rate({metric}_bucket{{{where}}}[{window}])))"
    )


def build() -> Json:
    return dashboard(
        "tandem-jobs",
        "Tandem / Jobs and containers",
        "Jobs, programs, exporters, volumes and the controller.",
        *_jobs(),
        *_programs(),
        *_exporters(),
        *_volumes(),
        *_controller(),
        *_builds(),
    )


def _jobs() -> list[Json]:
    return [
        row("Jobs"),
        stat(
            "Now",
            "Queued and running jobs: `tandem_jobs`.",
            "short",
            query("sum by (state) (tandem_jobs{@ns})", "{{state}}", kind="instant"),
        ),
        stat(
            "Submitted",
            "In the range shown: `tandem_jobs_submitted_total`.",
            "short",
            query(
                "sum by (kind) (increase(tandem_jobs_submitted_total{@ns}[$__range]))",
                "{{kind}}",
                kind="instant",
            ),
            none="none",
        ),
        stat(
            "Ended",
            "In the range shown: `tandem_jobs_finished_total`. One that failed is TandemJobFailed.",
            "short",
            query(
                "sum by (outcome) (increase(tandem_jobs_finished_total{@pod}[$__range]))",
                "{{outcome}}",
                kind="instant",
            ),
            width=6,
            none="none",
        ),
        stat(
            "Memory given back",
            "By the last job, on all devices: `tandem_job_gpu_released_bytes`.",
            "bytes",
            query("sum(tandem_job_gpu_released_bytes{@pod})", "bytes", kind="instant"),
            width=5,
            none="no job on a GPU yet",
        ),
        stat(
            "Memory left",
            "By the last job, on the worst device: `tandem_job_gpu_left_bytes`. Red as "
            "TandemJobLeftMemory.",
            "bytes",
            query("max(tandem_job_gpu_left_bytes{@pod})", "bytes", kind="instant"),
            width=5,
            limits=[(RED, LIMITS["TandemJobLeftMemory"])],
            none="no job on a GPU yet",
        ),
        timeline(
            "Which job ran",
            "One line per job while its ranks run: `tandem_job_info`. GPUs are free in the gaps.",
            "none",
            query("tandem_job_info{@pod}", "{{run}} {{job_id}}"),
            width=16,
            texts={"1": ("runs", GREEN)},
            none="no job",
        ),
        timeseries(
            "Queue",
            "`tandem_jobs`. Queued and none running for 10 minutes is TandemJobQueueStalled.",
            "short",
            query("sum by (state) (tandem_jobs{@ns})", "{{state}}"),
            defaults={"min": 0},
            custom={"lineInterpolation": "stepAfter"},
        ),
        timeseries(
            "Waiting in the queue",
            "Time from a job's submission until a runner first claims the job, over an hour:"
            " `tandem_job_queue_wait_seconds`.",
            "s",
            *(
                query(
                    quantile(share, "tandem_job_queue_wait_seconds", "kind", "1h"),
                    f"{{{{kind}}}} p{name}",
                )
                for share, name in ((0.5, "50"), (0.95, "95"))
            ),
            none="no job",
            defaults={"min": 0},
        ),
        timeseries(
            "Duration",
            "Time from a runner's first claim of a job to the job's end, over an hour:"
            " `tandem_job_duration_seconds`.",
            "s",
            *(
                query(
                    quantile(share, "tandem_job_duration_seconds", "kind", "1h"),
                    f"{{{{kind}}}} p{name}",
                )
                for share, name in ((0.5, "50"), (0.95, "95"))
            ),
            none="no job",
            defaults={"min": 0},
        ),
        timeseries(
            "Time until memory is free",
            "Time from the end of an attempt's last rank until the memory of its devices is free,"
            " over an hour: `tandem_job_release_seconds`. Dashed: TandemReleaseSlow, of the 95th"
            " percentile.",
            "s",
            *(
                query(
                    quantile(share, "tandem_job_release_seconds", "pod", "1h"),
                    f"{{{{pod}}}} p{name}",
                )
                for share, name in ((0.5, "50"), (0.95, "95"))
            ),
            none="no job",
            defaults={"min": 0},
            limits=[(RED, LIMITS["TandemReleaseSlow"])],
            line=True,
        ),
        timeseries(
            "Jobs that ended",
            "By outcome, in each interval: `tandem_jobs_finished_total`.",
            "short",
            query(
                "sum by (outcome) (increase(tandem_jobs_finished_total{@pod}[$__rate_interval]))",
                "{{outcome}}",
            ),
            stack="normal",
            width=12,
            custom={"drawStyle": "bars", "fillOpacity": 60},
            defaults={"min": 0},
        ),
        timeseries(
            "Attempts that failed",
            "By error (docs/jobs.md), in each interval: "
            "`tandem_job_attempts_failed_total`. More than two of a kind within an hour is "
            "TandemAttemptsFailing.",
            "short",
            query(
                "sum by (error)"
                " (increase(tandem_job_attempts_failed_total{@pod}[$__rate_interval])) > 0",
                "{{error}}",
            ),
            stack="normal",
            width=12,
            none="none",
            custom={"drawStyle": "bars", "fillOpacity": 60},
            defaults={"min": 0},
        ),
    ]


def _programs() -> list[Json]:
    return [
        row("Programs"),
        timeline(
            "State",
            "Each program's state, from supervisord: `tandem_supervisor_process_state`.",
            "none",
            query("tandem_supervisor_process_state{@pod} == 1", "{{pod}} {{program}} {{state}}"),
            width=12,
            texts={"1": ("in this state", GREEN)},
            none="no supervisord",
        ),
        timeseries(
            "Starts",
            "Times a program was started again, in each interval:"
            " `tandem_supervisor_process_restarts_total`. It counts from 0 with each start of the"
            " container; TandemProcessFlapping counts both.",
            "short",
            query(
                "increase(tandem_supervisor_process_restarts_total{@pod}[$__rate_interval])",
                "{{pod}} {{program}}",
            ),
            width=6,
            custom={"drawStyle": "bars", "fillOpacity": 60},
            defaults={"min": 0},
        ),
        timeseries(
            "Running since",
            "`tandem_supervisor_process_start_time_seconds`.",
            "s",
            query(
                "time() - tandem_supervisor_process_start_time_seconds{@pod}", "{{pod}} {{program}}"
            ),
            width=6,
            none="no supervisord",
            defaults={"min": 0},
        ),
    ]


def _exporters() -> list[Json]:
    return [
        row("Exporters"),
        timeline(
            "Collectors",
            "Whether each collector succeeds: `tandem_collector_success`. TandemCollectorFailing "
            "after 5 minutes.",
            "none",
            query("tandem_collector_success{@pod}", "{{pod}} {{collector}}"),
            width=12,
            height=10,
            texts=UP_DOWN,
        ),
        timeseries(
            "Duration of collections",
            "`tandem_collector_duration_seconds`.",
            "s",
            query("tandem_collector_duration_seconds{@pod}", "{{pod}} {{collector}}"),
            width=6,
            height=10,
            defaults={"min": 0},
        ),
        timeseries(
            "Time since the last success",
            "`tandem_collector_last_success_timestamp_seconds`.",
            "s",
            query(
                "time() - (tandem_collector_last_success_timestamp_seconds{@pod} > 0)",
                "{{pod}} {{collector}}",
            ),
            width=6,
            height=10,
            defaults={"min": 0},
        ),
        timeseries(
            "Memory of processes",
            "Of exporters, controller and vLLM's server: `process_resident_memory_bytes`.",
            "bytes",
            query('process_resident_memory_bytes{job=~"tandem-.*",@pod}', "{{job}}"),
            width=12,
            defaults={"min": 0},
        ),
        timeseries(
            "CPU time of processes",
            "CPUs in use: `process_cpu_seconds_total`.",
            "short",
            query(
                'rate(process_cpu_seconds_total{job=~"tandem-.*",@pod}[$__rate_interval])',
                "{{job}}",
            ),
            width=12,
            defaults={"min": 0},
        ),
    ]


def _volumes() -> list[Json]:
    return [
        row("Volumes"),
        timeseries(
            "Free",
            "`tandem_volume_free_bytes`.",
            "bytes",
            query("min by (namespace, volume) (tandem_volume_free_bytes{@ns})", "{{volume}}"),
            defaults={"min": 0},
        ),
        timeseries(
            "Full in",
            "At the pace of the last 6 hours: `tandem_volume_free_bytes`. Empty where free space "
            "does not shrink; below one day is TandemVolumeFilling.",
            "s",
            query(
                "min by (namespace, volume) (tandem_volume_free_bytes{@ns}) / (min by (namespace,"
                " volume) (-deriv(tandem_volume_free_bytes{@ns}[6h])) > 0)",
                "{{volume}}",
            ),
            none="not soon",
            defaults={"min": 0},
        ),
        timeseries(
            "Write probe",
            "4 KiB written, synced and renamed: `tandem_volume_write_probe_seconds`. Dashed: "
            "TandemVolumeSlow.",
            "s",
            query("tandem_volume_write_probe_seconds{@pod}", "{{pod}} {{volume}}"),
            limits=[(RED, LIMITS["TandemVolumeSlow"])],
            line=True,
            defaults={"min": 0},
        ),
    ]


def _controller() -> list[Json]:
    return [
        row("Controller"),
        timeseries(
            "Requests",
            "By route: `tandem_http_requests_total`.",
            "reqps",
            query(
                "sum by (route) (rate(tandem_http_requests_total{@ns}[$__rate_interval]))",
                "{{route}}",
            ),
            none="no requests",
            defaults={"min": 0},
        ),
        timeseries(
            "Latency",
            "95th percentile by route, event streams left out: "
            "`tandem_http_request_duration_seconds`.",
            "s",
            query(
                quantile(0.95, "tandem_http_request_duration_seconds", "route", "5m", "@ns"),
                "{{route}}",
            ),
            none="no requests",
            defaults={"min": 0},
        ),
        timeseries(
            "Errors",
            "Share of answers that are 5xx: `tandem:controller_5xx:ratio5m`. Dashed: "
            "TandemControllerErrors.",
            "percentunit",
            query("tandem:controller_5xx:ratio5m{@ns}", "{{pod}}"),
            none="none",
            limits=[(RED, LIMITS["TandemControllerErrors"])],
            line=True,
            defaults={"min": 0},
        ),
    ]


def _builds() -> list[Json]:
    return [
        row("Builds"),
        table(
            "Builds",
            "What each container runs: `tandem_build_info`. Two versions or revisions for half an"
            " hour are TandemVersionMismatch.",
            query("tandem_build_info{@ns}", kind="table"),
            columns={
                "pod": "Pod",
                "version": "Version",
                "revision": "Revision",
                "python": "Python",
                "torch": "torch",
                "cuda": "CUDA",
                "vllm": "vLLM",
                "megatron": "Megatron-core",
            },
            width=16,
        ),
        timeline(
            "A job runs",
            "`tandem_train_active`.",
            "none",
            query("tandem_train_active{@pod}", "{{pod}}"),
            width=8,
            texts=YES_NO | {"0": ("idle", GREY)},
        ),
        timeseries(
            "Waiting for a place",
            "How long a running attempt has waited for its ranks' start:"
            " `tandem_job_waiting_seconds`. Four hours are TandemJobWaiting.",
            "s",
            query("tandem_job_waiting_seconds{@pod}", "{{run}}"),
            width=12,
            none="no job waits",
            defaults={"min": 0},
        ),
        timeseries(
            "Sessions without requests",
            "For how long the ranks of a session have had no request:"
            " `tandem_session_idle_seconds`. Dashed: TandemSessionIdle.",
            "s",
            query("tandem_session_idle_seconds{@pod}", "{{run}}"),
            width=12,
            none="no session",
            limits=[(RED, LIMITS["TandemSessionIdle"])],
            line=True,
            defaults={"min": 0},
        ),
    ]
