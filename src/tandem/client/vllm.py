"""The client's connection to vLLM: vLLM's address, the key, and whether vLLM serves the run."""

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from urllib.request import getproxies, proxy_bypass

import httpx
from pydantic_core import from_json

from tandem.client.http import Backoff, connection
from tandem.errors import InvalidInput, Unauthorized, Unreachable
from tandem.vllm_client.names import GROUP_HEADER, SESSION_HEADER

if TYPE_CHECKING:
    import aiohttp

VARIABLE = "TANDEM_INFERENCE_URL"
DEFAULT = "http://127.0.0.1:8000"
_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 3600.0
# Seconds after which the client closes an idle connection. vLLM's limit for an idle connection is
# 5 s. A request that is sent while vLLM closes the connection would fail.
_KEPT_SECONDS = 4.0
START_PATIENCE = 30.0
"""Seconds within which vLLM must list the run. The wait is needed because a vLLM that has just
started has not loaded its adapters yet."""


def vllm_url(given: str | None = None) -> str:
    """vLLM's address without /v1: `given`, else TANDEM_INFERENCE_URL, else http://127.0.0.1:8000.

    OPENAI_BASE_URL is ignored: if it names another provider, that provider would get the prompts
    and Tandem's key.
    """
    return (given or os.environ.get(VARIABLE) or DEFAULT).rstrip("/").removesuffix("/v1")


@dataclass(frozen=True)
class HttpAnswer:
    """vLLM's answer, with any status."""

    status: int
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """The content as JSON. Raises ValueError if the content is not JSON."""
        return from_json(self.content)


class Vllm:
    """A client of vLLM's /v1 at `url`, for one event loop. The client is an async context manager
    and must be entered before use.

    The client does not use httpx: httpx's pool goes through all connections for each request, so
    the time for N concurrent requests grows with N² (docs/performance.md, Sampling beside
    training). The key in `headers` is sent to `url` alone: redirects are not followed, and neither
    cookies nor ~/.netrc are read.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url, self._headers = url, headers
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        import aiohttp  # imported late: the import takes 0.4 s, and only `Vllm` needs it

        parsed = httpx.URL(self.url)
        connector = aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=_KEPT_SECONDS,
            # The session trusts the same certificates as the controller's client.
            ssl=httpx.create_ssl_context() if parsed.scheme == "https" else True,
        )
        proxies = {} if proxy_bypass(parsed.host) else getproxies()
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            proxy=proxies.get(parsed.scheme) or proxies.get("all"),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        seconds: float = _ANSWER_SECONDS,
        session: str | None = None,
        group: str | None = None,
    ) -> HttpAnswer:
        """Send a request once. Raises Unreachable if vLLM does not answer within `seconds`.

        Args:
            body: JSON.
            session: the rollout's name. The request goes to the path /rollout/v1, where a later
                turn continues the session's tokens. With several inference servers, all requests of
                a session go to one server.
            group: the name of a group of sessions. The first requests of all sessions of the group
                go to the same inference server.
        """
        import aiohttp

        arguments: dict[str, Any] = {"allow_redirects": False, "headers": {}}
        if body is not None:
            text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            arguments |= {"data": text.encode(), "headers": {"Content-Type": "application/json"}}
        url = f"{self.url}/{path}"
        if session is not None:
            url = f"{self.url.removesuffix('/v1')}/rollout/v1/{path}"
            arguments["headers"][SESSION_HEADER] = session
        if group is not None:
            arguments["headers"][GROUP_HEADER] = group
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.request(method, url, **arguments) as response,
            ):
                return HttpAnswer(response.status, await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unreachable(f"{url} does not answer ({type(error).__name__}: {error})") from error


def open_vllm() -> Vllm:
    """A client of vLLM's /v1 with the key from TANDEM_API_KEY or TANDEM_API_KEY_FILE. Raises
    InvalidInput if the address contains credentials although a key is given."""
    arguments = connection(f"{vllm_url()}/v1", None, VARIABLE)
    url, headers = arguments["base_url"], arguments["headers"]
    if httpx.URL(url).userinfo and "Authorization" in headers:
        problem = "it has credentials, and there is an API key; leave one of them out"
        raise InvalidInput(problem, field=VARIABLE)
    return Vllm(url, headers)


async def raise_unless_serving(vllm: Vllm, run: str, patience: float = START_PATIENCE) -> None:
    """Raises Unreachable if vLLM does not list a step of the run in time, and Unauthorized if vLLM
    refuses the key.

    Args:
        run: the run's name.
        patience: seconds during which a step may appear in vLLM's list.
    """
    url, backoff = f"{vllm.url}/models", Backoff(patience)
    remedy = (
        f"set {VARIABLE} to the address of the vLLM that serves the run (OPENAI_BASE_URL is not"
        " read)"
    )
    while True:
        try:
            answer = await vllm.request("GET", "models", seconds=10)
            if answer.status in (401, 403):
                raise Unauthorized(
                    f"{url} refuses the key; set TANDEM_API_KEY to vLLM's, or {remedy}"
                )
            names = listed_models(answer)
            if any(name.startswith(f"{run}@") for name in names):
                return
            found = f"lists {names}, without a step of {run!r}"
            if not answer.is_success:
                found = f"answers {answer.status}"
            problem = Unreachable(f"{url} {found}; {remedy}")
        except Unreachable as error:
            problem = Unreachable(f"{error.message}; start vLLM, or {remedy}")
        await asyncio.sleep(backoff.next(problem))


def listed_models(answer: HttpAnswer | httpx.Response) -> list[str]:
    """The names of the models in vLLM's list; empty if the answer is not a list of models."""
    try:
        return [str(card["id"]) for card in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return []
