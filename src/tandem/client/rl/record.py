"""The loop's files. The state is one JSON file. The record has a JSON line for each step and each
evaluation."""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ValidationError

from tandem.client import Event, Trajectory
from tandem.client.rl.config import Config
from tandem.client.rl.environment import RolloutGroup
from tandem.client.rl.samples import Alike, sample
from tandem.errors import InvalidInput
from tandem.spool.fs import read_record

_NOTHING = 0.0005  # a mean reward of a smaller size is printed as 0.000
_REASONS = 20  # maximum number of reasons in a line of the record
LEFT_OUT = ("uninformative", "stale", "failed")


class Submitted(BaseModel):
    """A job that was submitted, or is about to be submitted, and has not been followed to its
    end."""

    id: str
    base: int
    tasks: list[str]
    numbers: dict[str, Any]  # numbers about the job's groups, for the record


class State(BaseModel):
    """The loop's state, which a kill does not lose. The file is replaced before each submission and
    after each step.

    Tasks are named `<environment>:<number>`. `cursors` has, for each environment, the number of the
    first task that has not been handed out.
    """

    run: str
    environments: list[str]
    created: float  # when the run was created, Unix seconds
    first: int  # the step that the loop began with
    recorded: int = 0  # number of lines that other trainings had written to the record before
    cursors: list[int]
    open: list[str] = []  # tasks that were handed out, but are not yet in a job
    jobs: list[Submitted] = []
    # The request of the last job in `jobs`, until the controller has the request. A request that is
    # sent again after a kill names the same job.
    pending: dict[str, Any] | None = None
    best: int | None = None  # the best step by evaluation
    best_is_ours: bool = False  # whether the loop has pinned the best step

    def next_task(self, weights: Sequence[float]) -> str:
        """Hand out the next task. The task comes from the environment whose number of tasks, the
        next task included, is smallest in relation to its weight."""
        i = min(range(len(weights)), key=lambda i: (self.cursors[i] + 1) / weights[i])
        self.cursors[i] += 1
        self.open.append(task := f"{i}:{self.cursors[i] - 1}")
        return task

    def forget(self, job: Submitted) -> None:
        """Forget a job that made no step; its tasks are handed out again."""
        self.jobs.remove(job)
        self.open += job.tasks


def load_progress(path: Path, new: State) -> State:
    """The state in the file, or `new` if there is no file. Raises InvalidInput if the file is
    damaged or belongs to another loop."""
    try:
        state = read_record(path, State) or new
    except ValidationError as error:
        raise InvalidInput(
            f"{path} is damaged; restore it, or remove it to begin anew", field="--state"
        ) from error
    if (state.run, state.environments) != (new.run, new.environments):
        problem = (
            f"{path} is of run {state.run!r} with the environments {', '.join(state.environments)}"
        )
        raise InvalidInput(f"{problem}; restore the config, or name another file", field="--state")
    return state


