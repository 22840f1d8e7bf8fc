"""A client of vLLM's HTTP interface. Whatever differs between vLLM versions is decided here, and only here."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from tandem.config import Settings
from tandem.errors import TandemError, Unauthorized
from tandem.vllm_client.names import ADMIN_HEADER

PATH_KEYED_PREFIX_CACHE = (0, 32)
"""From this version on, prefix-cache blocks are keyed by an adapter's name *and path*; before, by its name alone."""

_LORA_INFO = re.compile(r"^vllm:lora_requests_info\{(?P<labels>[^}]*)\}\s+(?P<value>\S+)", re.MULTILINE)
_IN_FLIGHT = re.compile(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\}\s+(?P<value>\S+)", re.MULTILINE)


class InferenceUnavailable(TandemError):
    """vLLM can't be reached, is starting, or its engine is dead. Asking again later can help."""

    code = "inference_unavailable"
    http_status = 503
    retriable = True


class InferenceRefused(TandemError):
    """vLLM answered, and the answer is no. Asking the same again gives the same."""

    code = "inference_refused"
    http_status = 502


class AdminClient:
    """One vLLM server. Every call is bounded by its timeout; only calls that change nothing are tried again."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        admin_token: str | None,
        timeout: float = 30.0,
        work_timeout: float = 120.0,
    ) -> None:
        """Seconds: `timeout` for what vLLM only looks up, `work_timeout` for what its engine must compute or load."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        if admin_token:
            headers[ADMIN_HEADER] = admin_token.strip()
        self.url = url
        self._work_timeout = work_timeout
        self._http = httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(timeout, connect=5.0))
        self._version: tuple[int, ...] | None = None

    @classmethod
    def from_settings(cls, settings: Settings, *, timeout: float = 30.0, work_timeout: float = 120.0) -> AdminClient:
        return cls(
            settings.resolved_inference_url,
            api_key=settings.inference_key,
            admin_token=settings.secret("admin_token"),
            timeout=timeout,
            work_timeout=work_timeout,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # ---- questions

    def healthy(self) -> bool:
        """Whether the server is up and its engine alive."""
        try:
            return self._http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def version(self) -> tuple[int, ...]:
        """vLLM's version, asked once: (0, 32, 0)."""
        if self._version is None:
            text = str(self._json("GET", "/version")["version"])
            numbers = re.match(r"(\d+(?:\.\d+)*)", text)
            # A build without a number is somebody's own of the newest source.
            self._version = tuple(int(n) for n in numbers[1].split(".")) if numbers else (999,)
        return self._version

    def forget_version(self) -> None:
        """The server went away; the next one may be another version."""
        self._version = None

    @property
    def prefix_cache_keyed_by_path(self) -> bool:
        """Whether an adapter loaded from another path under the same name can't meet the old one's cached blocks."""
        return self.version() >= PATH_KEYED_PREFIX_CACHE

    def models(self) -> dict[str, str]:
        """What is served: name -> the path it was loaded from (base model included)."""
        return {str(card["id"]): str(card.get("root") or "") for card in self._json("GET", "/v1/models")["data"]}

    def adapters_in_use(self) -> set[str]:
        """Names of the adapters that running or waiting requests use, as of vLLM's last step (`/metrics`)."""
        text = self._request("GET", "/metrics").text
        if not any(float(match["value"]) for match in _IN_FLIGHT.finditer(text)):
            return set()
        # One sample for every set of names there ever was; its value is the Unix time at which it was the present one.
        samples = [(float(match["value"]), match["labels"]) for match in _LORA_INFO.finditer(text)]
        if not samples:
            return set()
        names = re.findall(r'(?:running|waiting)_lora_adapters="([^"]*)"', max(samples)[1])
        return {name for group in names for name in group.split(",") if name}

    def prompt_logprobs(self, model: str, tokens: Sequence[int]) -> list[float]:
        """log p(tokens[j + 1] | tokens[: j + 1]) for each j, in nats at temperature 1, as `model` computes it now.

        vLLM never answers this from its prefix cache, and `logprobs_mode` makes no difference to prompt tokens.
        Raises InferenceRefused when the model is unknown or the prompt does not fit.
        """
        body = {
            "model": model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        answer = self._json("POST", "/v1/completions", body, tries=3, timeout=self._work_timeout)
        entries = answer["choices"][0].get("prompt_logprobs") or []
        if len(entries) != len(tokens):
            raise InferenceRefused(f"vLLM returned {len(entries)} prompt log-probs for {len(tokens)} tokens of {model}")
        # A value that JSON can't express (-inf, NaN) arrives as null.
        values = [entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], entries[1:], strict=True)]
        return [math.nan if value is None else float(value) for value in values]

    # ---- changes

    def load_lora(self, name: str, path: str) -> None:
        """Load the adapter at `path` (absolute) under a name that is not in use.

        Never in place: some versions then read the files again on every step. Raises InferenceRefused when vLLM can't
        load it.
        """
        body = {"lora_name": name, "lora_path": path, "load_inplace": False}
        self._request("POST", "/v1/load_lora_adapter", body, timeout=self._work_timeout)

    def unload_lora(self, name: str) -> bool:
        """Take the name away; requests that use the adapter finish with it. False if there was no such adapter."""
        try:
            self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except InferenceRefused as error:
            if self.models().get(name) is None:
                return False
            raise error
        return True

    def reset_prefix_cache(self, *, preempt: bool = False) -> bool:
        """Forget all cached blocks; False while running requests hold some, unless `preempt` makes them begin again."""
        path = "/reset_prefix_cache" + ("?reset_running_requests=true" if preempt else "")
        answer = self._request("POST", path)
        try:
            return bool(answer.json()["success"])
        except (ValueError, KeyError, TypeError):
            # Versions that don't say fail silently while blocks are held.
            return not any(float(m["value"]) for m in _IN_FLIGHT.finditer(self._request("GET", "/metrics").text))

    # ---- sleep

    def is_sleeping(self) -> bool:
        """Whether the engine sleeps, at any level, or is paused. One that is busy falling asleep answers when it has.

        That it sleeps does not prove that its memory is free (vLLM #47654): measure that.
        """
        return bool(self._json("GET", "/is_sleeping")["is_sleeping"])

    def sleep(self) -> None:
        """Have the engine move its weights to host memory and forget its KV cache; returns when it has.

        Level 1: level 2 would discard the base model's weights, and with LoRA vLLM can't load them again (#39934).
        Mode `keep`: requests that run are put back to the queue and begin their next token again after waking, new ones
        wait with them, and none ends early, as by vLLM's default. While it sleeps nothing may be loaded into it: an
        adapter would be written to memory that isn't there, and the engine dies.
        """
        self._request("POST", "/sleep?level=1&mode=keep", timeout=self._work_timeout)

    def wake_up(self) -> None:
        """The opposite; nothing happens to an engine that is awake. InferenceRefused where memory is missing: vLLM 0.26
        keeps what it had got by then and never wakes any more, later versions can be asked again."""
        self._request("POST", "/wake_up", timeout=self._work_timeout)

    # ---- transport

    def _json(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        tries: int = 1,
        timeout: float | None = None,
    ) -> Any:
        response = self._request(method, path, body, tries=tries, timeout=timeout)
        try:
            return response.json()
        except ValueError as error:
            raise InferenceUnavailable(f"{self.url}{path} did not answer with JSON: is that vLLM?") from error

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        tries: int = 1,
        timeout: float | None = None,
    ) -> httpx.Response:
        tries = 3 if method == "GET" else tries
        for attempt in range(tries):
            try:
                response = self._http.request(
                    method, path, json=body, timeout=timeout if timeout is not None else httpx.USE_CLIENT_DEFAULT
                )
                break
            except httpx.TransportError as error:
                # A timeout has cost its whole bound already; only a connection that failed is worth another try.
                if attempt + 1 == tries or isinstance(error, httpx.TimeoutException):
                    raise InferenceUnavailable(
                        f"vLLM at {self.url} can't be reached ({method} {path}): {error!r}"
                    ) from error
                time.sleep(0.1 * 2**attempt)
        if response.is_success:
            return response
        message = f"{method} {path} of vLLM at {self.url} answered {response.status_code}: {_message(response)}"
        if response.status_code in (401, 403):
            raise Unauthorized(f"{message}. It needs the TANDEM_ADMIN_TOKEN and TANDEM_API_KEY that vLLM has")
        if response.status_code in (502, 503, 504) or (response.status_code == 500 and not self.healthy()):
            raise InferenceUnavailable(message)
        raise InferenceRefused(message)


def _message(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return response.text[:500]
