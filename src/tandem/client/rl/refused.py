"""Handles the obstacles to resuming a run. The functions raise an error for pending jobs of other
programs, and for a job whose base step will not be made. The function `discard_refused` rolls back
a step that the publisher refused."""

from collections.abc import Iterable
from contextlib import suppress
from math import inf

from tandem.client import AsyncTandem, RunStatus
from tandem.client.rl.record import State, Submitted
from tandem.errors import Conflict, InvalidInput, JobFailed, NotFound


def raise_unless_free(status: RunStatus, state: State, bound: int) -> None:
    """Raises Conflict if the run has pending jobs, but the loop's state has none. Raises
    InvalidInput if the loop would sample during jobs although trainer and vLLM share GPUs: on
    shared GPUs, vLLM sleeps during a job.

    Args:
        bound: the value of `rl.max_off_policy_steps`; 0: the loop does not sample during jobs.
    """
    if not state.jobs and status.num_pending:
        problem = f"run {state.run!r} has queued or running jobs; wait until they end"
        raise Conflict(problem, field="run.name")
    if status.shared_gpus and bound:
        problem = (
            "trainer and vLLM take turns on the same GPUs, so nobody samples while a job"
            " trains; set it to 0"
        )
        raise InvalidInput(problem, field="rl.max_off_policy_steps")


async def raise_failure(tandem: AsyncTandem, jobs: Iterable[Submitted]) -> None:
    """Raises JobFailed with the cause if one of the jobs failed or was cancelled. The controller's
    refusal of a later job only says that the later job's base step will never be made."""
    for job in jobs:
        with suppress(NotFound):
            if (await tandem.get_job(job.id)).state in ("failed", "cancelled"):
                await tandem.wait_job(job.id, inf)


async def discard_refused(tandem: AsyncTandem, state: State, status: RunStatus) -> None:
    """Roll the run back to the step that vLLM serves, if the publisher refused a newer step.

    Args:
        state: the loop's state. All jobs in the state are cancelled before the rollback, and their
            tasks are handed out again.
        status: the run's present status.
    """
    served = status.served
    if served is None or not status.served_in_chain or served.refused_step is None:
        return
    if not served.step < served.refused_step <= status.newest_step:
        return
    for job in reversed(state.jobs):
        with suppress(NotFound):
            await tandem.cancel(job.id)
    for job in state.jobs:
        with suppress(NotFound, JobFailed):
            await tandem.wait_job(job.id, inf)
    await tandem.rollback(state.run, served.step)
