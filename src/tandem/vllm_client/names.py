"""Names that Tandem and its vLLM server agree on. Standard library only: vLLM's own process imports
this."""

from typing import Literal

ADMIN_HEADER = "x-tandem-admin-token"
"""The request header with the admin token. `Authorization` carries the API key, which vLLM checks
itself."""

BASE_MODEL_NAME = "base"
"""vLLM serves the base model without an adapter under this name. No run can have it: checkpoints
are `<run>@<step>`."""

KEYS_VARIABLE = "TANDEM_API_KEY_DIGESTS"
"""The environment variable by which vLLM's server gets the hashes and names of all API keys."""

MERGED_VARIABLE = "TANDEM_VLLM_MERGED"
"""The environment variable that has vLLM serve merged weights: JSON with `targets` and
`second_copy`."""

MERGED_ROUTE = "/tandem/merged"
"""The admin route by which the publisher swaps merged weights."""

READY_ROUTE = "/tandem/ready"
"""Whether one of several inference servers answers requests: 200 or 503. With the admin token its
publisher decides it."""

NOT_HELD = "vLLM does not hold the adapter"
"""How a worker's refusal begins that holds other tensors than an adapter's file. vLLM answers 500
with it, and the same load gives the same answer again."""

MergedPhase = Literal["empty", "swapping", "unverified", "served", "torn"]
"""What state the server says that its merged weights are in."""
