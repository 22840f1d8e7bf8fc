"""The metrics of vLLM's server (Prometheus' job tandem-vllm) that dashboards and rules use."""

from functools import partial

from tandem.inference.server.middleware.sessions import BREAKS
from tandem.metrics.metric import OPEN, Kind, Metric

_vllm = partial(Metric, source="vLLM 0.32", exporters=())


def _of_engine(name: str, kind: Kind, text: str, **labels: tuple[str, ...]) -> Metric:
    return _vllm(
        f"vllm:{name}", text, kind=kind, labels={"model_name": OPEN, "engine": OPEN} | labels
    )


VLLM_METRICS: tuple[Metric, ...] = (
    _of_engine("num_requests_running", "gauge", "Requests in execution batches."),
    _of_engine("num_requests_waiting", "gauge", "Requests waiting."),
    _of_engine(
        "num_requests_waiting_by_reason",
        "gauge",
        "Requests waiting, by reason.",
        reason=("capacity", "deferred"),
    ),
    _of_engine("kv_cache_usage_perc", "gauge", "KV-cache usage, 0 to 1."),
    _of_engine(
        "engine_sleep_state",
        "gauge",
        "The engine's sleep state.",
        sleep_state=("awake", "weights_offloaded", "discard_all"),
    ),
    _of_engine("num_preemptions_total", "counter", "Preemptions."),
    _of_engine("prompt_tokens_total", "counter", "Prompt tokens."),
    _of_engine("prompt_tokens_cached_total", "counter", "Prompt tokens that were cached."),
    _of_engine("generation_tokens_total", "counter", "Generated tokens."),
    _of_engine("prefix_cache_queries_total", "counter", "Tokens looked up in the prefix cache."),
    _of_engine("prefix_cache_hits_total", "counter", "Tokens found in the prefix cache."),
    _of_engine(
        "request_success_total",
        "counter",
        "Finished requests.",
        finished_reason=("stop", "length", "abort", "error", "repetition"),
    ),
    _of_engine(
        "iteration_tokens_total",
        "histogram",
        "Tokens per engine step; its count is the engine's heartbeat.",
    ),
    _of_engine("request_prompt_tokens", "histogram", "Prompt lengths."),
    _of_engine("request_generation_tokens", "histogram", "Completion lengths."),
    _of_engine("time_to_first_token_seconds", "histogram", "Time to the first token."),
    _of_engine("inter_token_latency_seconds", "histogram", "Time between tokens."),
    _of_engine("e2e_request_latency_seconds", "histogram", "Time of a whole request."),
    _of_engine("request_queue_time_seconds", "histogram", "Time a request waited."),
    _of_engine("request_prefill_time_seconds", "histogram", "Time in prefill."),
    _of_engine("request_decode_time_seconds", "histogram", "Time in decode."),
    _vllm(
        "vllm:cache_config_info",
        "1; the KV cache's configuration (of its labels, these).",
        labels=dict.fromkeys(
            (
                "engine",
                "block_size",
                "cache_dtype",
                "gpu_memory_utilization",
                "num_gpu_blocks",
                "enable_prefix_caching",
            ),
            OPEN,
        ),
    ),
    _vllm(
        "vllm:lora_requests_info",
        "Unix time at which these adapters were last seen.",
        labels=dict.fromkeys(("max_lora", "waiting_lora_adapters", "running_lora_adapters"), OPEN),
    ),
    _vllm(
        "http_requests_total",
        "Requests to vLLM's server.",
        kind="counter",
        labels={
            "handler": OPEN,
            "method": ("GET", "POST"),
            "status": ("1xx", "2xx", "3xx", "4xx", "5xx"),
        },
    ),
    Metric(
        "tandem_rollout_prefix_breaks_total",
        "Turns of the rollout door's sessions that do not continue the tokens sampled before.",
        kind="counter",
        labels={"reason": BREAKS},
        source="Tandem's plugin in vLLM",
        exporters=(),
    ),
)
