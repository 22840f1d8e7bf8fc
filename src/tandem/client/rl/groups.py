"""Rolls a task out several times at once, and reports which rollouts gave a trajectory and which
gave none."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from tandem.client import Trajectory
from tandem.client.rl.config import RLSection
from tandem.client.rl.distill import Teacher
from tandem.client.rl.environment import Environment
from tandem.client.rl.rollout import kind_of
from tandem.client.rl.sampler import DiscardedError, Sampler
from tandem.client.rl.watch import Watch
from tandem.client.vllm import Vllm
from tandem.errors import TandemError

Lost = tuple[str, str]
"""Why a rollout gave no trajectory: "failed" or "discarded", and the reason."""


class Rollouts:
    """Rolls out groups.

    Args:
        rl: the settings under [rl].
        run: the run's name.
        served: returns the newest served step.
        failed: called with each error of a rollout.
        lost: called with each rollout that gives no trajectory.
        pauses: the shortest and the longest pause between tries of a rollout, in seconds.
        watch: follows the asyncio tasks of the rollouts.
        teacher: scores the trajectories that are trained; None: they are not scored.
    """

    def __init__(
        self,
        rl: RLSection,
        run: str,
        vllm: Vllm,
        served: Callable[[], int],
        failed: Callable[[Exception], object],
        lost: Callable[[Lost], object],
        pauses: tuple[float, float],
        watch: Watch,
        teacher: Teacher | None = None,
    ) -> None:
        self._rl, self._run, self._vllm, self._served = rl, run, vllm, served
        self._failed, self._lost, self._pauses, self._watch = failed, lost, pauses, watch
        self._teacher = teacher

    async def group(
        self,
        of: Environment,
        task: Any,
        size: int,
        step: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[Trajectory]:
        """The trajectories of the rollouts of a task, without failed and discarded rollouts. Raises
        the last error if no trajectory is left.

        Args:
            of: the environment.
            size: the number of rollouts.
            step: the step that all rollouts sample from. None: the rollouts sample from the newest
                served step, and are trained.
            options: vLLM's sampling options; None: the options of [rl.sampling]. A `seed` grows by
                1 with each rollout.
        """
        sampling = self._rl.sampling if options is None else options
        name = uuid4().hex  # the group's name, for the proxy of several inference servers

        async def play(number: int) -> Trajectory:
            own = dict(sampling)
            if "seed" in own:  # with the same seed, all rollouts of a task would be the same
                own["seed"] += number

            def sampler() -> Sampler:
                pin = self._served() if step is None and self._rl.pin else step
                return Sampler(self._vllm, self._run, self._served, pin, own, name)

            made = await of.play(task, sampler, self._rl, self._failed, self._pauses, self._watch)
            return await self._teacher.scored(made) if self._teacher and step is None else made

        results = await asyncio.gather(*map(play, range(size)), return_exceptions=True)
        made, last = list[Trajectory](), TandemError("no rollout was begun")
        for result in results:
            if isinstance(result, Trajectory):
                made.append(result)
            elif isinstance(result, DiscardedError):
                self._lost(("discarded", str(result)[:200]))
                last = TandemError(f"every rollout was discarded or failed: {result}")
            elif isinstance(result, Exception):
                self._lost(("failed", kind_of(result)))
                last = result  # type: ignore[assignment]
            else:
                raise result
        if not made:
            raise last
        return made
