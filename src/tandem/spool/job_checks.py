"""Checks of a job before it is added to the queue of its run."""

from collections.abc import Sequence

from tandem.errors import InvalidInput
from tandem.spool.schema import JobSpec, SessionJob


def check_reference(spec: JobSpec, steps: Sequence[int]) -> None:
    """Raises InvalidInput if the loss refers to a checkpoint that will not exist when the job
    starts. `steps` has the run's steps in ascending order."""
    if isinstance(spec, SessionJob):
        return
    reference = spec.loss.reference_step
    if reference is not None and (
        reference > spec.base_step or (reference < steps[-1] and reference not in steps)
    ):
        problem = f"step {reference} will not exist when this job starts from step {spec.base_step}"
        raise InvalidInput(problem, field=spec.loss.reference_field)


def check_age(spec: JobSpec, most: int | None) -> None:
    """Raises InvalidInput if a turn was sampled more than `most` steps before the job's base step.
    `data.prepare` has already compared the turns with the base step that was expected before
    packing. The base step is higher than expected if other jobs were queued during the packing."""
    oldest = None if isinstance(spec, SessionJob) else spec.data.policy_step_min
    if most is not None and oldest is not None and (age := spec.base_step - oldest) > most:
        behind = (
            f"step {oldest} sampled a turn, {age} steps before the job's base step {spec.base_step}"
        )
        problem = f"{behind}, which comes after the queued jobs; the most is {most}"
        raise InvalidInput(problem, field="max_off_policy_steps")
