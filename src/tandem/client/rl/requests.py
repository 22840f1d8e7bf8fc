"""The request of a job, of the groups that it trains, and the job's name."""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import count
from math import ceil
from typing import Any

from tandem.client.rl.config import OF_JOBS, RLSection
from tandem.client.rl.environment import RolloutGroup


def job_names(run: str, base: int) -> Iterator[str]:
    """The names of the jobs of a base step, in the order in which they are made."""
    # A job's id has 64 characters at most. Runs that begin alike have jobs of different names.
    short = run if len(run) <= 40 else f"{run[:31]}-{sha256(run.encode()).hexdigest()[:8]}"
    yield f"{short}-rl-{base}"
    yield from (f"{short}-rl-{base}-{number}" for number in count(2))


def job_request(
    rl: RLSection, batch: Sequence[RolloutGroup], job: str, base: int, first: int
) -> dict[str, Any]:
    """What the controller gets. `base`: the step that the job starts from; `first`: the step that
    the loop began with."""
    settings = rl.model_dump(include=OF_JOBS, exclude_unset=True)
    optimizer = rl.optimizer
    if optimizer.batch_size:  # one schedule over all jobs
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
        "labels": {"tasks": " ".join(group.task for group in batch)},
    }
