"""The request of a job, of the groups that it trains."""

from collections.abc import Sequence
from math import ceil
from typing import Any

from tandem.client.rl.config import OF_JOBS, RLSection
from tandem.client.rl.environment import Group


def job_request(rl: RLSection, batch: Sequence[Group], job: str, base: int, first: int) -> dict[str, Any]:
    """What the controller gets. `base`: the step that the job starts from; `first`: the step that the loop began
    with."""
    settings = rl.model_dump(include=OF_JOBS, exclude_unset=True)
    optimizer = rl.optimizer
    if optimizer.batch_size:  # one schedule over all jobs
        start = max(0, base - first) * optimizer.epochs * ceil(rl.groups_per_step / optimizer.batch_size)
        settings["optimizer"]["schedule"] = optimizer.schedule.model_copy(update={"start": start}).model_dump()
    return {
        **settings,
        "kind": "rl", "id": job, "base_step": base, "max_off_policy_steps": rl.max_off_policy_steps,
        "groups": [{"trajectories": [one.model_dump(exclude_unset=True) for one in group.trajectories]}
                   for group in batch],
        "labels": {"tasks": " ".join(group.task for group in batch)},
    }  # fmt: skip
