"""Makes a job's id, and the job's request from the groups that the job trains."""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import count
from math import ceil
from textwrap import wrap
from typing import Any

from tandem.client.rl.config import OF_JOBS, RLSection
from tandem.client.rl.environment import RolloutGroup
from tandem.controller.schemas import LABEL_CHARACTERS, MOST_LABELS


def job_names(run: str, base: int) -> Iterator[str]:
    """The ids for jobs that start from step `base`, in the order in which the ids are tried."""
    # A job's id has at most 64 characters. Two runs whose names have the same beginning must give
    # different ids.
    short = run if len(run) <= 40 else f"{run[:31]}-{sha256(run.encode()).hexdigest()[:8]}"
    yield f"{short}-rl-{base}"
    yield from (f"{short}-rl-{base}-{number}" for number in count(2))


def job_request(
    rl: RLSection, batch: Sequence[RolloutGroup], job: str, base: int, first: int
) -> dict[str, Any]:
    """The request for the controller.

    Args:
        base: the step that the job starts from.
        first: the step at which the loop began.
    """
    settings = rl.model_dump(include=OF_JOBS, exclude_unset=True)
    optimizer = rl.optimizer
    if optimizer.batch_size:  # all jobs together have one learning-rate schedule
        start = (
            max(0, base - first)
            * optimizer.epochs
            * ceil(rl.groups_per_step / optimizer.batch_size)
        )
        settings["optimizer"]["schedule"] = optimizer.schedule.model_copy(
            update={"start": start}
        ).model_dump()
    return {
        **settings,
        "kind": "rl",
        "id": job,
        "base_step": base,
        "max_off_policy_steps": rl.max_off_policy_steps,
        "groups": [
            {"trajectories": [one.model_dump(exclude_unset=True) for one in group.trajectories]}
            for group in batch
        ],
        "labels": task_labels([group.task for group in batch]),
    }


def task_labels(tasks: Sequence[str]) -> dict[str, str]:
    """The task names in the labels `tasks`, `tasks-2`, ... Each label has as many names as fit. If
    the names don't fit into all labels of a job, the last label ends with "…"."""
    lines = wrap(
        " ".join(tasks),
        LABEL_CHARACTERS,
        break_on_hyphens=False,
        max_lines=MOST_LABELS,
        placeholder=" …",
    )
    return {
        f"tasks-{number}" if number > 1 else "tasks": line for number, line in enumerate(lines, 1)
    }
