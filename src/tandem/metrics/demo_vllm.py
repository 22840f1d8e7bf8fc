"""vLLM's part of the demo."""

from __future__ import annotations

import random

from tandem.metrics.samples import Counts, Gauges

_ENGINE = {"model_name": "Qwen/Qwen3-8B", "engine": "0"}
# Histogram -> median and spread of the log-normal that it is drawn from.
_PER_REQUEST = {
    "vllm:request_prompt_tokens": (180, 0.4),
    "vllm:request_generation_tokens": (420, 0.7),
    "vllm:time_to_first_token_seconds": (0.09, 0.6),
    "vllm:e2e_request_latency_seconds": (7, 0.6),
    "vllm:request_queue_time_seconds": (0.05, 1.2),
    "vllm:request_prefill_time_seconds": (0.06, 0.6),
    "vllm:request_decode_time_seconds": (6.5, 0.6),
}


def second(counts: Counts, draw: random.Random, *, busy: bool) -> None:
    """A second passes; `busy`: rollouts are drawn."""
    requests, iterations = (draw.randint(6, 14), 60) if busy else (draw.randint(0, 1), 4)
    prompt, generated = requests * 180, iterations * (110 if busy else 4)
    totals = {"prompt_tokens": prompt, "prompt_tokens_cached": prompt * 0.7, "generation_tokens": generated,
              "prefix_cache_queries": prompt, "prefix_cache_hits": prompt * 0.7,
              "num_preemptions": float(busy and draw.random() < 0.01)}  # fmt: skip
    for name, value in totals.items():
        counts.inc(f"vllm:{name}_total", value, **_ENGINE)
    for reason in ("stop", "length", "abort", "error", "repetition"):
        counts.inc("vllm:request_success_total", 0, **_ENGINE, finished_reason=reason)
    counts.inc("http_requests_total", requests, handler="/v1/chat/completions", method="POST", status="2xx")
    for _ in range(requests):
        reason = draw.choices(("stop", "length", "abort"), (88, 11, 1))[0]
        counts.inc("vllm:request_success_total", **_ENGINE, finished_reason=reason)
        for name, (median, spread) in _PER_REQUEST.items():
            counts.observe(name, median * draw.lognormvariate(0, spread), **_ENGINE)
    for _ in range(iterations):
        counts.observe("vllm:iteration_tokens_total", generated / iterations, **_ENGINE)
        counts.observe("vllm:inter_token_latency_seconds", 0.016 * draw.lognormvariate(0, 0.25), **_ENGINE)


def gauges(draw: random.Random, *, busy: bool, now: float) -> Gauges:
    found = Gauges()
    running, waiting = (draw.randint(90, 128), draw.randint(0, 24)) if busy else (draw.randint(0, 4), 0)
    found.set("vllm:num_requests_running", running, **_ENGINE)
    found.set("vllm:num_requests_waiting", waiting, **_ENGINE)
    found.set("vllm:num_requests_waiting_by_reason", waiting, **_ENGINE, reason="capacity")
    found.set("vllm:num_requests_waiting_by_reason", 0, **_ENGINE, reason="deferred")
    found.set("vllm:kv_cache_usage_perc", running / 150 + draw.uniform(0, 0.05), **_ENGINE)
    for state in ("awake", "weights_offloaded", "discard_all"):
        found.set("vllm:engine_sleep_state", float(state == "awake"), **_ENGINE, sleep_state=state)
    found.set(
        "vllm:cache_config_info", 1, engine="0", block_size="16", cache_dtype="auto", gpu_memory_utilization="0.85",
        num_gpu_blocks="48211", enable_prefix_caching="True",
    )  # fmt: skip
    adapters = "countdown@7" if running else ""
    found.set("vllm:lora_requests_info", now, max_lora="4", waiting_lora_adapters="", running_lora_adapters=adapters)
    return found
