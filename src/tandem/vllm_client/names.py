"""Names that both Tandem and its vLLM server use. The module imports only the standard library,
because vLLM's own process imports it."""

from typing import Literal

ADMIN_HEADER = "x-tandem-admin-token"
"""The name of the request header with the admin token. The API key is in the header
`Authorization`, and vLLM itself checks it."""

SESSION_HEADER = "x-session-id"
"""The request header with a rollout's name. All turns of the rollout go to the same inference
server. At each turn, the rollout door (vLLM's path /rollout/v1) continues the tokens of the earlier
turns."""
GROUP_HEADER = "x-tandem-group"
"""The request header with the name of a group of rollouts that share a prompt. The rollouts of a
group start on the same inference server, whose cache has the prompt."""

BASE_MODEL_NAME = "base"
"""The name under which vLLM serves the base model without an adapter. A checkpoint can't have this
name, because checkpoints are named `<run>@<step>`."""

KEYS_VARIABLE = "TANDEM_API_KEY_DIGESTS"
"""The environment variable with the hashes and names of all API keys, for vLLM's server."""

MERGED_VARIABLE = "TANDEM_VLLM_MERGED"
"""The environment variable that makes vLLM serve merged weights: JSON with `targets` and
`second_copy`."""

MERGED_ROUTE = "/tandem/merged"
"""The admin route through which the publisher swaps merged weights."""

READY_ROUTE = "/tandem/ready"
"""The route that shows whether one of several inference servers answers requests: status 200 or
503. The server's publisher sets this with the admin token."""

READY_MARGIN_SECONDS = 2.0
"""A server's ready route answers 503 this many seconds before the server stops answering, so that
the proxy stops sending requests in time."""

NOT_HELD = "vLLM does not hold the adapter"
"""The beginning of a worker's error message if, after loading an adapter, the worker has other
tensors than the adapter's file. vLLM answers the load with status 500, and the same load would fail
in the same way again."""

MergedPhase = Literal["empty", "swapping", "unverified", "served", "torn"]
"""The state of merged weights, as the server reports it."""

_VLLMS_PROBES = frozenset({"/health", "/ping", "/version", "/metrics", "/metrics/"})

PUBLIC_PATHS = _VLLMS_PROBES | {
    "/v1/models",
    "/v1/chat/completions",
    "/v1/completions",
    "/inference/v1/generate",
}
"""Paths that the guard (the middleware that closes the admin routes) does not protect: liveness,
metrics, and routes on which vLLM itself checks the API key."""

PROBE_PATHS = _VLLMS_PROBES | {READY_ROUTE}
"""Paths that other hosts may request without a key."""

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
"""Paths of the rollout door (`inference.server.middleware.rollout`). A request first passes the
guard, then the rollout door, then vLLM."""
