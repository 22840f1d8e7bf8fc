"""vLLM as clients reach it: its address, the key, and whether it is the one that serves a run."""

import asyncio
import os

import httpx

from tandem.client.http import Backoff, connection
from tandem.errors import Unauthorized, Unreachable

VARIABLE = "TANDEM_INFERENCE_URL"
DEFAULT = "http://127.0.0.1:8000"
START_PATIENCE = 30.0
"""Seconds within which vLLM must list the run: a vLLM that has just started does not have its
adapters yet."""


def vllm_url(given: str | None = None) -> str:
    """vLLM's address without /v1: as given, else TANDEM_INFERENCE_URL, else http://127.0.0.1:8000.

    OPENAI_BASE_URL does not count: where it names another provider, that one would get the prompts
    and Tandem's key.
    """
    return (given or os.environ.get(VARIABLE) or DEFAULT).rstrip("/").removesuffix("/v1")


def open_vllm() -> httpx.AsyncClient:
    """vLLM's /v1, with the key of TANDEM_API_KEY or TANDEM_API_KEY_FILE."""
    arguments = connection(f"{vllm_url()}/v1", None, VARIABLE)
    arguments |= {
        "timeout": httpx.Timeout(3600.0, connect=5.0),
        "limits": httpx.Limits(max_connections=None),
    }
    return httpx.AsyncClient(**arguments)


async def raise_unless_serving(
    vllm: httpx.AsyncClient, run: str, patience: float = START_PATIENCE
) -> None:
    """Raises what is wrong where this address does not list a step of the run within `patience`
    seconds."""
    url, backoff = f"{vllm.base_url}models", Backoff(patience)
    remedy = (
        f"set {VARIABLE} to the address of the vLLM that serves the run (OPENAI_BASE_URL is not"
        " read)"
    )
    while True:
        try:
            answer = await vllm.get("models", timeout=10)
            if answer.status_code in (401, 403):
                raise Unauthorized(
                    f"{url} refuses the key; set TANDEM_API_KEY to vLLM's, or {remedy}"
                )
            names = listed_models(answer)
            if any(name.startswith(f"{run}@") for name in names):
                return
            found = f"lists {names}, without a step of {run!r}"
            if not answer.is_success:
                found = f"answers {answer.status_code}"
            problem = Unreachable(f"{url} {found}; {remedy}")
        except httpx.TransportError as error:
            problem = Unreachable(
                f"{url} does not answer ({type(error).__name__}: {error}); start vLLM, or {remedy}"
            )
        await asyncio.sleep(backoff.next(problem))


def listed_models(answer: httpx.Response) -> list[str]:
    """The models of a list; none where the answer is something else."""
    try:
        return [str(card["id"]) for card in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return []
