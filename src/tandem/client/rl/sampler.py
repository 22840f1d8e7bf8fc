"""Samples for a rollout: vLLM's chat completions, whose token ids and log-probs become a trajectory."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx

from tandem.client import Trajectory, TrajectoryBuilder, sampling_options
from tandem.client.http import Backoff, connection
from tandem.errors import InvalidInput, TandemError

PATIENCE = 300.0
"""Seconds for which requests are repeated while vLLM, the controller or the publisher is away."""


def open_vllm() -> httpx.AsyncClient:
    """vLLM at OPENAI_BASE_URL, with the key of TANDEM_API_KEY or TANDEM_API_KEY_FILE."""
    arguments = connection(os.environ.get("OPENAI_BASE_URL") or "http://127.0.0.1:8000/v1", None)
    arguments |= {"timeout": httpx.Timeout(3600.0, connect=5.0), "limits": httpx.Limits(max_connections=None)}
    return httpx.AsyncClient(**arguments)


class Sampler:
    """What a rollout gets: `chat` samples one message, `finish` makes the trajectory of all that was sampled.

    `newest()` is the newest served step, and `pin` the step to sample from in its place. `response` is vLLM's last
    answer.
    """

    def __init__(
        self, vllm: httpx.AsyncClient, run: str, newest: Callable[[], int], pin: int | None, options: Mapping[str, Any]
    ) -> None:
        self._vllm, self._run, self._newest, self._pin, self._options = vllm, run, newest, pin, options
        self._builder = TrajectoryBuilder([])
        self.response: dict[str, Any] = {}

    @property
    def model(self) -> str:
        """The model that the next turn samples from."""
        return f"{self._run}@{self._newest() if self._pin is None else self._pin}"

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """The message that follows `messages`; `options`: vLLM's, such as `tools` or `max_tokens`.

        InvalidInput for options that change the distribution, and for what vLLM refuses, such as a conversation longer
        than its context.
        """
        wanted = {"temperature": 1.0, **self._options}
        if options.get("temperature", wanted["temperature"]) != wanted["temperature"]:
            problem = f"{options['temperature']} is not the loss's {wanted['temperature']}; set both in the config"
            raise InvalidInput(problem, field="temperature")
        extra = sampling_options(**{**wanted, **options})["extra_body"]
        self.response = await self._post({"messages": list(messages), "logprobs": True, **extra})
        self._builder.messages = [dict(message) for message in messages]
        return self._builder.add_response(self.response)

    def finish(self, reward: float, *, metrics: Mapping[str, float] | None = None) -> Trajectory:
        """The trajectory of all turns so far."""
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        return self._builder.finish(float(reward), metrics=numbers)

    async def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """vLLM's answer; the request is repeated while vLLM is away or does not have the step yet."""
        backoff = Backoff(PATIENCE)
        while True:
            model, error = self.model, TandemError(f"vLLM at {self._vllm.base_url} does not answer")
            with suppress(httpx.TransportError):
                response = await self._vllm.post("chat/completions", json={**body, "model": model})
                if response.is_success:
                    answer: dict[str, Any] = response.json()
                    return answer
                error = InvalidInput(f"vLLM answered {response.status_code} for {model}: {response.text[:500]}")
                gone = response.status_code == 404 and self._pin is not None and self._pin < self._newest()
                if gone or (response.status_code < 500 and response.status_code not in (404, 429)):
                    raise error
            await asyncio.sleep(backoff.next(error))
