"""The sampler that an environment's `rollout` gets."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn
from uuid import uuid4

from tandem.client import Trajectory, TrajectoryBuilder, sampling_options
from tandem.client.http import Backoff
from tandem.client.vllm import Vllm
from tandem.errors import InvalidInput, TandemError, Unreachable
from tandem.vllm_client.sampling import loop_options

PATIENCE = 300.0
"""Seconds for which requests are repeated while vLLM, the controller or the publisher is away. Also
the seconds for which groups may keep failing."""


class DiscardedError(Exception):
    """Raised by a rollout that can't be scored. The text of the error is the reason."""


class Sampler:
    """Samples one rollout: `chat` samples a message, `finish` makes the trajectory of all sampled
    messages. If a turn's messages begin with the messages and the answer of an earlier turn, the
    turn's prompt begins with that earlier turn's tokens.

    `response` is vLLM's last answer. `discarded` is the reason that the call of `discard` gave.

    Args:
        run: the run's name.
        newest: returns the newest served step.
        pin: the step to sample from. None: each request samples from the newest served step at the
            time of the request.
        options: vLLM's options for each message.
        group: a name that all rollouts of one task share; these rollouts have the same prompt.
            None: no name is sent.
    """

    def __init__(
        self,
        vllm: Vllm,
        run: str,
        newest: Callable[[], int],
        pin: int | None,
        options: Mapping[str, Any],
        group: str | None = None,
    ) -> None:
        self._group = group
        self._vllm, self._run, self._newest, self._pin, self.options = (
            vllm,
            run,
            newest,
            pin,
            options,
        )
        self._builder = TrajectoryBuilder([])
        self._session: str | None = uuid4().hex
        self._loop = asyncio.get_running_loop()
        self.response: dict[str, Any] = {}
        self.discarded: str | None = None
        self.left_behind = False

    @property
    def model(self) -> str:
        """The model that the next turn samples from."""
        return f"{self._run}@{self._newest() if self._pin is None else self._pin}"

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """The message that follows `messages`. In a coroutine the call is awaited; in a plain `def
        rollout`, the call blocks and returns the message. `options`: options of vLLM's chat
        completions, such as `tools` or `max_tokens`.

        Raises InvalidInput for options that change the sampled distribution. Raises InvalidInput
        for requests that vLLM refuses, such as a conversation that is longer than vLLM's context.
        """
        answer = self._chat(messages, options)
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run_coroutine_threadsafe(answer, self._loop).result()
        if running is self._loop:
            return answer
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer, self._loop))

    def finish(
        self,
        reward: float,
        *,
        metrics: Mapping[str, float] | None = None,
        turn_rewards: Sequence[float] | None = None,
    ) -> Trajectory:
        """The trajectory of all turns so far.

        Args:
            turn_rewards: the reward of each turn, in addition to `reward`.
        """
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        return self._builder.finish(float(reward), metrics=numbers, turn_rewards=turn_rewards)

    def discard(self, reason: str) -> NoReturn:
        """Leave this rollout out of the training, for example because its judge does not answer.
        The group's other rollouts are trained. The rollout is not repeated. Raises DiscardedError,
        which ends the rollout."""
        self.discarded = str(reason)
        raise DiscardedError(self.discarded)

    async def _chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        if self.left_behind:
            raise TandemError("the rollout was left behind at its limit")
        wanted = loop_options(self.options, options, "temperature")
        extra = sampling_options(**{**wanted, **options})["extra_body"]
        self.response = await self._post({"messages": list(messages), "logprobs": True, **extra})
        self._builder.messages = [dict(message) for message in messages]
        return self._builder.add_response(self.response)

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        """vLLM's answer. The request is repeated while vLLM does not answer or does not serve the
        step yet."""
        backoff = Backoff(PATIENCE)
        while True:
            model = self.model
            error: TandemError
            try:
                answer = await self._vllm.request(
                    "POST",
                    "chat/completions",
                    body | {"model": model},
                    session=self._session,
                    group=self._group,
                )
            except Unreachable as unreachable:
                error = unreachable
            else:
                if answer.is_success:
                    response: dict[str, Any] = answer.json()
                    return response
                error = InvalidInput(
                    f"vLLM answered {answer.status} for {model}: {answer.text[:500]}"
                )
                pinned_to_an_older = self._pin is not None and self._pin < self._newest()
                gone = answer.status == 404 and pinned_to_an_older
                if gone or (answer.status < 500 and answer.status not in (404, 429)):
                    raise error
            await asyncio.sleep(backoff.next(error))
