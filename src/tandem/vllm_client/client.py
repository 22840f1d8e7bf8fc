"""The HTTP calls that Tandem makes to a vLLM server: health, models, adapters, prompt log-probs,
sleep and wake."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from tandem.config import Settings
from tandem.errors import TandemError, Unauthorized
from tandem.vllm_client.names import ADMIN_HEADER, MERGED_ROUTE, NOT_HELD, READY_ROUTE

_LORA_INFO = re.compile(
    r"^vllm:lora_requests_info\{(?P<labels>[^}]*)\}\s+(?P<value>\S+)", re.MULTILINE
)
_ADAPTERS = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')
SCORING_PRIORITY = -1
"""vLLM's `priority` of requests that verify a checkpoint. Lower values come first; other requests
have priority 0."""

_READY_SECONDS = 3.0
"""Seconds to wait for an answer that vLLM gives at once. The caller asks again after 2 seconds."""

_IN_FLIGHT = re.compile(
    r"^vllm:num_requests_(?:running|waiting)\{[^}]*\}\s+(?P<value>\S+)", re.MULTILINE
)


class InferenceUnavailable(
    TandemError, code="inference_unavailable", http_status=503, retriable=True
):
    """vLLM can't be reached, is starting, is busy, or its engine is dead. The same call can succeed
    later."""


class InferenceGone(InferenceUnavailable):
    """Nothing listens at vLLM's address. The next server at this address will have no adapters."""


class InferenceRefused(TandemError, code="inference_refused", http_status=502):
    """vLLM answered with an error. The same call gives the same answer again."""


class InferenceConflict(InferenceRefused):
    """vLLM answered 409, because its process or its state differs from what the caller expects."""


class InferenceFailed(InferenceRefused):
    """vLLM answered 500 and is healthy. The cause may be the request, or a temporary fault of
    vLLM."""


