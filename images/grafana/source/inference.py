"""The dashboard shows what vLLM does, and which policy it serves."""

from limits import LIMITS
from panels import (
    GREY,
    RED,
    UP_DOWN,
    YELLOW,
    Json,
    dashboard,
    heatmap,
    query,
    row,
    stat,
    table,
    timeline,
    timeseries,
)

EACH = "sum by (pod, replica)"
VLLM = '@pod,model_name=~"$model_name"'


def quantiles(title: str, metric: str, text: str, **more: object) -> Json:
    targets = [
        query(
            f"histogram_quantile({share}, sum by (pod, replica, le) "
            f"(rate(vllm:{metric}_bucket{{{VLLM}}}[$__rate_interval])))",
            "{{pod}} {{replica}} p" + name,
        )
        for share, name in ((0.5, "50"), (0.95, "95"), (0.99, "99"))
    ]
    return timeseries(
        title,
        f"{text}: `vllm:{metric}`.",
        "s",
        *targets,
        **{"none": "no requests", "defaults": {"min": 0}} | more,
    )


def mean(metric: str) -> str:
    return (
        f"sum by (pod, replica) (rate(vllm:{metric}_sum{{{VLLM}}}[$__rate_interval])) / "
        f"sum by (pod, replica) (rate(vllm:{metric}_count{{{VLLM}}}[$__rate_interval]))"
    )


def build() -> Json:
    model = (
        "Model",
        'label_values(vllm:num_requests_running{namespace=~"$namespace",pod=~"$pod"}, model_name)',
    )
    return dashboard(
        "tandem-inference",
        "Tandem / Inference",
        "What vLLM does, and which policy it serves.",
        *_now(),
        *_requests(),
        *_latency(),
        *_samples(),
        *_serving_what_is_trained(),
        *_how_weights_arrive(),
        extra={"model_name": model},
    )


def _now() -> list[Json]:
    return [
        row("Now"),
        stat(
            "vLLM",
            "Whether vLLM's metrics answer: `up`.",
            "none",
            query('min(up{job="tandem-vllm",@pod})', "vLLM", kind="instant"),
            texts=UP_DOWN,
        ),
        stat(
            "Unreachable",
            "Targets of the inference containers that do not answer: `up`.",
            "short",
            query(
                'count(up{job=~"tandem-(vllm|inference)",@pod} == 0) or vector(0)',
                "targets",
                kind="instant",
            ),
            limits=[(RED, 1)],
        ),
        stat(
            "Running",
            "Requests in the engine: `vllm:num_requests_running`.",
            "short",
            query(f"sum(vllm:num_requests_running{{{VLLM}}})", "running", kind="instant"),
        ),
        stat(
            "Waiting",
            "`vllm:num_requests_waiting`. Yellow as TandemVLLMQueueBackedUp.",
            "short",
            query(f"sum(vllm:num_requests_waiting{{{VLLM}}})", "waiting", kind="instant"),
            limits=[(YELLOW, LIMITS["TandemVLLMQueueBackedUp"])],
        ),
        stat(
            "Generated per second",
            "5-minute rate of `vllm:generation_tokens_total`.",
            "short",
            query(
                f"sum(rate(vllm:generation_tokens_total{{{VLLM}}}[5m]))", "tokens/s", kind="instant"
            ),
        ),
        stat(
            "Errors",
            "Share of vLLM's answers that are 5xx: `tandem:vllm_5xx:ratio5m`, from"
            " `http_requests_total` without Tandem's own questions. Red as TandemVLLMErrors.",
            "percentunit",
            query("max(tandem:vllm_5xx:ratio5m{@pod})", "5xx", kind="instant"),
            limits=[(RED, LIMITS["TandemVLLMErrors"])],
            none="no requests",
        ),
    ]


