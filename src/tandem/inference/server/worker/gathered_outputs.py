"""Gathers the tokens of several steps for the API server.

After each step, vLLM's engine sends the new token of each request to the API server. A request that
is not a stream needs its tokens only at its end. For such a request the engine keeps the tokens of
up to `MOST_STEPS` steps and sends them at once. Encoding a token with its log-prob takes longer
than keeping it, and the API server decodes fewer outputs. With a small model, these two processes
limit the answers per second.
"""

from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

MOST_STEPS = 16
"""Number of steps whose tokens the engine sends at once for a request. A larger number saves little
more time. vLLM's counter of tokens, which the watchdog and Prometheus read, would rise less
often."""

type Kept = dict[str, list[EngineCoreOutput]]
"""For each running request that may wait for its tokens: the outputs that the engine has not sent
yet, by the request's id."""


def keep_or_send(scheduler: Any, outputs: dict[int, EngineCoreOutputs]) -> None:
    """Decides for each output of a step whether the engine keeps it or sends it. A sent output also
    has the tokens of the request's kept outputs. The engine always sends a request's first and last
    output, and every output that has more than tokens and their log-probs.

    Args:
        scheduler: vLLM's scheduler. Its attribute `tandem_kept` has the kept outputs.
        outputs: a step's outputs for each API server; changed in place.
    """
    all_kept: Kept = scheduler.__dict__.setdefault("tandem_kept", {})
    requests = scheduler.requests  # the unfinished requests, by id
    for of_client in outputs.values():
        sent = []
        for output in of_client.outputs:
            kept = all_kept.get(output.request_id)
            if kept is None:
                sent.append(output)
                if output.finish_reason is None and _may_wait(requests.get(output.request_id)):
                    all_kept[output.request_id] = []
                continue
            kept.append(output)
            if len(kept) == MOST_STEPS or _has_more(output):
                sent.append(_joined(kept))
                kept.clear()
        of_client.outputs = sent
    for request_id in all_kept.keys() - requests.keys():
        del all_kept[request_id]  # the request has ended, or was aborted


def _has_more(output: EngineCoreOutput) -> bool:
    """Whether the output of a request that may wait has more than tokens and their log-probs. The
    other fields can only be set in a request's first or last output."""
    return (
        output.finish_reason is not None
        or output.events is not None
        or output.prefill_stats is not None
        or output.routed_experts is not None
        or output.num_nans_in_logits != 0
        or getattr(output, "new_sampling_mask", None) is not None  # vLLM 0.26 has no such field
    )


def _may_wait(request: Any) -> bool:
    """Whether a request may wait for its tokens. A request with stop strings must not wait: the API
    server looks for the strings and ends the request."""
    params = None if request is None else request.sampling_params
    return (
        params is not None
        and params.output_kind is RequestOutputKind.FINAL_ONLY
        and not params.stop
    )


def _joined(kept: list[EngineCoreOutput]) -> EngineCoreOutput:
    """One output with the tokens of all `kept` outputs. Only the last has anything else."""
    last = kept[-1]
    if len(kept) > 1:
        last.new_token_ids = [token for output in kept for token in output.new_token_ids]
        parts = [output.new_logprobs for output in kept if output.new_logprobs is not None]
        if parts:
            last.new_logprobs = _concatenated(parts)
    return last


def _concatenated(parts: list[LogprobsLists]) -> LogprobsLists:
    ids, logprobs, ranks = ([part[field] for part in parts] for field in range(3))
    # The number of columns is the largest number of log-probs that a request of the step asked for.
    # The API server uses the first columns, as many as this request asked for.
    columns = {part.shape[1] for part in logprobs}
    if len(columns) > 1:
        ids, logprobs = ([part[:, : min(columns)] for part in table] for table in (ids, logprobs))
    tables = np.concatenate(ids), np.concatenate(logprobs), np.concatenate(ranks)
    return LogprobsLists(*tables)
