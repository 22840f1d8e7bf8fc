"""Extends vLLM's workers and engine for merged weights. `patches.py` installs this code."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear, silu

from tandem.inference.server import patches
from tandem.inference.server.command import CopyPlace
from tandem.inference.server.worker.landing import LandingWeights
from tandem.inference.server.worker.model_weights import BASE, MergedWeights
from tandem.vllm_client.names import MERGED_VARIABLE

log = logging.getLogger("vllm.tandem")  # vLLM's log shows only messages of its own loggers

SWITCH_SECONDS = 1e-4
"""Python's switch interval in seconds: a thread that waits for the GIL gets it after this time.
vLLM's own thread rarely releases the GIL, and the thread that writes arriving weights needs the GIL
after each operation. With Python's default, each wait takes 5 ms."""


class MergedWorker:
    """A class that `--worker-extension-cls` mixes into vLLM's worker."""

    tandem_weights: MergedWeights | LandingWeights

    def tandem_call(self, method: str, *args: Any) -> dict[str, Any]:
        """Calls the method `method` of the weights object. An error is not raised but returned as
        an answer. After an error that a worker raises, vLLM's executor would mistake the other
        workers' answers for answers to the next call."""
        try:
            return {"result": getattr(self.tandem_weights, method)(*args)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


def attach(worker: Any) -> None:
    """Give a worker that has just loaded its model the second copy of the weights. Later, vLLM
    chooses the size of the KV cache, and leaves space for the copy and for the memory that a swap
    needs. The copy's tensors on the GPU come from the allocator's current memory pool.
    """
    options = json.loads(os.environ[MERGED_VARIABLE])
    runner = worker.model_runner
    model = runner.get_model()
    on_gpu = next(model.parameters()).is_cuda
    place: CopyPlace | float = "device"
    if on_gpu and options["second_copy"] == "auto":
        memory = torch.cuda.get_device_properties(worker.device).total_memory
        place = memory * worker.cache_config.gpu_memory_utilization - runner.model_memory_usage
    elif on_gpu:
        place = options["second_copy"]
    base_model, targets = worker.model_config.model, options["targets"]
    weights: MergedWeights | LandingWeights
    if targets is None:
        weights = LandingWeights(
            model, base_model, place, (worker.rank, worker.parallel_config.world_size)
        )
    else:
        weights = MergedWeights(model, base_model, place, frozenset(targets))
    worker.tandem_weights = weights
    sys.setswitchinterval(SWITCH_SECONDS)
    log.info(
        "Merged weights: the second copy is on the %s (%s)", weights.place, options["second_copy"]
    )
    if on_gpu:
        # vLLM 0.26 adds up the memory that it has registered, so the memory of the copy must be
        # added to this sum. In contrast, vLLM 0.32 measures the memory in use. Neither version of
        # vLLM accounts for the memory that a swap needs.
        runner.model_memory_usage += weights.device_bytes
        worker.requested_memory -= weights.spare_bytes


def keep_plain(layer: Any, remove_weight: bool) -> None:  # noqa: ARG001 - vLLM's signature
    """Makes a layer compute its matrix products with torch, for weights in the unpacked layout
    (`patches.install_plain_cpu_kernels`)."""
    layer.cpu_linear = linear


def apply_experts(
    _: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *_args: Any,
    **_kwargs: Any,
) -> None:
    """SwiGLU experts, computed one after another.

    Args:
        output: [tokens, out], overwritten.
        hidden_states: [tokens, in].
        w1: [experts, 2 * ffn, in], gate above up.
        w2: [experts, out, ffn].
        topk_weights, topk_ids: [tokens, k], the weights and the numbers of each token's experts.
    """
    output.zero_()
    for expert in topk_ids.unique().tolist():
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = linear(hidden_states[token], w1[expert]).chunk(2, dim=-1)
        hidden = linear(silu(gate) * up, w2[expert])
        output.index_add_(0, token, hidden * topk_weights[token, choice, None].to(hidden.dtype))


def swap(
    core: Any,
    call: Callable[..., list[dict[str, Any]]],
    version: str,
    name: str,
    deadline: float,
) -> dict[str, Any]:
    """Swaps the weights. The swap runs in the engine's process, between two engine steps. After the
    swap, either all workers have the weights of `version` or all workers have the old weights,
    except after the result `torn`.

    Returns `seconds` and `tokens` if the swap succeeded; `tokens` is the number of tokens that each
    sequence has from the old weights. Returns `late` if the deadline has passed, or if vLLM sleeps.
    During a swap, vLLM sleeps only if the program that ordered the swap has died and a trainer has
    the GPU. Returns `error` if the swap failed and the old weights are restored. Returns `torn`,
    and ends all requests, if the old weights can't be restored.

    Args:
        call: the engine's `collective_rpc`.
        deadline: a value of `time.monotonic`.
    """
    if time.monotonic() > deadline or core.is_sleeping():
        return {"late": True}
    begin = time.perf_counter()
    answers = call(core, "tandem_call", None, ("swap", version))
    seconds = time.perf_counter() - begin
    if errors := [answer["error"] for answer in answers if "error" in answer]:
        before = getattr(core, "tandem_version", BASE)
        restored = call(core, "tandem_call", None, ("swap", before))
        if any("error" in answer for answer in restored):
            core.abort_requests(list(core.scheduler.requests))
            return {"torn": f"{errors[0]}; and the weights before can't be restored"}
        return {"error": errors[0]}
    core.tandem_version = version
    return {"seconds": seconds, "tokens": _tend(core, name)}


def _tend(core: Any, name: str) -> dict[str, int]:
    """Updates requests and cached prefixes after a swap. Returns the number of tokens that each
    request had before the swap."""
    scheduler = core.scheduler
    tokens = {
        r.request_id: r.num_output_tokens + r.num_output_placeholders
        for r in scheduler.requests.values()
    }
    patches.replace_hash_root()
    # With speculative decoding, drafted tokens may be in flight. It is not known yet how many of
    # them vLLM will accept.
    drafted = getattr(scheduler, "num_spec_tokens", 0) and any(
        r.num_output_placeholders for r in scheduler.running
    )
    if drafted:
        # vLLM discards the tokens in flight of running requests, and samples them again from the
        # new weights.
        tokens |= {request.request_id: request.num_output_tokens for request in scheduler.running}
        scheduler.reset_prefix_cache(reset_running_requests=True)
    for queue in (scheduler.waiting, getattr(scheduler, "skipped_waiting", ())):
        for request in queue:
            patches.hash_again(request)
            # vLLM 0.32 sets `num_output_placeholders` to 0 when it evicts a request, but still
            # delivers the tokens in flight, whose number is not known. The tokens in flight are
            # therefore discarded and sampled again from the new weights. If vLLM returns routed
            # experts, the tokens in flight are kept. The connector for routed experts can't take a
            # request back before it has received the request's tokens in flight.
            stale = getattr(request, "num_stale_output_tokens", 0)
            if stale and getattr(scheduler, "aux_output_connector", None) is None:
                request.drop_stale_output = True
    # vLLM 0.32 reports the version of the weights in each answer of /inference/v1/generate.
    if hasattr(core, "set_weight_version"):
        core.set_weight_version(name)
    return tokens
