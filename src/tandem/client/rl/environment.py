"""Environments: a person's coroutine and its tasks, a taskset of verifiers, or a dataset of
reasoning-gym; and what samples for their rollouts."""

import asyncio
import importlib
import inspect
import os
import random
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any
from uuid import uuid4

import tandem
from tandem.client import Trajectory, TrajectoryBuilder, sampling_options
from tandem.client.http import Backoff
from tandem.client.rl.config import EnvironmentSection, RLSection
from tandem.client.vllm import Vllm
from tandem.data.inputs import PackingSettings
from tandem.errors import InvalidInput, TandemError, Unreachable
from tandem.vllm_client.sampling import loop_options

PATIENCE = 300.0
"""Seconds for which requests are repeated while vLLM, the controller or the publisher is away, and
for which groups may fail."""
PAUSES = 1.0, 60.0
"""The shortest and the longest pause, in seconds, before a rollout or group that failed is followed
by another."""


class Sampler:
    """What a rollout gets: `chat` samples one message, `finish` makes the trajectory of all that
    was sampled. A turn whose messages begin with those of an earlier one, and its answer,
    continues the tokens of that turn.

    `newest()` is the newest served step, and `pin` the step to sample from in its place. `response`
    is vLLM's last answer.
    """

    def __init__(
        self,
        vllm: Vllm,
        run: str,
        newest: Callable[[], int],
        pin: int | None,
        options: Mapping[str, Any],
    ) -> None:
        self._vllm, self._run, self._newest, self._pin, self.options = (
            vllm,
            run,
            newest,
            pin,
            options,
        )
        self._builder = TrajectoryBuilder([])
        self._session = uuid4().hex
        self.response: dict[str, Any] = {}

    @property
    def model(self) -> str:
        """The model that the next turn samples from."""
        return f"{self._run}@{self._newest() if self._pin is None else self._pin}"

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """The message that follows `messages`; `options`: vLLM's, such as `tools` or `max_tokens`.

        InvalidInput for options that change the distribution, and for what vLLM refuses, such as a
        conversation longer than its context.
        """
        wanted = loop_options(self.options, options, "temperature")
        extra = sampling_options(**{**wanted, **options})["extra_body"]
        self.response = await self._post({"messages": list(messages), "logprobs": True, **extra})
        self._builder.messages = [dict(message) for message in messages]
        return self._builder.add_response(self.response)

    def finish(self, reward: float, *, metrics: Mapping[str, float] | None = None) -> Trajectory:
        """The trajectory of all turns so far."""
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        return self._builder.finish(float(reward), metrics=numbers)

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        """vLLM's answer; the request is repeated while vLLM is away or does not have the step
        yet."""
        backoff = Backoff(PATIENCE)
        while True:
            model = self.model
            error: TandemError
            try:
                answer = await self._vllm.request(
                    "POST", "chat/completions", body | {"model": model}, session=self._session
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


@dataclass(eq=False)
class RolloutGroup:
    """The trajectories of a task, on their way to a job. `oldest`: the oldest step that sampled a
    turn."""

    task: str
    trajectories: list[Trajectory]
    began: float
    ended: float

    def __post_init__(self) -> None:
        made = self.trajectories
        self.oldest = min(turn.policy_step or 0 for trajectory in made for turn in trajectory.turns)
        self.informative = len({one.reward for one in made}) > 1 or any(
            one.advantage for one in made
        )


class Tasks:
    """Tasks by number, the same after a restart: a sequence in another order in each epoch, any
    other iterable in its own order, from its beginning again when it ends."""

    def __init__(self, source: Iterable[Any], seed: int) -> None:
        self._seed = seed if isinstance(source, Sequence) else None
        self._known: Any = source if isinstance(source, Sequence) else []
        self._more = iter([] if isinstance(source, Sequence) else source)

    def __getitem__(self, number: int) -> Any:
        self._take(number + 1)
        epoch, i = divmod(number, len(self._known))
        return self._known[
            i if self._seed is None else _order(self._seed, epoch, len(self._known))[i]
        ]

    def first(self, count: int) -> list[Any]:
        """The first tasks in their own order, at most `count`."""
        self._take(count)
        return list(islice(self._known, count))

    def _take(self, count: int) -> None:
        if self._seed is None:
            self._known += islice(self._more, max(0, count - len(self._known)))


@lru_cache(4)
def _order(seed: int, epoch: int, length: int) -> list[int]:
    return random.Random(f"{seed} {epoch}").sample(range(length), length)


def described(error: Exception) -> str:
    """The error, and the line of a person's own code that it came through last. Where that code is
    installed, it is the first line of an installed package."""
    frames = traceback.extract_tb(error.__traceback__)
    own, installed = (
        [frame for frame in frames if _whose(frame.filename) == whose]
        for whose in ("own", "installed")
    )
    at = own[-1:] or installed[:1]
    return f"{type(error).__name__}: {error}" + "".join(
        f" ({Path(f.filename).name}, line {f.lineno})" for f in at
    )


def _whose(file: str) -> str:
    """Whose code is in the file: "own", "installed", or "" for this package and the standard
    library."""
    if file.startswith(("<frozen ", f"{Path(tandem.__file__).parent}{os.sep}")):
        return ""
    if {"site-packages", "dist-packages"} & set(Path(file).parts):
        return "installed"
    return "" if file.startswith(f"{Path(asyncio.__file__).parents[1]}{os.sep}") else "own"


class Environment:
    """What `use` names: a class with `tasks` and the coroutine `rollout`, or a coroutine beside a
    function `tasks`."""

    def __init__(self, section: EnvironmentSection, seed: int, where: str) -> None:
        module_name, _, name = section.use.partition(":")
        arguments = section.arguments
        if module_name in ("verifiers", "reasoning_gym"):
            module_name, name, arguments = (
                f"tandem.client.{module_name}",
                {"verifiers": "VerifiersEnvironment", "reasoning_gym": "GymEnvironment"}[
                    module_name
                ],
                {"name": name, **arguments},
            )
        try:
            module = importlib.import_module(module_name)
            found = getattr(module, name)
            made: Any = found(**arguments) if inspect.isclass(found) else module
            self.rollout: Callable[..., Awaitable[Any]] = (
                partial(found, **arguments) if made is module else made.rollout
            )
            self.tasks = Tasks(made.tasks(), seed)
            if not self.tasks.first(1):
                raise ValueError("tasks() gave no task")
        except TandemError:
            raise
        except Exception as error:
            needs = (
                "it needs rollout(task, sampler) and tasks(), in a module beside the config file or"
                " installed"
            )
            problem = f"can't load {section.use!r}: {described(error)}"
            raise InvalidInput(f"{problem}; {needs}", field=f"{where}.use") from error

    async def play(
        self,
        task: Any,
        sampler: Callable[[], Any],
        settings: RLSection,
        failed: Callable[[Exception], object],
        pauses: tuple[float, float] = PAUSES,
    ) -> Trajectory:
        """One rollout. An error is passed to `failed`, and the rollout tried again after a pause,
        up to `retries` times."""
        backoff = Backoff(inf, *pauses)  # what an environment needs may be away for a moment
        for left in reversed(range(settings.retries + 1)):
            limit = asyncio.timeout(settings.rollout_seconds)
            try:
                async with limit:
                    trajectory = Trajectory.model_validate(await self.rollout(task, sampler()))
                _check(trajectory, settings.packing)
                return trajectory
            except (Exception, SystemExit, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and _cancelled():
                    raise
                failure = _failure(error, settings.rollout_seconds if limit.expired() else None)
                failed(failure)
                pause = backoff.next(failure)
                if not left:
                    raise failure  # noqa: B904
            await asyncio.sleep(pause)
        raise AssertionError


def _cancelled() -> bool:
    """Whether somebody cancels this task, so that a CancelledError is not the rollout's own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failure(error: BaseException, expired: float | None) -> Exception:
    """The error of a rollout; TandemError for what would end more than the rollout, and after the
    `expired` seconds."""
    if expired is not None and isinstance(error, TimeoutError):
        where = error.__cause__ or error  # the cancellation knows where the rollout was
        late = TandemError(f"the rollout took longer than rl.rollout_seconds ({expired:g} s)")
        return late.with_traceback(where.__traceback__)
    if isinstance(error, Exception):
        return error
    return TandemError(f"the rollout raised {error!r}").with_traceback(error.__traceback__)


def _check(trajectory: Trajectory, packing: PackingSettings) -> None:
    """Raises InvalidInput for what the controller would refuse, with all other groups of the
    batch."""
    if any(turn.policy_step is None for turn in trajectory.turns):
        raise InvalidInput("a turn has no policy_step; sample by sampler.chat and return finish()")
    row = packing.sequence_length
    if packing.too_long == "refuse" and trajectory.longest > row:
        problem = f"the rollout has {trajectory.longest} tokens, which don't fit a row of {row}"
        remedy = "lower sampling.max_tokens, or change sequence_length or too_long in [rl.packing]"
        raise InvalidInput(f"{problem}; {remedy}", field="rl.packing.sequence_length")
    shortest = min(len(turn.prompt_token_ids) for turn in trajectory.turns)
    if shortest >= row:
        remedy = "raise packing.sequence_length, or shorten the prompt"
        raise InvalidInput(f"a prompt of {shortest} tokens fills a row of {row}; {remedy}")