def _requests() -> list[Json]:
    return [
        row("Requests"),
        timeseries(
            "Running and waiting",
            "`vllm:num_requests_running`; `vllm:num_requests_waiting_by_reason`: "
            "capacity means that the KV cache or the batch is full.",
            "short",
            query(
                f"sum by (pod, replica) (vllm:num_requests_running{{{VLLM}}})",
                "{{pod}} {{replica}} running",
            ),
            query(
                f"sum by (pod, replica, reason) (vllm:num_requests_waiting_by_reason{{{VLLM}}})",
                "{{pod}} {{replica}} waiting: {{reason}}",
            ),
            defaults={"min": 0},
        ),
        timeseries(
            "Tokens per second",
            "`vllm:prompt_tokens_total`, of which in the prefix cache "
            "`vllm:prompt_tokens_cached_total`; `vllm:generation_tokens_total`.",
            "short",
            query(
                f"{EACH} (rate(vllm:prompt_tokens_total{{{VLLM}}}[$__rate_interval]))",
                "{{pod}} {{replica}} prompt",
            ),
            query(
                f"{EACH} (rate(vllm:prompt_tokens_cached_total{{{VLLM}}}[$__rate_interval]))",
                "{{pod}} {{replica}} prompt, cached",
            ),
            query(
                f"{EACH} (rate(vllm:generation_tokens_total{{{VLLM}}}[$__rate_interval]))",
                "{{pod}} {{replica}} generated",
            ),
            defaults={"min": 0},
        ),
        timeseries(
            "Tokens per engine step",
            "Mean of `vllm:iteration_tokens_total`: how well batches are filled. Its count is the"
            " engine's heartbeat; if it stops while requests run, TandemVLLMEngineHung fires.",
            "short",
            query(mean("iteration_tokens_total"), "{{pod}} {{replica}} tokens"),
            query(
                "sum by (pod, replica)"
                f" (rate(vllm:iteration_tokens_total_count{{{VLLM}}}[$__rate_interval]))",
                "{{pod}} {{replica}} steps/s",
            ),
            none="no requests",
            defaults={"min": 0},
        ),
        timeseries(
            "KV cache",
            "`vllm:kv_cache_usage_perc`. Dashed: TandemVLLMKVThrash, if requests are evicted too.",
            "percentunit",
            query(f"vllm:kv_cache_usage_perc{{{VLLM}}}", "{{pod}} {{replica}}"),
            defaults={"min": 0, "max": 1},
            limits=[(RED, LIMITS["TandemVLLMKVThrash"])],
            line=True,
        ),
        timeseries(
            "Preemptions",
            "Requests evicted, and later computed again, per second: `vllm:num_preemptions_total`.",
            "cps",
            query(
                f"{EACH} (rate(vllm:num_preemptions_total{{{VLLM}}}[$__rate_interval]))",
                "{{pod}} {{replica}}",
            ),
            defaults={"min": 0},
        ),
        timeseries(
            "Prefix cache hits",
            "Share of looked-up tokens that were there: `vllm:prefix_cache_hits_total` of"
            " `vllm:prefix_cache_queries_total`. It is high, because groups share prompts, and"
            " falls after each new step.",
            "percentunit",
            query(
                f"{EACH} (rate(vllm:prefix_cache_hits_total{{{VLLM}}}[$__rate_interval])) / "
                f"{EACH} (rate(vllm:prefix_cache_queries_total{{{VLLM}}}[$__rate_interval]))",
                "{{pod}} {{replica}}",
            ),
            none="no requests",
            defaults={"min": 0, "max": 1},
        ),
    ]


def _latency() -> list[Json]:
    return [
        row("Latency"),
        quantiles(
            "To the first token",
            "time_to_first_token_seconds",
            "From arrival to the first token",
            width=6,
        ),
        quantiles(
            "Between tokens",
            "inter_token_latency_seconds",
            "From one arrival of tokens to the next: single tokens in a stream, otherwise up to 16",
            width=6,
        ),
        quantiles(
            "Whole requests",
            "e2e_request_latency_seconds",
            "From arrival to the last token; the tail is what a synchronous step waits for",
            width=6,
        ),
        timeseries(
            "Where a request's time goes",
            "Means of `vllm:request_queue_time_seconds`, "
            "`vllm:request_prefill_time_seconds` and `vllm:request_decode_time_seconds`.",
            "s",
            *(
                query(mean(f"request_{part}_time_seconds"), "{{pod}} {{replica}} " + part)
                for part in ("queue", "prefill", "decode")
            ),
            stack="normal",
            width=6,
            none="no requests",
            defaults={"min": 0},
        ),
    ]


