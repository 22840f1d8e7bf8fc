"""What Tandem adds to vLLM's workers and engine where weights are merged. `plugin.py` installs it."""

import json
import logging
import os
from typing import Any

from tandem.inference.server.second_copy import automatic_copy
from tandem.inference.server.worker.merged_weights import MergedWeights
from tandem.vllm_client.names import MERGED_VARIABLE

log = logging.getLogger("vllm.tandem")  # vLLM's log has only its own loggers


class MergedWorker:
    """Mixed into vLLM's worker by `--worker-extension-cls`; the methods are called by `collective_rpc`."""

    tandem_weights: MergedWeights

    def tandem_stage(self, version: str, directory: str, scale: float) -> None:
        self.tandem_weights.stage(version, directory, scale)

    def tandem_staged(self, version: str) -> dict[str, Any]:
        return {"ready": self.tandem_weights.staged(version)}

    def tandem_swap(self, version: str) -> dict[str, Any]:
        return self.tandem_weights.swap(version)

    def tandem_discard(self, keep: list[str]) -> None:
        self.tandem_weights.discard(keep=keep)

    def tandem_rows(self, wanted: dict[str, int]) -> list[dict[str, Any]]:
        return self.tandem_weights.rows(wanted)


def attach(worker: Any) -> None:
    """Give a worker that has just loaded its model its second copy of the weights, and have vLLM count the copy as part
    of the model, so that it does not plan that memory for the KV cache."""
    options = json.loads(os.environ[MERGED_VARIABLE])
    copy = options["second_copy"]
    runner = worker.model_runner
    model = runner.get_model()
    on_gpu = next(model.parameters()).is_cuda
    if copy == "auto":
        weights = sum(parameter.nbytes for parameter in model.parameters())
        copy = automatic_copy(_left_for_kv_cache(worker), weights) if on_gpu else "device"
    log.info("Merged weights: the second copy is on the %s (%s)", copy, options["second_copy"])
    with worker._maybe_get_memory_pool_context(tag="weights"):
        worker.tandem_weights = MergedWeights(
            model, worker.model_config.model, frozenset(options["targets"]), copy if on_gpu else "device"
        )
    if on_gpu:
        runner.model_memory_usage += worker.tandem_weights.device_bytes


def _left_for_kv_cache(worker: Any) -> float:
    import torch

    total = torch.cuda.get_device_properties(worker.device).total_memory
    return float(total * worker.cache_config.gpu_memory_utilization - worker.model_runner.model_memory_usage)


def after_swap(core: Any, requests: str, version: str) -> dict[str, dict[str, int]]:
    """In the engine, between the swap and the next step: what happens to requests and to cached prefixes.

    Returns how many tokens each running request has got from the weights before. `requests`: `keep` or `recompute`.
    """
    from vllm.v1.core import kv_cache_utils

    scheduler = core.scheduler
    tokens = {r.request_id: r.num_output_tokens + r.num_output_placeholders for r in scheduler.running}
    # All block hashes begin with this value, so no request finds a block that other weights have computed.
    kv_cache_utils.NONE_HASH = kv_cache_utils.BlockHash(os.urandom(32))
    if requests == "recompute":
        scheduler.reset_prefix_cache(reset_running_requests=True)
    for queue in (scheduler.waiting, getattr(scheduler, "skipped_waiting", ())):
        for request in queue:
            request.block_hashes.clear()
            request.update_block_hashes()
    if hasattr(core, "set_weight_version"):  # vLLM 0.32 tells it in each answer of /inference/v1/generate
        core.set_weight_version(version)
    return {"running": tokens}