class VllmClient:
    """A client of one vLLM server. Every call has a timeout. Only calls without side effects are
    retried.

    Every method except `healthy` can raise InferenceUnavailable, InferenceRefused (or a subclass of
    these) and Unauthorized.
    """

    def __init__(
        self, settings: Settings, *, timeout: float = 30.0, work_timeout: float = 120.0
    ) -> None:
        """Raises InvalidInput if a file with a secret can't be read.

        Args:
            timeout: seconds for answers that the API server gives without the engine.
            work_timeout: seconds for answers that need the engine.
        """
        headers = {}
        if settings.inference_key:
            headers["Authorization"] = f"Bearer {settings.inference_key}"
        if admin_token := settings.secret("admin_token"):
            headers[ADMIN_HEADER] = admin_token
        self.url = settings.resolved_inference_url
        self._timeout, self._work_timeout = timeout, work_timeout
        # Proxies from the environment are not used, because they would get the secrets.
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=_limits(timeout), trust_env=False
        )

    def healthy(self) -> bool:
        """Whether the server answers and the server's engine is alive. Never raises an error."""
        try:
            return self._http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def prefix_cache_keyed_by_path(self) -> bool:
        """Whether the keys of an adapter's cached blocks contain the adapter's path (from vLLM 0.32
        on). With the path in the key, a new adapter under a known name can't hit the old adapter's
        blocks. Older versions, and versions without a number, use only the adapter's name.
        """
        version = re.match(r"(\d+)\.(\d+)", str(self._ask("GET", "/version")["version"]))
        return version is not None and (int(version[1]), int(version[2])) >= (0, 32)

    def models(self) -> dict[str, str]:
        """Maps the name of each served model (also the base model) to the path of its files."""
        return {
            str(card["id"]): str(card.get("root") or "")
            for card in self._ask("GET", "/v1/models")["data"]
        }

    def longest_prompt(self) -> int:
        """The largest number of prompt tokens that leaves room for one sampled token."""
        cards = self._ask("GET", "/v1/models")["data"]
        return next(int(card["max_model_len"]) for card in cards if card.get("max_model_len")) - 1

    def adapters_in_use(self) -> set[str]:
        """Names of the adapters that running or waiting requests used at the time of the engine's
        last step (`/metrics`)."""
        text = self._request("GET", "/metrics").text
        # vLLM's metric has one sample for each set of adapters in use at the same time. The
        # sample's value is the Unix time of the last engine step with that set.
        samples = _adapter_samples(text)
        return (
            max(samples, key=lambda sample: sample[0])[1]
            if samples and _requests_in_flight(text)
            else set()
        )

    def adapters_last_used(self) -> dict[str, float]:
        """Maps an adapter to the last time at which a request used it, in Unix seconds. Only
        adapters that were used since the server's start are included (`/metrics`)."""
        used: dict[str, float] = {}
        for at, names in _adapter_samples(self._request("GET", "/metrics").text):
            used |= {name: max(at, used.get(name, 0.0)) for name in names}
        return used

    def prompt_logprobs(self, model: str, *prompts: Sequence[int]) -> list[list[float]]:
        """For each prompt, the len(tokens) - 1 values log p(tokens[j + 1] | tokens[: j + 1]), in
        nats, at temperature 1. A value that is not finite is NaN. Raises InferenceRefused for an
        unknown model or a prompt that is too long.

        vLLM computes the values anew in every call, without its prefix cache. The option
        `logprobs_mode` of vLLM does not affect the values.
        """
        # One request contains all prompts, because each separate request would wait for a place in
        # the batch. The request's priority puts it before all waiting requests.
        body = {
            "model": model,
            "prompt": list(map(list, prompts)),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "priority": SCORING_PRIORITY,
        }
        choices = self._ask("POST", "/v1/completions", body, timeout=self._work_timeout)["choices"]
        if len(choices) != len(prompts):
            raise InferenceRefused(
                f"vLLM returned {len(choices)} answers to {len(prompts)} prompts for {model}"
            )
        return [
            _logprobs(model, tokens, choice)
            for tokens, choice in zip(prompts, choices, strict=True)
        ]

    def load_lora(self, name: str, path: str) -> None:
        """Load the adapter at `path` (absolute) under an unused name. Raises InferenceRefused if
        vLLM can't load the adapter."""
        # With `load_inplace`, some vLLM versions read the files again in every engine step.
        body = {"lora_name": name, "lora_path": path, "load_inplace": False}
        self._request("POST", "/v1/load_lora_adapter", body, timeout=self._work_timeout)

    def unload_lora(self, name: str) -> None:
        """Unload the adapter `name`, if vLLM has it. Requests that already run with the adapter
        finish with this adapter."""
        try:
            self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except InferenceRefused:
            if name in self.models():
                raise

    def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks. The engine computes running requests again. Returns False if
        blocks remain."""
        response = self._request("POST", "/reset_prefix_cache?reset_running_requests=true")
        if response.content:
            return bool(response.json()["success"])
        # Older versions of vLLM send an empty body even after a failure.
        return not self.has_requests()

    def merged(self) -> dict[str, Any]:
        """The `phase`, `name` and `path` of vLLM's merged weights (see
        `inference.server.middleware.merged_server`)."""
        return dict(self._ask("GET", MERGED_ROUTE))

    def swap_merged(
        self,
        name: str,
        path: str,
        scale: float,
        requests: str,
        seconds: float,
        source: Mapping[str, Any] | None = None,
        again: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Merge the adapter in `path` into the base model's weights, or replace vLLM's weights by
        the weights of `source`. New requests wait until `announce_merged` is called.

        Raises InferenceUnavailable if running requests did not end in time (`requests="wait"`), or
        if the engine did not answer. After InferenceUnavailable, the same call can succeed later.
        Raises InferenceRefused if the weights can't be used.

        Args:
            name: the model's new name, `<run>@<step>`.
            path: the adapter's directory. With a `source`, it is only a name for the weights.
            scale: the adapter's alpha / rank.
            seconds: time limit of the whole swap, including the wait for running requests.
            source: the source from which the workers get whole weights (`worker/landing.py`). If it
                is None, the workers merge the adapter into the base model's weights.
            again: the source that vLLM uses if it later returns to these weights.
        """
        order = {
            "name": name,
            "path": path,
            "scale": scale,
            "requests": requests,
            "seconds": seconds,
        }
        order |= {"source": source, "again": again}
        return dict(
            self._ask("POST", f"{MERGED_ROUTE}/swap", order, timeout=seconds + self._work_timeout)
        )

    def announce_merged(self, path: str) -> None:
        """Let requests use vLLM's current weights, which must be the weights of `path`."""
        self._request("POST", f"{MERGED_ROUTE}/announce", {"path": path})

    def revert_merged(self, path: str, *, to_base: bool = False) -> None:
        """Return to the weights that were announced last, if vLLM's current weights are those of
        `path`. With `to_base`, return to the base model's weights instead, and serve no run."""
        self._request(
            "POST",
            f"{MERGED_ROUTE}/revert",
            {"path": path, "to_base": to_base},
            timeout=self._work_timeout,
        )

    def merged_rows(self, rows: Mapping[str, int]) -> list[Mapping[str, Any]]:
        """One row of each named tensor, from the workers' memory (see `SpotCheck.wrong`). `rows`
        maps a tensor's name to the number of the row."""
        answer = self._ask(
            "POST", f"{MERGED_ROUTE}/rows", {"rows": dict(rows)}, timeout=self._work_timeout
        )
        return list(answer["rows"])

    def ready_instance(self) -> str:
        """The id of the process that runs vLLM now. A server without a proxy has no such id."""
        return str(self._ask("GET", READY_ROUTE)["instance"])

    def is_ready(self) -> bool:
        """Whether the proxy of several servers may send requests to this vLLM."""
        return bool(self._ask("GET", READY_ROUTE)["ready"])

    def has_requests(self) -> bool:
        """Whether requests run or wait (`/metrics`)."""
        return _requests_in_flight(self._request("GET", "/metrics").text)

    def set_ready(self, until: float, instance: str | None) -> bool:
        """Permit the process `instance` (None: any process) to answer requests until `until`, a
        time of the monotonic clock. Returns False if another process runs vLLM now."""
        order = {"until": until, "instance": instance}
        try:
            self._request("POST", READY_ROUTE, order, timeout=_READY_SECONDS)
        except InferenceConflict:
            return False
        return True

    def is_sleeping(self) -> bool:
        """Whether the engine sleeps, at any level, or is paused. While the engine falls asleep,
        vLLM delays its answer. A sleeping engine may still hold its memory (vLLM issue 47654), so
        measure the memory in use."""
        return bool(self._ask("GET", "/is_sleeping")["is_sleeping"])

    def sleep(self) -> None:
        """Move the weights to host memory and drop the KV cache. Returns after the engine has
        fallen asleep. Load no adapter into a sleeping engine: vLLM would write the adapter to
        unmapped memory, which ends the engine.

        Sleep level 1 is used, because with LoRA vLLM can't reload the base weights that level 2
        discards (vLLM issue 39934). Mode `keep` is used, so that running requests return to the
        queue and continue after `wake_up`. The default mode would end running requests early.
        """
        self._request("POST", "/sleep?level=1&mode=keep", timeout=self._work_timeout)

    def wake_up(self) -> None:
        """Wake the engine, if it sleeps. Raises InferenceRefused if there is too little memory.
        After a failed wake-up, vLLM 0.26 can't wake any more, so `tandem up` restarts vLLM. Later
        versions of vLLM accept another call of `wake_up`."""
        self._request("POST", "/wake_up", timeout=self._work_timeout)

    def _ask(
        self, method: str, path: str, body: object = None, timeout: float | None = None
    ) -> Any:
        response = self._request(method, path, body, timeout)
        try:
            return response.json()
        except ValueError as error:
            raise InferenceUnavailable(
                f"{response.url} did not answer with JSON: is it a vLLM server?"
            ) from error

    def _request(
        self, method: str, path: str, body: object = None, timeout: float | None = None
    ) -> httpx.Response:
        """The successful response to a request. Calls without side effects are tried three times.
        `timeout`: seconds, in place of the default."""
        tries = 3 if method == "GET" or path == "/v1/completions" else 1
        for attempt in range(tries):
            try:
                response = self._http.request(
                    method, path, json=body, timeout=_limits(timeout or self._timeout)
                )
                break
            except httpx.TransportError as error:
                # After a timeout, the call is not tried again, because it has used all of its time.
                # After a failed connection, the call is tried again.
                if attempt + 1 == tries or isinstance(error, httpx.TimeoutException):
                    message = f"vLLM at {self.url} can't be reached ({method} {path}): {error!r}"
                    if isinstance(error, httpx.ReadTimeout) and path == "/v1/completions":
                        problem = (
                            f"vLLM at {self.url} did not answer {method} {path} within"
                            f" {timeout:g} s"
                        )
                        message = (
                            f"{problem}: it has a long queue, or TANDEM_MAX_LORAS adapters are"
                            " in use"
                        )
                    kind = (
                        InferenceGone
                        if isinstance(error, httpx.ConnectError)
                        else InferenceUnavailable
                    )
                    raise kind(message) from error
                time.sleep(0.1 * 2**attempt)
        if response.is_success:
            return response
        message = (
            f"{method} {path} of vLLM at {self.url} answered {response.status_code}:"
            f" {_error_message(response)}"
        )
        if response.status_code in (401, 403):
            raise Unauthorized(
                f"{message}. Set TANDEM_ADMIN_TOKEN and TANDEM_API_KEY to the values that vLLM has"
            )
        if response.status_code in (408, 429, 502, 503, 504) or (
            response.status_code == 500 and not self.healthy()
        ):
            raise InferenceUnavailable(message)
        if response.status_code == 409:
            raise InferenceConflict(message)
        failed = response.status_code == 500 and NOT_HELD not in message
        raise (InferenceFailed if failed else InferenceRefused)(message)