def batch_numbers(
    batch: Sequence[RolloutGroup],
    base: int,
    row: int,
    sampled: Sequence[float],
    counts: Mapping[Any, int],
) -> dict[str, Any]:
    """The numbers of a batch that are known when it is submitted.

    Args:
        row: tokens of a row.
        sampled: the rewards of all trajectories sampled since the last submission, including groups
            that were left out.
    """
    trajectories = [trajectory for group in batch for trajectory in group.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    behind = [base - (turn.policy_step or 0) for turn in turns]
    rewards = [trajectory.reward for trajectory in trajectories]
    return {
        "reward": fmean(sampled or rewards),
        "reward_trained": fmean(rewards),
        "metrics": _means(trajectories),
        "off_policy_steps": {"max": max(behind), "mean": fmean(behind)},
        "tokens": sum(len(turn.token_ids) for turn in turns),
        "turns": len(turns),
        "too_long": sum(trajectory.longest > row for trajectory in trajectories),
        "sampling": max(group.ended for group in batch) - min(group.began for group in batch),
        "left_out": {why: counts[why] for why in LEFT_OUT},
        "equal_texts": counts["equal_texts"],
        "lost": {what: _reasons(counts, what) for what in ("failed", "discarded")},
        "errors": counts["errors"],
        "submitted": time.time(),
    }


def _reasons(counts: Mapping[Any, int], what: str) -> dict[str, int]:
    """For each reason, the number of rollouts that gave no trajectory. Only the `_REASONS` most
    frequent reasons are named; the others are summed under "others"."""
    found = Counter(
        {
            key[1]: count
            for key, count in counts.items()
            if isinstance(key, tuple) and key[0] == what
        }
    )
    shown = dict(found.most_common(_REASONS))
    others = found.total() - sum(shown.values())
    return shown | ({"others": others} if others else {})


def _means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The environment's own metrics. Each metric is averaged over the trajectories that have it."""
    names = sorted({name for trajectory in trajectories for name in trajectory.metrics})
    return {
        name: fmean(one.metrics[name] for one in trajectories if name in one.metrics)
        for name in names
    }


class RunRecord:
    """The record. Appends to `file`; `tell` is called with each new line."""

    def __init__(self, file: Path, tell: Callable[[dict[str, Any]], object]) -> None:
        self._file, self._tell = file, tell
        data = file.read_bytes() if file.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:  # the loop was killed during the write
            file.write_bytes(whole)
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]

    def evaluated(self, step: int, name: str) -> bool:
        """Whether the step has an evaluation of this name with at least one sample. Only an
        evaluation after the step's last training counts: after a rollback, a step is trained and
        evaluated again."""
        ours = (
            line
            for line in reversed(self.lines)
            if line.get("step") == step
            or (line.get("evaluated") == step and line.get("name", "") == name)
        )
        newest: Mapping[str, Any] = next(ours, {})
        return bool(newest.get("samples"))

    def step(self, job: Submitted, events: Sequence[Event], idle_since: float) -> float:
        """Record a step; returns the time at which its job ended, in Unix seconds.

        Args:
            idle_since: the time at which the trainer became idle, in Unix seconds.
        """
        at = {event.type: event.time for event in events}
        numbers, ended = dict(job.numbers), at["succeeded"]
        seconds = {
            "waiting": max(0.0, numbers.pop("submitted") - idle_since),
            "sampling": numbers.pop("sampling"),
            "training": ended - at["claimed"],
            "serving": max(0.0, at.get("served", time.time()) - at.get("checkpoint", ended)),
        }
        trained = [event.data["metrics"] for event in events if event.type == "step"][-1:] or [{}]
        shown = {
            name: value for name, value in trained[0].items() if not name.startswith("memory_")
        }
        if all(line.get("job") != job.id for line in self.lines):
            line = {"step": job.base + 1, "job": job.id, **numbers, "seconds": seconds}
            self._write(line | {"trained": shown})
        return ended

    def evaluation(
        self,
        step: int,
        groups: Sequence[Sequence[Trajectory]],
        failed: int,
        more: Mapping[str, Any],
    ) -> None:
        """Record the rewards of an evaluation's tasks, with a sample. If the mean reward is printed
        as 0.000, also record what the answers have in common.

        Args:
            failed: rollouts without a trajectory.
        """
        trajectories = [trajectory for group in groups for trajectory in group]
        rewards = [trajectory.reward for trajectory in trajectories]
        line: dict[str, Any] = {
            "evaluated": step,
            **more,
            "reward": fmean(rewards),
            "samples": len(rewards),
        }
        line |= {"failed": failed, "metrics": _means(trajectories)}
        line["sample"] = sample(trajectories[-1])
        if abs(fmean(rewards)) < _NOTHING:
            alike = Alike([trajectories])
            texts = "equal" if alike.same_text else "different"
            line |= {"texts": texts, "rewards": alike.counts(), "last": list(alike.last)}
        self._write(line)

    def begins(self, config: Config, base: int, last: int, task: Any, awaited: int) -> None:
        """Report what the loop is about to train, and what the loop waits for.

        Args:
            base: the step that the next job starts from.
            last: the step at which the training ends.
            task: the first task.
            awaited: the step that vLLM must serve before the rollouts begin.
        """
        rl, run = config.rl, config.run.name
        per_step = f"{rl.groups_per_step} groups of {rl.group_size} rollouts per step"
        uses = ", ".join(section.use for section in rl.environment)
        self.notice(f"run {run} at step {base}, to be trained to step {last}: {per_step}")
        self.notice(f"tasks of {uses}, the first: {str(task)[:300]}")
        self.notice(f"waits until vLLM serves {run}@{awaited}")

    def notice(self, text: str, sampled: Mapping[str, Any] | None = None) -> None:
        """Report `text` to the user, without a line in the file."""
        self._tell({"notice": text} | ({"sample": sampled} if sampled else {}))

    def _write(self, line: dict[str, Any]) -> None:
        line["time"] = time.time()
        with self._file.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
        self.lines.append(line)
        self._tell(line)
