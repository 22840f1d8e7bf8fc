"""Samples at vLLM by token ids. Turns a request of Tinker's API into a request to vLLM, and vLLM's
answer into Tinker's form."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp
import numpy as np
from pydantic_core import from_json, to_json

from tandem.config import Settings
from tandem.controller.tinker.results import ABSENT, Sampled, SampleResult, Top
from tandem.controller.tinker.schemas import SampleRequest
from tandem.data.packed_format import Float32
from tandem.errors import InvalidInput, TandemError

_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 3600.0
# Seconds after which this program closes an idle connection. vLLM itself closes an idle connection
# after 5 s.
_KEPT_SECONDS = 4.0
# Seconds for which a request is repeated while vLLM does not answer. A restart or a sleep of vLLM
# takes less than PATIENCE_SECONDS, so the client sees only a slow request.
PATIENCE_SECONDS = 600.0
# Seconds for which a request is repeated while vLLM does not have the model, for example because
# vLLM has just started and still loads adapters.
LOADING_SECONDS = 60.0
_LENGTH_SECONDS = 60.0  # seconds for which vLLM's context length is cached
_AGAIN_STATUSES = (408, 429, 502, 503, 504)


class SampleFailed(TandemError, code="inference_refused", http_status=502):
    """Raised when vLLM did not sample. `user` says whether the client's request is the cause."""

    def __init__(self, message: str, *, user: bool) -> None:
        super().__init__(message)
        self.user = user


class _Again(Exception):
    """Raised when the same request may succeed soon."""


class _NotLoaded(_Again):
    """Raised when vLLM does not have the model."""


