"""The evaluations of `tandem rl`. The evaluations' rewards decide which step is the best, and when
the training stops early."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from math import comb
from statistics import fmean
from typing import Any

from tandem.client import AsyncTandem, Trajectory
from tandem.client.http import Backoff
from tandem.client.rl.config import EvalSection, RLSection
from tandem.client.rl.environment import Environment
from tandem.client.rl.groups import Rollouts
from tandem.client.rl.record import RunRecord, State
from tandem.client.rl.rollout import described
from tandem.errors import TandemError

Show = Callable[[Sequence[Trajectory], str], object]
"""A function that is called with the trajectories of a task and the task's name."""


class Evaluations:
    """The evaluations.

    Args:
        sections: the entries of [eval]; the first decides which step is the best, and when to stop.
        first: the environment of the sections that name no environment.
        own: the environments named in sections of the config, in the order of the sections.
        rollouts: samples the groups.
        record: the file of the results, which also says which evaluations are done.
        patience: returns the seconds for which every rollout of an evaluation may fail.
        pauses: the shortest and the longest pause between tries, in seconds.
    """

    def __init__(
        self,
        sections: Sequence[EvalSection],
        first: Environment,
        own: Sequence[Environment],
        rl: RLSection,
        rollouts: Rollouts,
        record: RunRecord,
        patience: Callable[[], float],
        pauses: tuple[float, float],
    ) -> None:
        theirs = iter(own)
        self._environments = [next(theirs) if each.environment else first for each in sections]
        self._sections, self._rl = sections, rl
        self._rollouts, self._record = rollouts, record
        self._patience, self._pauses = patience, pauses

    async def evaluate(self, step: int, made: int, is_last: bool, show: Show) -> None:
        """Run and record the evaluations that are due at `step`. Raises TandemError if every
        rollout of an evaluation fails for longer than `patience`.

        Args:
            made: the number of steps that the loop has made up to `step`.
            is_last: whether `step` is the training's last step, at which all evaluations are due.
            show: called with the trajectories of each task.
        """
        async with asyncio.TaskGroup() as sections:
            for section, of in zip(self._sections, self._environments, strict=True):
                due = made % section.every == 0 or is_last
                if due and not self._record.evaluated(step, section.name):
                    sections.create_task(self._evaluate(section, of, step, show))

    async def _evaluate(self, section: EvalSection, of: Environment, step: int, show: Show) -> None:
        backoff = Backoff(self._patience(), *self._pauses)
        options = {**self._rl.sampling, **section.sampling}
        while True:
            sampled = [
                self._rollouts.group(of, task, section.samples, step, options)
                for task in of.tasks.first(section.groups)
            ]
            results = await asyncio.gather(*sampled, return_exceptions=True)
            groups = [result for result in results if isinstance(result, list)]
            if groups:
                break
            [last] = [result for result in results if isinstance(result, BaseException)][-1:]
            if not isinstance(last, Exception):
                raise last
            what = f"evaluation{f' {section.name!r}' if section.name else ''} of step {step}"
            problem = f"every rollout of the {what} failed; the last error: {described(last)}"
            await asyncio.sleep(backoff.next(TandemError(problem, field="eval")))
        for number, result in enumerate(results):
            if isinstance(result, list):
                show(result, f"eval{f'-{section.name}' if section.name else ''}:{number}")
        failed = len(results) * section.samples - sum(map(len, groups))
        more: dict[str, Any] = {"name": section.name} if section.name else {}
        if section.pass_at:
            more["pass_at"] = {str(k): pass_at(k, groups, section.passes) for k in section.pass_at}
        self._record.evaluation(step, groups, failed, more)

    def best(self) -> tuple[int, float] | None:
        """The step with the highest reward in the first section's evaluations, and that reward. If
        several steps have this reward, the earliest step is returned. Returns None before the first
        evaluation."""
        found = self._found()
        return max(found.items(), key=lambda each: (each[1], -each[0])) if found else None

    def stops(self) -> bool:
        """Whether the last `stop_after` evaluations were no better than an earlier evaluation."""
        best = self.best()
        if best is None or (most := self._sections[0].stop_after) is None:
            return False
        return sum(step > best[0] for step in self._found()) >= most

    async def keep_best(self, tandem: AsyncTandem, state: State) -> None:
        """Pin the best step's checkpoint, and unpin the previous best step's checkpoint if the loop
        has pinned it."""
        best = self.best()
        if best is None or state.best == best[0]:
            return
        pinned = {each.step: each.pinned for each in await tandem.checkpoints(state.run)}
        if state.best is not None and state.best_is_ours and pinned.get(state.best):
            await tandem.unpin(state.run, state.best)
        state.best, state.best_is_ours = best[0], not pinned.get(best[0], True)
        if state.best_is_ours:
            await tandem.pin(state.run, best[0])

    def _found(self) -> Mapping[int, float]:
        """The reward of each evaluated step in the run's chain, from the first section's
        evaluations."""
        found: dict[int, float] = {}
        name = self._sections[0].name if self._sections else ""
        for line in self._record.lines:
            # If a step is trained again after a rollback, the evaluations from this step on no
            # longer count.
            if "step" in line:
                found = {step: reward for step, reward in found.items() if step < line["step"]}
            elif "evaluated" in line and line.get("name", "") == name and line["samples"]:
                found[line["evaluated"]] = line["reward"]
        return found


def pass_at(k: int, groups: Sequence[Sequence[Trajectory]], passes: float) -> float | None:
    """The unbiased estimate of the probability that at least one of k answers passes. The formula
    is equation 1 of Chen et al., 2021, arXiv:2107.03374. The result is the mean over the tasks with
    at least k samples; None if no task has k samples.

    Args:
        groups: the trajectories of each task.
        passes: the lowest reward of an answer that passes.
    """
    counts = [
        (len(group), sum(one.reward >= passes for one in group))
        for group in groups
        if len(group) >= k
    ]
    return fmean(1 - comb(n - c, k) / comb(n, k) for n, c in counts) if counts else None
