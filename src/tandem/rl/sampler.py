"""Samples for a rollout: vLLM's chat completions, whose token ids and log-probs become a trajectory."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from tandem.client import TrajectoryBuilder, sampling_options
from tandem.client.http import Backoff, connection
from tandem.errors import InvalidInput, NotServed, TandemError, Unreachable

PATIENCE = 300.0
"""Seconds for which requests are repeated while vLLM, the controller or the publisher is away."""


def open_vllm() -> httpx.AsyncClient:
    """vLLM at OPENAI_BASE_URL, with the key of TANDEM_API_KEY or TANDEM_API_KEY_FILE."""
    arguments = connection(os.environ.get("OPENAI_BASE_URL") or "http://127.0.0.1:8000/v1", None)
    arguments |= {"timeout": httpx.Timeout(3600.0, connect=5.0), "limits": httpx.Limits(max_connections=None)}
    return httpx.AsyncClient(**arguments)


class Sampler:
    """What a rollout gets: `chat` samples one message, `finish` makes the trajectory of all that was sampled.

    `newest()` is the step to sample from; with `pin` only the first turn asks for it. `response` is vLLM's last answer.
    """

    def __init__(
        self, vllm: httpx.AsyncClient, run: str, newest: Callable[[], int], options: Mapping[str, Any], *, pin: bool
    ) -> None:
        self._vllm, self._run, self._newest, self._options, self._pin = vllm, run, newest, options, pin
        self._builder = TrajectoryBuilder([])
        self._steps: list[int] = []  # that sampled each turn
        self.response: dict[str, Any] = {}

    @property
    def model(self) -> str:
        """The model that the next turn samples from."""
        return f"{self._run}@{self._steps[0] if self._pin and self._steps else self._newest()}"

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """The message that follows `messages`; `options`: vLLM's, such as `tools` or `max_tokens`.

        InvalidInput for what vLLM refuses, such as a conversation longer than its context.
        """
        extra = sampling_options(**{"temperature": 1.0, **self._options, **options})["extra_body"]
        response = await self._post({"messages": list(messages), "logprobs": True, **extra})
        self.response = response.json()
        self._builder.messages = [dict(message) for message in messages]
        # With merged weights the header names all versions that the tokens came from, the oldest first.
        model = response.headers.get("x-tandem-weights", self.response["model"]).split(",")[0]
        self._steps.append(int(model.rpartition("@")[2]))
        return self._builder.add_response(self.response)

    def finish(self, reward: float, *, metrics: Mapping[str, float] | None = None) -> dict[str, Any]:
        """The trajectory of all turns so far."""
        made = self._builder.finish(float(reward), metrics={k: float(v) for k, v in (metrics or {}).items()})
        trajectory = made.model_dump(exclude_none=True)
        for turn, step in zip(trajectory["turns"], self._steps, strict=True):
            turn["policy_step"] = step
        return trajectory

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        """vLLM's answer; the request is repeated while vLLM is away or does not have the step yet."""
        backoff = Backoff(PATIENCE)
        while True:
            model = self.model
            error: TandemError = Unreachable(f"vLLM at {self._vllm.base_url} does not answer; check OPENAI_BASE_URL")
            try:
                response = await self._vllm.post("chat/completions", json={**body, "model": model})
            except httpx.TransportError as failure:
                error.__cause__ = failure
            else:
                if response.is_success:
                    return response
                detail = f"vLLM answered {response.status_code} for {model}: {response.text[:500]}"
                error = NotServed(detail) if response.status_code == 404 else InvalidInput(detail)
                gone = response.status_code == 404 and self._pin and model != f"{self._run}@{self._newest()}"
                if gone or (response.status_code < 500 and response.status_code not in (404, 429)):
                    raise error
            await asyncio.sleep(backoff.next(error))
