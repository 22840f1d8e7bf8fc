"""The dashboard shows whether everything works, which job runs, and how training goes."""

from limits import LIMITS
from panels import (
    GREY,
    RED,
    UP_DOWN,
    YELLOW,
    Json,
    bars,
    dashboard,
    gpu,
    panel,
    query,
    row,
    stat,
    table,
    timeline,
    timeseries,
)


def build() -> Json:
    return dashboard(
        "tandem-overview",
        "Tandem / Overview",
        "Whether everything works, which job runs, and how training goes.",
        *_now(),
        *_learning(),
        *_gpus(),
        *_containers(),
    )


def _now() -> list[Json]:
    return [
        row("Now"),
        stat(
            "Targets",
            "Whether each container's exporter and vLLM answer Prometheus: `up`.",
            "none",
            query('max by (job) (up{job=~"tandem-.*",@ns})', "{{job}}", kind="instant"),
            width=8,
            texts=UP_DOWN,
            options={"colorMode": "background"},
        ),
        stat(
            "Jobs",
            "Queued and running jobs: `tandem_jobs`.",
            "short",
            query("sum by (state) (tandem_jobs{@ns})", "{{state}}", kind="instant"),
            width=4,
        ),
        stat(
            "Step",
            "Optimizer steps that the running job has done, and has in all: `tandem_train_step`, "
            "`tandem_train_steps`.",
            "short",
            query("tandem_train_step{@pod}", "{{run}}: done", kind="instant"),
            query("tandem_train_steps{@pod}", "{{run}}: of", kind="instant"),
            none="no job",
        ),
        stat(
            "Since the last step",
            "Of the running job: `tandem_train_last_step_timestamp_seconds`. "
            "TandemTrainerStuck waits for four mean steps, 15 minutes at least.",
            "s",
            query(
                "time() - tandem_train_last_step_timestamp_seconds{@pod}", "{{run}}", kind="instant"
            ),
            none="no job",
            limits=[(RED, LIMITS["TandemTrainerStuck"])],
        ),
        stat(
            "Served behind trained",
            "How many steps vLLM is behind the newest checkpoint, for the worst run: "
            "`tandem:policy_lag:steps`. One for some seconds is normal.",
            "short",
            query("max(tandem:policy_lag:steps{@ns})", "steps", kind="instant"),
            none="no run",
            limits=[(YELLOW, LIMITS["TandemPolicyLag"] + 1)],
        ),
        table(
            "Firing alerts",
            "Alerts that fire: `ALERTS`. docs/alerts.md says what to do about each.",
            query(
                'ALERTS{alertstate="firing",alertname=~"Tandem.*",namespace=~"$namespace|"}',
                kind="table",
            ),
            columns={
                "severity": "Severity",
                "alertname": "Alert",
                "namespace": "Namespace",
                "pod": "Pod",
                "program": "Program",
                "uuid": "GPU",
                "rank": "Rank",
                "run": "Run",
            },
            width=12,
            height=7,
            none="none: all is well",
        ),
        table(
            "Current job",
            "The job whose ranks run now: `tandem_job_info`. Between two jobs there is none, and"
            " the GPU is empty.",
            query("tandem_job_info{@pod}", kind="table"),
            columns={
                "run": "Run",
                "kind": "Kind",
                "job_id": "Job",
                "pod": "Pod",
                "namespace": "Namespace",
            },
            width=12,
            height=7,
            none="no job",
        ),
    ]


def _learning() -> list[Json]:
    return [
        row("Learning"),
        timeseries(
            "Reward",
            "Mean reward of the last optimizer step, and one standard deviation around it: "
            "`tandem_train_reward_mean`, `tandem_train_reward_std`.",
            "short",
            query("tandem_train_reward_mean{@pod}", "mean"),
            query("tandem_train_reward_mean{@pod} + tandem_train_reward_std{@pod}", "+ std"),
            query("tandem_train_reward_mean{@pod} - tandem_train_reward_std{@pod}", "- std"),
            none="no RL job yet",
        ),
        timeseries(
            "Tokens per second",
            "Sampled by vLLM (`tandem:vllm_generation_tokens:rate5m`) and trained on "
            "(`tandem_train_tokens_total`), 5-minute rates.",
            "short",
            query("sum by (namespace) (tandem:vllm_generation_tokens:rate5m{@ns})", "sampled"),
            query("sum by (namespace) (rate(tandem_train_tokens_total{@ns}[5m]))", "trained"),
            defaults={"min": 0},
        ),
        timeseries(
            "Policy versions",
            "Newest step of each run, made and served: `tandem_policy_version`.",
            "short",
            query("max by (side, run) (tandem_policy_version{@ns})", "{{run}} {{side}}"),
            custom={"lineInterpolation": "stepAfter"},
            none="no run",
        ),
    ]


def _gpus() -> list[Json]:
    return [
        row("GPUs"),
        bars(
            "Memory in use",
            "Share of each device's memory in use, by any process: `tandem:gpu_memory_used:ratio`. "
            "Red as TandemGPUMemoryNearlyFull.",
            "percentunit",
            query(gpu("tandem:gpu_memory_used:ratio{@gpu}"), "{{pod}} {{gpu}}", kind="instant"),
            width=8,
            limits=[(YELLOW, 0.85), (RED, LIMITS["TandemGPUMemoryNearlyFull"])],
            defaults={"min": 0, "max": 1},
            none="no GPU",
        ),
        panel(
            "status-history",
            "Utilization",
            "Share of time with a kernel running: `tandem_gpu_utilization_ratio`.",
            "percentunit",
            query(gpu("tandem_gpu_utilization_ratio{@gpu}"), "{{pod}} {{gpu}}"),
            width=16,
            defaults={"min": 0, "max": 1, "color": {"mode": "continuous-BlPu"}},
            none="no GPU",
            options={
                "showValue": "never",
                "rowHeight": 0.9,
                "colWidth": 1,
                "legend": {"showLegend": False},
            },
        ),
    ]


def _containers() -> list[Json]:
    return [
        row("Containers"),
        timeline(
            "Programs",
            "Whether each program runs: `tandem_supervisor_process_up`.",
            "none",
            query("tandem_supervisor_process_up{@pod}", "{{pod}} {{program}}"),
            width=16,
            texts=UP_DOWN,
        ),
        bars(
            "Volumes, free",
            "Share of each volume that is free: `tandem:volume_free:ratio`. Red as "
            "TandemVolumeNearlyFull.",
            "percentunit",
            query("tandem:volume_free:ratio{@ns}", "{{volume}}", kind="instant"),
            width=8,
            defaults={
                "min": 0,
                "max": 1,
                "thresholds": {
                    "mode": "absolute",
                    "steps": [
                        {"color": RED, "value": None},
                        {"color": YELLOW, "value": LIMITS["TandemVolumeNearlyFull"]},
                        {"color": "green", "value": 0.2},
                    ],
                },
                "color": {"mode": "thresholds"},
            },
        ),
        stat(
            "Runs",
            "Runs on the volume: `tandem_runs`.",
            "short",
            query("max(tandem_runs{@ns})", "runs", kind="instant"),
            width=4,
            limits=[(GREY, 0)],
        ),
        stat(
            "Training",
            "Whether a job is running: `tandem_train_active`.",
            "none",
            query("max(tandem_train_active{@pod})", "active", kind="instant"),
            width=4,
            texts={"0": ("idle, GPU free", GREY), "1": ("a job runs", "green")},
        ),
    ]