def _samples() -> list[Json]:
    return [
        row("Samples"),
        heatmap(
            "Length of answers",
            "Tokens generated per request: `vllm:request_generation_tokens`. Training "
            "causes a drift.",
            "short",
            query(
                "sum by (le)"
                f" (increase(vllm:request_generation_tokens_bucket{{{VLLM}}}[$__rate_interval]))",
                "{{le}}",
                kind="heatmap",
            ),
            none="no requests",
        ),
        timeseries(
            "Why answers end",
            "Shares of `vllm:request_success_total`: length is an answer cut off "
            "(TandemTruncationHigh above 30 % for half an hour), abort a client that left.",
            "percentunit",
            query(
                "sum by (finished_reason)"
                f" (rate(vllm:request_success_total{{{VLLM}}}[$__rate_interval]))",
                "{{finished_reason}}",
            ),
            stack="percent",
            none="no requests",
            defaults={"min": 0},
        ),
        timeseries(
            "Cut off",
            "Share of answers that ended at max_tokens, over 15 minutes, without those of one"
            " token: `tandem:vllm_finished_length:ratio15m`. Dashed: TandemTruncationHigh.",
            "percentunit",
            query(
                'tandem:vllm_finished_length:ratio15m{@ns,model_name=~"$model_name"}',
                "{{model_name}}",
            ),
            limits=[(RED, LIMITS["TandemTruncationHigh"])],
            line=True,
            none="no requests",
            defaults={"min": 0, "max": 1},
        ),
        timeseries(
            "Mean lengths",
            "`vllm:request_prompt_tokens`, `vllm:request_generation_tokens`.",
            "short",
            query(mean("request_prompt_tokens"), "{{pod}} {{replica}} prompt"),
            query(mean("request_generation_tokens"), "{{pod}} {{replica}} answer"),
            none="no requests",
            defaults={"min": 0},
        ),
        timeseries(
            "Answers by status",
            "`http_requests_total` of vLLM's server.",
            "reqps",
            query(
                "sum by (pod, replica, status)"
                ' (rate(http_requests_total{job="tandem-vllm",@pod}[$__rate_interval]))',
                "{{pod}} {{replica}} {{status}}",
            ),
            none="no requests",
            defaults={"min": 0},
        ),
        timeseries(
            "Broken sessions",
            "Turns in sessions of the rollout door (/rollout) whose prompts do not begin with the"
            " tokens of the preceding turn, per second: `tandem_rollout_prefix_breaks_total`. Their"
            " trajectory has more than one sequence, which costs the trainer the prefix again.",
            "cps",
            query(
                "sum by (reason)"
                " (rate(tandem_rollout_prefix_breaks_total{@pod}[$__rate_interval]))",
                "{{reason}}",
            ),
            none="not exported",
            defaults={"min": 0},
        ),
    ]


def _serving_what_is_trained() -> list[Json]:
    return [
        row("Serving what is trained"),
        timeseries(
            "Steps trained and served",
            "Newest step of each run: `tandem_policy_version`.",
            "short",
            query("max by (side, run) (tandem_policy_version{@ns})", "{{run}} {{side}}"),
            custom={"lineInterpolation": "stepAfter"},
            none="no run",
        ),
        timeseries(
            "Behind",
            "How many steps vLLM is behind the newest checkpoint: `tandem:policy_lag:steps`. "
            "TandemPolicyLag after 15 minutes above 0.",
            "short",
            query("tandem:policy_lag:steps{@ns}", "{{run}}"),
            none="no run",
            custom={"lineInterpolation": "stepAfter"},
            defaults={"min": 0},
        ),
        timeseries(
            "Publishing",
            "Mean seconds of each stage, over an hour: `tandem_publish_duration_seconds`."
            " since_checkpoint is from the commit to served; TandemPublishSlow from 30 s of one"
            " other stage.",
            "s",
            query(
                "sum by (stage) (rate(tandem_publish_duration_seconds_sum{@pod}[1h])) / "
                "sum by (stage) (rate(tandem_publish_duration_seconds_count{@pod}[1h]))",
                "{{stage}}",
            ),
            limits=[(RED, LIMITS["TandemPublishSlow"])],
            none="nothing published",
            defaults={"min": 0},
        ),
        stat(
            "Log-prob error",
            "Mean absolute difference of trainer and vLLM in the last verification: "
            "`tandem_publish_logprob_error_nats`. `tandem_publish_logprob_error_allowed_nats` is"
            " what this step may have in the closest nine tenths of the tokens; beyond, it is"
            " refused.",
            "short",
            query("tandem_publish_logprob_error_nats{@pod}", "nats", kind="instant"),
            query("tandem_publish_logprob_error_allowed_nats{@pod}", "allowed", kind="instant"),
            width=6,
            height=6,
            none="nothing published",
        ),
        stat(
            "Published and refused",
            "In the range shown: `tandem_publish_total`.",
            "short",
            query(
                "sum by (outcome) (increase(tandem_publish_total{@pod}[$__range]))",
                "{{outcome}}",
                kind="instant",
            ),
            width=6,
            height=6,
            none="nothing published",
        ),
        timeline(
            "Refused",
            "Whether the newest step of a run is refused: `tandem_policy_refused`. "
            "TandemPublishRefused, if "
            "the run was trained within 6 hours.",
            "none",
            query("tandem_policy_refused{@pod}", "{{run}}"),
            width=6,
            height=6,
            texts={"0": ("no", "green"), "1": ("yes", RED)},
            none="no run",
        ),
        timeline(
            "Sleep",
            "The engine's state: `vllm:engine_sleep_state`. It sleeps only while a job of a trainer"
            " that shares its GPUs runs.",
            "none",
            query(f"vllm:engine_sleep_state{{{VLLM}}}", "{{pod}} {{replica}} {{sleep_state}}"),
            width=6,
            height=6,
            texts={"0": ("no", GREY), "1": ("yes", "green")},
            none="not exported",
        ),
        table(
            "KV cache configuration",
            "`vllm:cache_config_info`.",
            query("vllm:cache_config_info{@pod}", kind="table"),
            columns={
                "pod": "Pod",
                "replica": "Server",
                "num_gpu_blocks": "Blocks",
                "block_size": "Tokens per block",
                "cache_dtype": "Type",
                "gpu_memory_utilization": "Memory utilization",
                "enable_prefix_caching": "Prefix caching",
            },
            width=24,
            height=4,
        ),
    ]


