"""Environments: a person's coroutine and its tasks, or a taskset of verifiers."""

import asyncio
import importlib
import inspect
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Any

from tandem.client.rl.config import EnvironmentSection, RLSection
from tandem.data.inputs import Trajectory
from tandem.errors import InvalidInput


@dataclass(eq=False)
class Group:
    """The trajectories of a task; `oldest`: the oldest step that sampled a turn."""

    task: str
    trajectories: list[Trajectory]
    began: float
    ended: float

    def __post_init__(self) -> None:
        made = self.trajectories
        self.oldest = min(turn.policy_step or 0 for trajectory in made for turn in trajectory.turns)
        self.informative = len({one.reward for one in made}) > 1 or any(one.advantage for one in made)


class Tasks:
    """Tasks by number, the same after a restart: a sequence in another order in each epoch, any other iterable in its
    own order, from its beginning again when it ends."""

    def __init__(self, source: Iterable[Any], seed: int) -> None:
        self._seed = seed if isinstance(source, Sequence) else None
        self._known: Any = source if isinstance(source, Sequence) else []
        self._more = iter([] if isinstance(source, Sequence) else source)

    def __getitem__(self, number: int) -> Any:
        self._take(number + 1)
        if not self._known:
            raise InvalidInput("tasks() gave no task", field="rl.environment")
        epoch, i = divmod(number, len(self._known))
        return self._known[i if self._seed is None else _order(self._seed, epoch, len(self._known))[i]]

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


class Environment:
    """What `use` names: a class with `tasks` and the coroutine `rollout`, or a coroutine beside a function `tasks`."""

    def __init__(self, section: EnvironmentSection, seed: int, where: str) -> None:
        module_name, _, name = section.use.partition(":")
        arguments = section.arguments
        if module_name == "verifiers":
            module_name, name, arguments = "tandem.client.verifiers", "Environment", {"name": name, **arguments}
        try:
            module = importlib.import_module(module_name)
            found = getattr(module, name)
            made: Any = found(**arguments) if inspect.isclass(found) else module
            self.rollout: Callable[..., Awaitable[Any]] = (
                partial(found, **arguments) if made is module else made.rollout
            )
            self.tasks = Tasks(made.tasks(), seed)
        except (ImportError, AttributeError, TypeError) as error:
            remedy = (
                "it needs rollout(task, sampler) and tasks(), in a module beside the config file or an installed one"
            )
            raise InvalidInput(f"can't load {section.use!r}: {error}; {remedy}", field=f"{where}.use") from error

    async def play(
        self, task: Any, sampler: Callable[[], Any], settings: RLSection, failed: Callable[[Exception], object]
    ) -> Trajectory:
        """One rollout. An error is passed to `failed`, and the rollout tried again, up to `retries` times."""
        for left in reversed(range(settings.retries + 1)):
            try:
                async with asyncio.timeout(settings.rollout_seconds):
                    trajectory = Trajectory.model_validate(await self.rollout(task, sampler()))
                if any(turn.policy_step is None for turn in trajectory.turns):
                    raise InvalidInput("a turn has no policy_step; sample by sampler.chat and return finish()")
                return trajectory
            except Exception as error:
                failed(error)
                if not left:
                    raise
        raise AssertionError
