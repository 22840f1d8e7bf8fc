"""Environments: the user's function and its tasks, a taskset of verifiers, or a dataset of
reasoning-gym."""

import importlib
import inspect
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice, zip_longest
from typing import Any

from tandem.client import Trajectory
from tandem.client.rl.config import EnvironmentSection, RLSection
from tandem.client.rl.rollout import PAUSES, described, play
from tandem.client.rl.watch import Watch
from tandem.data.inputs import EQUAL_REWARDS
from tandem.errors import InvalidInput, TandemError


@dataclass(eq=False)
class RolloutGroup:
    """The trajectories of a task, to be trained by a job. `oldest`: the oldest step from which a
    turn was sampled. `informative`: whether the trajectories' returns differ, or a trajectory was
    given an advantage other than 0."""

    task: str
    trajectories: list[Trajectory]
    began: float
    ended: float

    def __post_init__(self) -> None:
        made = self.trajectories
        self.oldest = min(turn.policy_step or 0 for trajectory in made for turn in trajectory.turns)
        # Turns may have rewards, so each turn has a return. Returns are compared only between turns
        # with the same number, because the return of a later turn sums fewer rewards.
        returns = zip_longest(*(one.returns for one in made))
        different = any(
            max(have) - min(have) > EQUAL_REWARDS
            for each in returns
            if (have := [value for value in each if value is not None])
        )
        self.informative = different or any(
            one.advantage or any(turn.advantage or turn.advantages for turn in one.turns)
            for one in made
        )


class Tasks:
    """Tasks by number. After a restart of the program, a number still names the same task. A
    sequence is shuffled anew in each epoch. Any other iterable keeps its own order and starts over
    when it ends."""

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
        """The first tasks, at most `count`, in the order of the source, without a shuffle."""
        self._take(count)
        return list(islice(self._known, count))

    def _take(self, count: int) -> None:
        if self._seed is None:
            self._known += islice(self._more, max(0, count - len(self._known)))


@lru_cache(4)
def _order(seed: int, epoch: int, length: int) -> list[int]:
    return random.Random(f"{seed} {epoch}").sample(range(length), length)


class Environment:
    """The environment that `use` names. `use` names a class with the methods `tasks` and `rollout`,
    or a rollout function whose module also has a function `tasks`.

    Args:
        section: the entry of the config file, with the class or function and its arguments.
        seed: decides the order of the tasks if `tasks()` returns a sequence.
        where: the entry's place in the config file, for errors. Raises InvalidInput (field
            `<where>.use`) if the environment can't be loaded or has no task.
    """

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
            self.rollout: Callable[..., Any] = (
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
        watch: Watch | None = None,
    ) -> Trajectory:
        """One rollout; the arguments are those of `rollout.play`."""
        return await play(self.rollout, task, sampler, settings, failed, pauses, watch)
