"""Names that Tandem and its vLLM server agree on. Standard library only: vLLM's own process imports
this."""

from typing import Literal

ADMIN_HEADER = "x-tandem-admin-token"
"""The request header with the admin token. `Authorization` carries the API key, which vLLM checks
itself."""

SESSION_HEADER = "x-session-id"
"""The request header with a rollout's name: its turns go to one inference server, and the rollout
door continues their tokens."""
GROUP_HEADER = "x-tandem-group"
"""The request header with the name of the rollouts that share a prompt: they start on one inference
server, whose cache has the prompt."""

BASE_MODEL_NAME = "base"
"""vLLM serves the base model without an adapter under this name. A run can't have this name,
because checkpoints are `<run>@<step>`."""

KEYS_VARIABLE = "TANDEM_API_KEY_DIGESTS"
"""The environment variable by which vLLM's server gets the hashes and names of all API keys."""

MERGED_VARIABLE = "TANDEM_VLLM_MERGED"
"""The environment variable that has vLLM serve merged weights: JSON with `targets` and
`second_copy`."""

MERGED_ROUTE = "/tandem/merged"
"""The admin route by which the publisher swaps merged weights."""

READY_ROUTE = "/tandem/ready"
"""The route that tells whether one of several inference servers answers requests: 200 or 503. With
the admin token, its publisher sets this."""

READY_MARGIN_SECONDS = 2.0
"""Seconds by which a server's ready route says no before the server stops to answer, so that the
proxy sends no more."""

NOT_HELD = "vLLM does not hold the adapter"
"""The beginning of a worker's refusal if it holds other tensors than an adapter's file. vLLM
answers 500 with it, and the same load gives the same answer again."""

MergedPhase = Literal["empty", "swapping", "unverified", "served", "torn"]
"""The state of merged weights that the server reports."""

_VLLMS_PROBES = frozenset({"/health", "/ping", "/version", "/metrics", "/metrics/"})

PUBLIC_PATHS = _VLLMS_PROBES | {
    "/v1/models",
    "/v1/chat/completions",
    "/v1/completions",
    "/inference/v1/generate",
}
"""Paths that the guard lets through: liveness, metrics, and routes on which vLLM itself checks the
API key."""

PROBE_PATHS = _VLLMS_PROBES | {READY_ROUTE}
"""Paths that are open to other hosts too."""

ROLLOUT_PATHS = frozenset(
    {
        "/rollout/v1/models",
        "/rollout/v1/chat/completions",
        "/rollout/v1/completions",
        "/rollout/v1/responses",
        "/rollout/v1/messages",
        "/rollout/v1/messages/count_tokens",
        "/rollout/inference/v1/generate",
    }
)
"""Paths of the rollout door (`rollout.py`), which is inside the guard and reads requests before
vLLM does."""
