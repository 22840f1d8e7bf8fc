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
    _of_engine("num_requests_running", "gauge", "Requests in vLLM's execution batches."),
    _of_engine("num_requests_waiting", "gauge", "Requests that wait in vLLM."),
    _of_engine(
        "num_requests_waiting_by_reason",
        "gauge",
        "Requests that wait in vLLM, by the reason of the wait.",
        reason=("capacity", "deferred"),
    ),
    _of_engine("kv_cache_usage_perc", "gauge", "Share of the KV cache that is in use, 0 to 1."),
    _of_engine(
        "engine_sleep_state",
        "gauge",
        "1 for the engine's current sleep state, 0 for the other states.",
        sleep_state=("awake", "weights_offloaded", "discard_all"),
    ),
    _of_engine("num_preemptions_total", "counter", "Preemptions of requests by the engine."),
    _of_engine("prompt_tokens_total", "counter", "Prompt tokens that the engine processed."),
    _of_engine(
        "prompt_tokens_cached_total", "counter", "Prompt tokens that were found in a cache."
    ),
    _of_engine("generation_tokens_total", "counter", "Tokens that the engine generated."),
    _of_engine("prefix_cache_queries_total", "counter", "Tokens looked up in the prefix cache."),
    _of_engine("prefix_cache_hits_total", "counter", "Tokens found in the prefix cache."),
    _of_engine(
        "request_success_total",
        "counter",
        "Requests that ended, by reason.",
        finished_reason=("stop", "length", "abort", "error", "repetition"),
    ),
    _of_engine(
        "iteration_tokens_total",
        "histogram",
        "Number of tokens in each engine step; the histogram's count is the number of engine "
        "steps.",
    ),
    _of_engine("request_prompt_tokens", "histogram", "Number of prompt tokens of each request."),
    _of_engine(
        "request_generation_tokens", "histogram", "Number of generated tokens of each request."
    ),
    _of_engine(
        "time_to_first_token_seconds",
        "histogram",
        "Seconds from a request's arrival to its first token.",
    ),
    _of_engine(
        "inter_token_latency_seconds",
        "histogram",
        "Seconds between two arrivals of tokens of a request. In a stream each token arrives by"
        " itself; without a stream up to 16 tokens arrive at once.",
    ),
    _of_engine(
        "e2e_request_latency_seconds",
        "histogram",
        "Seconds from a request's arrival to its last token.",
    ),
    _of_engine(
        "request_queue_time_seconds",
        "histogram",
        "Seconds that a request waited before the engine scheduled it.",
    ),
    _of_engine(
        "request_prefill_time_seconds", "histogram", "Seconds that a request spent in prefill."
    ),
    _of_engine(
        "request_decode_time_seconds", "histogram", "Seconds that a request spent in decode."
    ),
    _vllm(
        "vllm:cache_config_info",
        "Always 1; the labels give the KV cache's configuration. This list has only some of "
        "vLLM's labels.",
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
        "Unix time at which vLLM last reported the waiting and running adapters that the labels "
        "name.",
        labels=dict.fromkeys(("max_lora", "waiting_lora_adapters", "running_lora_adapters"), OPEN),
    ),
    _vllm(
        "http_requests_total",
        "HTTP requests to vLLM's server.",
        kind="counter",
        labels={
            "handler": OPEN,
            "method": ("GET", "POST"),
            "status": ("1xx", "2xx", "3xx", "4xx", "5xx"),
        },
    ),
    Metric(
        "tandem_rollout_prefix_breaks_total",
        "Turns in sessions of the rollout door (/rollout) whose prompts do not begin with the "
        "tokens of the preceding turn.",
        kind="counter",
        labels={"reason": BREAKS},
        source="Tandem's plugin in vLLM",
        exporters=(),
    ),
)
