"""vLLM's part of the made-up deployment."""

import random
from dataclasses import replace

from images.grafana.vllm_metrics import VLLM_METRICS

from tandem.inference.server.middleware.sessions import BREAKS
from tandem.metrics.metric import Samples

_LATENCY = (
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)
_LENGTH = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
_FIRST_TOKEN = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_BETWEEN_TOKENS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_BATCH = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Histogram -> (its buckets in vLLM 0.32, median, spread). The values are drawn from a log-normal
# distribution with this median and this spread.
_PER_REQUEST = {
    "vllm:request_prompt_tokens": (_LENGTH, 180, 0.4),
    "vllm:request_generation_tokens": (_LENGTH, 420, 0.7),
    "vllm:time_to_first_token_seconds": (_FIRST_TOKEN, 0.09, 0.6),
    "vllm:e2e_request_latency_seconds": (_LATENCY, 7, 0.6),
    "vllm:request_queue_time_seconds": (_LATENCY, 0.05, 1.2),
    "vllm:request_prefill_time_seconds": (_LATENCY, 0.06, 0.6),
    "vllm:request_decode_time_seconds": (_LATENCY, 6.5, 0.6),
}
_BUCKETS = {
    "vllm:iteration_tokens_total": _BATCH,
    "vllm:inter_token_latency_seconds": _BETWEEN_TOKENS,
    **{name: buckets for name, (buckets, _, _) in _PER_REQUEST.items()},
}
_ENGINE = {"model_name": "Qwen/Qwen3-8B", "engine": "0"}


def new_samples() -> Samples:
    return Samples(
        replace(metric, buckets=_BUCKETS.get(metric.name, ())) for metric in VLLM_METRICS
    )


def count_second(samples: Samples, draw: random.Random, *, busy: bool) -> None:
    """Adds the events of one second to the counters of `samples`. `busy`: whether clients sample in
    this second."""
    requests, iterations = (draw.randint(6, 14), 60) if busy else (draw.randint(0, 1), 4)
    prompt, generated = requests * 180, iterations * (110 if busy else 4)
    totals = {
        "prompt_tokens": prompt,
        "prompt_tokens_cached": prompt * 0.7,
        "generation_tokens": generated,
        "prefix_cache_queries": prompt,
        "prefix_cache_hits": prompt * 0.7,
        "num_preemptions": float(busy and draw.random() < 0.01),
    }
    for name, value in totals.items():
        samples.inc(f"vllm:{name}_total", value, **_ENGINE)
    for reason in ("stop", "length", "abort", "error", "repetition"):
        samples.inc("vllm:request_success_total", 0, **_ENGINE, finished_reason=reason)
    samples.inc(
        "http_requests_total", requests, handler="/v1/chat/completions", method="POST", status="2xx"
    )
    for reason in BREAKS:
        edited = reason == "edited" and busy and draw.random() < 0.02
        samples.inc("tandem_rollout_prefix_breaks_total", float(edited), reason=reason)
    for _ in range(requests):
        reason = draw.choices(("stop", "length", "abort"), (88, 11, 1))[0]
        samples.inc("vllm:request_success_total", **_ENGINE, finished_reason=reason)
        for name, (_, median, spread) in _PER_REQUEST.items():
            samples.observe(name, median * draw.lognormvariate(0, spread), **_ENGINE)
    for _ in range(iterations):
        samples.observe("vllm:iteration_tokens_total", generated / iterations, **_ENGINE)
        samples.observe(
            "vllm:inter_token_latency_seconds", 0.016 * draw.lognormvariate(0, 0.25), **_ENGINE
        )


def set_gauges(samples: Samples, draw: random.Random, *, busy: bool, now: float) -> None:
    running, waiting = (
        (draw.randint(90, 128), draw.randint(0, 24)) if busy else (draw.randint(0, 4), 0)
    )
    samples.set("vllm:num_requests_running", running, **_ENGINE)
    samples.set("vllm:num_requests_waiting", waiting, **_ENGINE)
    samples.set("vllm:num_requests_waiting_by_reason", waiting, **_ENGINE, reason="capacity")
    samples.set("vllm:num_requests_waiting_by_reason", 0, **_ENGINE, reason="deferred")
    samples.set("vllm:kv_cache_usage_perc", running / 150 + draw.uniform(0, 0.05), **_ENGINE)
    for state in ("awake", "weights_offloaded", "discard_all"):
        samples.set(
            "vllm:engine_sleep_state", float(state == "awake"), **_ENGINE, sleep_state=state
        )
    samples.set(
        "vllm:cache_config_info",
        1,
        engine="0",
        block_size="16",
        cache_dtype="auto",
        gpu_memory_utilization="0.85",
        num_gpu_blocks="48211",
        enable_prefix_caching="True",
    )
    samples.set(
        "vllm:lora_requests_info",
        now,
        max_lora="4",
        waiting_lora_adapters="",
        running_lora_adapters="countdown@7",
    )
