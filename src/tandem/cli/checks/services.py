"""Checks of running services: controller, vLLM, exporters, and routes that must be closed. The
checks raise Unreachable if a service does not answer."""

import time
from collections.abc import Iterator
from typing import Any

import httpx

from tandem.cli.checks.check import Answer, Asked
from tandem.client.http import connection
from tandem.client.vllm import listed_models, vllm_url
from tandem.errors import Unreachable

_ANSWER_SECONDS, _PAUSE_SECONDS = 10.0, 0.5


def controller(asked: Asked) -> Iterator[Answer]:
    name, url = "controller", connection(None, None)["base_url"]
    ready, runs = (_get(f"{url}{path}", asked.patience) for path in ("/readyz", "/v1/runs"))
    if wrong := _wrong(name, ready, runs):
        yield wrong
    else:
        found = f"{url}: version {ready.json().get('version')}, {len(runs.json())} runs"
        yield Answer("ok", name, found)


def inference(asked: Asked) -> Iterator[Answer]:
    name, url = "vLLM", inference_url(asked)
    health, models = (_get(f"{url}{path}", asked.patience) for path in ("/health", "/v1/models"))
    if wrong := _wrong(name, health, models):
        yield wrong
        return
    served = listed_models(models)
    if any(model == "base" or "@" in model for model in served):
        yield Answer("ok", name, f"{url}: serves {', '.join(served)}")
    else:
        found = f"{url} serves {served}, without the model 'base' or a step of a run"
        yield Answer(
            "fail", name, found, "set TANDEM_INFERENCE_URL to the address of Tandem's vLLM"
        )


def inference_url(asked: Asked) -> str:
    """vLLM's address, without /v1. OPENAI_BASE_URL is not used; `vllm_url` gives the reason."""
    return vllm_url(asked.inference or asked.settings.resolved_inference_url)


def metrics(asked: Asked) -> Iterator[Answer]:
    for url in asked.metrics:
        if "\ntandem_build_info{" in _get(url, asked.patience, with_key=False).text:
            yield Answer("ok", "metrics", url)
        else:
            yield Answer("fail", "metrics", f"{url} has no tandem_build_info")


def closed(asked: Asked) -> Iterator[Answer]:
    for url in asked.closed:
        status = request("POST", url).status_code
        if status == 401:
            yield Answer("ok", "closed", url)
        else:
            yield Answer("fail", "closed", f"{url} answers {status} to an API key, not 401")


def request(
    method: str, url: str, *, with_key: bool = True, timeout: float = _ANSWER_SECONDS, **more: Any
) -> httpx.Response:
    """The response to one request. Raises Unreachable if the server does not answer.

    Args:
        url: the whole address.
        with_key: whether the request has the API key of this environment.
        timeout: seconds without an answer after which Unreachable is raised.
        more: further arguments of `httpx.request`.
    """
    headers = connection(None, None)["headers"] if with_key else {}
    try:
        return httpx.request(method, url, headers=headers, timeout=timeout, **more)
    except httpx.TransportError as error:
        raise Unreachable(f"{url} does not answer ({type(error).__name__}: {error})") from error


def _get(url: str, patience: float, *, with_key: bool = True) -> httpx.Response:
    """The response to a GET request. The request is repeated for up to `patience` seconds while the
    server does not answer or the status is 5xx."""
    until = time.monotonic() + patience
    while True:
        last = time.monotonic() + _PAUSE_SECONDS > until
        try:
            response = request("GET", url, with_key=with_key)
            if last or not response.is_server_error:
                return response
        except Unreachable:
            if last:
                raise
        time.sleep(_PAUSE_SECONDS)


def _wrong(name: str, *responses: httpx.Response) -> Answer | None:
    """The answer about the first response whose status is not 200; None if there is no such
    response."""
    for response in responses:
        url = response.url
        if response.status_code in (401, 403):
            remedy = "set TANDEM_API_KEY to one of its keys"
            return Answer("fail", name, f"{url} refuses our key", remedy)
        if response.status_code != 200:
            found = f"{url} answers {response.status_code}: {response.text[:300]}"
            return Answer("fail", name, found, "see its log")
    return None
