"""Whether the controller and vLLM answer."""

from __future__ import annotations

from collections.abc import Iterator

import httpx

from tandem.cli.checks import Check
from tandem.client.http import connection
from tandem.config import Settings


def controller_checks(_: Settings) -> Iterator[Check]:
    """The controller at TANDEM_URL, with the key from the environment."""
    arguments = connection(None, None) | {"timeout": 5.0}
    url = arguments["base_url"]
    try:
        with httpx.Client(**arguments) as http:
            ready, runs = http.get("/readyz"), http.get("/v1/runs")
    except httpx.HTTPError as error:
        remedy = "start it (`tandem up`), or set TANDEM_URL to its address"
        yield Check("warn", "controller", f"{url} does not answer ({type(error).__name__})", remedy)
        return
    if ready.status_code != 200:
        yield Check("fail", "controller", f"{url} is not ready: {ready.text[:300]}", "see its log")
    elif runs.status_code == 401:
        yield Check("fail", "controller", f"{url} refuses our key", "set TANDEM_API_KEY to one of its keys")
    elif runs.status_code != 200:
        yield Check("fail", "controller", f"{url}/v1/runs answers {runs.status_code}: {runs.text[:300]}", "see its log")
    else:
        yield Check("ok", "controller", f"{url}: version {ready.json().get('version')}, {len(runs.json())} runs")


def inference_checks(settings: Settings) -> Iterator[Check]:
    """vLLM's health and its list of models."""
    url = settings.resolved_inference_url
    headers = connection(None, None)["headers"]
    try:
        health = httpx.get(f"{url}/health", timeout=5.0)
        models = httpx.get(f"{url}/v1/models", headers=headers, timeout=5.0)
    except httpx.HTTPError as error:
        remedy = "start it (`tandem up`; it takes a minute), or set TANDEM_INFERENCE_URL"
        yield Check("warn", "vLLM", f"{url} does not answer ({type(error).__name__})", remedy)
        return
    if health.status_code != 200:
        remedy = "see its log; supervisord restarts it"
        yield Check("fail", "vLLM", f"{url}/health answers {health.status_code}", remedy)
    elif models.status_code != 200:
        yield Check("fail", "vLLM", f"{url}/v1/models answers {models.status_code}", "set TANDEM_API_KEY to its key")
    else:
        names = [model.get("id", "?") for model in models.json().get("data", [])]
        yield Check("ok", "vLLM", f"{url}: serves {', '.join(names) or 'nothing'}")