def _how_weights_arrive() -> list[Json]:
    return [
        row("Several inference servers"),
        timeline(
            "Ready servers",
            "Whether a server has every served step and answers requests: `tandem_replica_ready`."
            " TandemReplicaNotReady after 15 minutes.",
            "none",
            query("max by (replica) (tandem_replica_ready{@pod})", "{{replica}}"),
            texts={"0": ("no", RED), "1": ("yes", "green")},
            none="one server",
        ),
        timeseries(
            "Steps behind",
            "Steps from a run's newest checkpoint to the newest that a server has verified:"
            " `tandem_replica_steps_behind`.",
            "none",
            query("max by (replica) (tandem_replica_steps_behind{@pod})", "{{replica}}"),
            none="one server",
            defaults={"min": 0},
        ),
        timeseries(
            "Commit to verification",
            "Of the last step of each server: `tandem_replica_publish_seconds`.",
            "s",
            query("max by (replica) (tandem_replica_publish_seconds{@pod})", "{{replica}}"),
            none="one server",
            defaults={"min": 0},
        ),
        row("How weights arrive"),
        timeseries(
            "Parts of a publication",
            "Seconds of each part for the step that is served: "
            "`tandem_publish_seconds`. Of merged weights stage, drain and swap are in load.",
            "s",
            query(
                'max by (run, part) (tandem_publish_seconds{@pod,part!="since_checkpoint"})',
                "{{run}} {{part}}",
            ),
            custom={"lineInterpolation": "stepAfter"},
            none="nothing published",
            defaults={"min": 0},
        ),
        timeseries(
            "Stall of running requests",
            "Merged weights: how long no request ran (swap), and how long the swap waited for them"
            " to end (drain, with TANDEM_SWAP_REQUESTS=wait): `tandem_publish_seconds`. And the"
            " longest gap between two arrivals of tokens, 99.9th percentile:"
            " `vllm:inter_token_latency_seconds`.",
            "s",
            query(
                'max by (run, part) (tandem_publish_seconds{@pod,part=~"drain|swap"})',
                "{{run}} {{part}}",
            ),
            query(
                "histogram_quantile(0.999, sum by (pod, replica, le) "
                f"(rate(vllm:inter_token_latency_seconds_bucket{{{VLLM}}}[$__rate_interval])))",
                "{{pod}} {{replica}} between tokens",
            ),
            none="no merged weights",
            defaults={"min": 0},
        ),
        timeline(
            "Phase of merged weights",
            "`tandem_merged_phase`: requests are answered in served, wait in swapping and"
            " unverified, and get 503 in empty (TandemMergedNotServed after 10 minutes) and torn"
            " (TandemMergedTorn).",
            "none",
            query("tandem_merged_phase{@pod}", "{{pod}} {{replica}} {{phase}}"),
            texts={"0": ("no", GREY), "1": ("yes", "blue")},
            none="no merged weights",
        ),
        table(
            "How runs are served",
            "`tandem_policy_info`.",
            query("tandem_policy_info{@pod}", kind="table"),
            columns={"pod": "Pod", "run": "Run", "weights": "Weights", "transport": "Transport"},
            width=18,
            height=4,
            none="no run",
        ),
        stat(
            "Merged runs",
            "Runs on the volume whose weights are merged; one vLLM serves one:"
            " `tandem_merged_runs`.",
            "short",
            query("max(tandem_merged_runs{@pod})", "runs", kind="instant"),
            limits=[(YELLOW, 2)],
            width=6,
            none="none",
        ),
    ]