def _logprobs(model: str, tokens: Sequence[int], choice: Mapping[str, Any]) -> list[float]:
    entries = choice.get("prompt_logprobs") or []
    if len(entries) != len(tokens):
        raise InferenceRefused(
            f"vLLM returned {len(entries)} prompt log-probs for {len(tokens)} tokens of {model}"
        )
    values = [
        entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], entries[1:], strict=True)
    ]
    # JSON has neither NaN nor infinity, so vLLM sends null.
    return [math.nan if value is None else float(value) for value in values]


def _limits(seconds: float) -> httpx.Timeout:
    """The time limits of a request. The answer may take `seconds`, but connecting must be fast, so
    that an unreachable host is noticed."""
    return httpx.Timeout(seconds, connect=5.0)


def _error_message(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return response.text[:500]


def _adapter_samples(metrics: str) -> list[tuple[float, set[str]]]:
    """Pairs (Unix time, adapters): requests last used these adapters together at this time."""
    samples = []
    for match in _LORA_INFO.finditer(metrics):
        groups = _ADAPTERS.findall(match["labels"])
        samples.append(
            (float(match["value"]), {name for group in groups for name in group.split(",") if name})
        )
    return samples


def _requests_in_flight(metrics: str) -> bool:
    """Whether requests run or wait, according to the text of `/metrics`."""
    return any(float(match["value"]) for match in _IN_FLIGHT.finditer(metrics))