class VllmSampler:
    """Samples by vLLM's `/v1/completions`, for one event loop.

    httpx is not used, because its connection pool goes through all connections for each request.
    Clients send thousands of requests at the same time (docs/performance.md, Sampling beside
    training).
    """

    def __init__(self, settings: Settings) -> None:
        self._url = settings.resolved_inference_url
        key = settings.inference_key
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http: aiohttp.ClientSession | None = None
        self._length: tuple[float, int] | None = None  # time of the request, vLLM's context length

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def sample(
        self, model: str, request: SampleRequest, want: Callable[[], Awaitable[None]]
    ) -> SampleResult:
        """The samples. Waits while vLLM starts, sleeps or loads the model. Raises SampleFailed if
        vLLM refuses the request, or if the wait takes too long.

        Args:
            model: the model's name in vLLM.
            want: asks the publisher to load the model; called when vLLM does not have the model.
        """
        tokens = [token for chunk in request.prompt.chunks for token in chunk.tokens]
        begin, missing = time.monotonic(), None
        while True:
            try:
                room = await self._context_length() - len(tokens)
                answer = await self._ask(completion(model, request, tokens, room))
                return sampled(request, tokens, answer)
            except _NotLoaded as error:
                if missing is None:
                    await want()
                missing = missing or time.monotonic()
                if time.monotonic() - missing > LOADING_SECONDS:
                    raise SampleFailed(str(error), user=True) from error
            except _Again as error:
                missing = None
                if time.monotonic() - begin > PATIENCE_SECONDS:
                    raise SampleFailed(str(error), user=False) from error
            await asyncio.sleep(1.0)

    async def _context_length(self) -> int:
        if self._length is None or time.monotonic() - self._length[0] > _LENGTH_SECONDS:
            cards = (await self._request("GET", "/v1/models"))["data"]
            length = next(int(card["max_model_len"]) for card in cards if card.get("max_model_len"))
            self._length = time.monotonic(), length
        return self._length[1]

    async def _ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = await self._request("POST", "/v1/completions", body)
        return answer

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_SECONDS),
                timeout=aiohttp.ClientTimeout(total=_ANSWER_SECONDS, sock_connect=_CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        try:
            async with self._http.request(
                method,
                f"{self._url}{path}",
                data=None if body is None else to_json(body),
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as response:
                content, status = await response.read(), response.status
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = f"vLLM at {self._url} does not answer ({type(error).__name__}: {error})"
            raise _Again(problem) from error
        if status == 200:
            return from_json(content)
        said = f"vLLM at {self._url} answered {status}: {_message(content)}"
        if status in (401, 403):
            raise SampleFailed(f"{said}; give both the same TANDEM_API_KEY", user=False)
        if status in _AGAIN_STATUSES:
            raise _Again(said)
        if status == 404:
            raise _NotLoaded(said)
        raise SampleFailed(said, user=status < 500)


def check_sample(request: SampleRequest) -> None:
    """Raises InvalidInput for a request that vLLM can't follow exactly, so that the client never
    gets the answer to a different request."""
    for i, chunk in enumerate(request.prompt.chunks):
        if chunk.type != "encoded_text":
            raise InvalidInput(f"{chunk.type}: only text is served", field=f"prompt.chunks.{i}")
    if not any(chunk.tokens for chunk in request.prompt.chunks):
        raise InvalidInput("has no token", field="prompt")
    unserved = {
        "target_prompt_logprobs": request.target_prompt_logprobs is not None,
        "prompt_alt_tokens_k": request.prompt_alt_tokens_k != 0,
        "record_stability_info": bool(request.record_stability_info),
    }
    remedies = {
        "target_prompt_logprobs": "vLLM gives the prompt's own tokens and the most probable ones",
        "prompt_alt_tokens_k": "vLLM draws no tokens within a prompt",
        "record_stability_info": "it is for stable_reinforce, whose formula is not public;"
        " train with importance_sampling, ppo or cispo",
    }
    if name := next((name for name, asked in unserved.items() if asked), ""):
        raise InvalidInput(f"is not served: {remedies[name]}", field=name)


def completion(
    model: str, request: SampleRequest, tokens: Sequence[int], room: int
) -> dict[str, Any]:
    """The request to vLLM.

    Args:
        room: the number of tokens that vLLM's context has left after the prompt.
    """
    asked = request.sampling_params
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(tokens),
        "n": request.num_samples,
        "max_tokens": max(1, room) if asked.max_tokens is None else asked.max_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "logprobs": request.topk_sample_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if asked.seed is not None:
        body["seed"] = asked.seed
    if request.prompt_logprobs or request.topk_prompt_logprobs:
        body["prompt_logprobs"] = request.topk_prompt_logprobs
    match asked.stop:
        case None:
            pass
        case str() as text:
            body["stop"] = [text]
        case []:
            body["ignore_eos"] = True
        case several:
            ids = isinstance(several[0], int)
            body["stop_token_ids" if ids else "stop"] = several
    return body


def sampled(
    request: SampleRequest, tokens: Sequence[int], answer: Mapping[str, Any]
) -> SampleResult:
    """The samples in vLLM's answer. Raises SampleFailed if the answer is incomplete.

    Args:
        tokens: the prompt's token ids.
        answer: the JSON of `/v1/completions`.
    """
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    sequences = [_sequence(choice, request.topk_sample_logprobs) for choice in choices]
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    prompt = top = None
    entries = choices[0].get("prompt_logprobs")
    if entries is not None:
        if len(entries) != len(tokens):
            problem = f"vLLM gave {len(entries)} log-probs for {len(tokens)} tokens of the prompt"
            raise SampleFailed(problem, user=False)
        first = max(1, len(tokens) - (request.prompt_logprobs_last_n or len(tokens)))
        entries = [entry if i >= first else None for i, entry in enumerate(entries)]
        if request.prompt_logprobs:
            prompt = np.array(
                [
                    np.nan if entry is None else _number(entry[str(token)]["logprob"])
                    for token, entry in zip(tokens, entries, strict=True)
                ],
                np.float32,
            )
        if k := request.topk_prompt_logprobs:
            found = [
                {int(token): _number(value["logprob"]) for token, value in (entry or {}).items()}
                for entry in entries
            ]
            top = _top(found, k)
    return SampleResult(sequences, prompt, top, int(details.get("cached_tokens") or 0))


def _sequence(choice: Mapping[str, Any], k: int) -> Sampled:
    ids, logprobs = choice.get("token_ids"), choice.get("logprobs") or {}
    values = logprobs.get("token_logprobs")
    if ids is None or values is None or len(ids) != len(values):
        raise SampleFailed("vLLM's answer has no token ids with their log-probs", user=False)
    if choice["finish_reason"] not in ("stop", "length"):
        # vLLM aborts requests when it goes to sleep or is about to stop.
        raise _Again(f"vLLM ended the request: {choice['finish_reason']}")
    top = None
    if k:
        named = logprobs.get("top_logprobs") or [None] * len(ids)
        top = _top(
            [
                {int(t.removeprefix("token_id:")): _number(v) for t, v in (entry or {}).items()}
                for entry in named
            ],
            k,
        )
    return Sampled(
        np.array(ids, np.int32),
        np.array([_number(value) for value in values], np.float32),
        choice["finish_reason"] == "stop",
        top,
    )


def _top(entries: Sequence[Mapping[int, float]], k: int) -> Top:
    """The k most probable tokens at each position. vLLM also lists the token that was actually
    sampled."""
    tokens = np.zeros((len(entries), k), np.int32)
    logprobs: Float32 = np.full((len(entries), k), ABSENT, np.float32)
    for i, entry in enumerate(entries):
        best = sorted(entry.items(), key=lambda pair: -pair[1])[:k]
        tokens[i, : len(best)] = [token for token, _ in best]
        logprobs[i, : len(best)] = [value for _, value in best]
    return Top(tokens, logprobs)


def _number(value: float | None) -> float:
    """The value as a number; None becomes NaN. JSON has neither NaN nor infinity, so vLLM sends
    null for both."""
    return float("nan") if value is None else float(value)


def _message(content: bytes) -> str:
    try:
        error = from_json(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return content[:500].decode(errors="replace")
