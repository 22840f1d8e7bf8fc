"""An agent that stays in its pod after an attempt and serves the attempts that the runner gives to
the pod's Kubernetes Job. Between the attempts the pod's GPUs are free: no rank is left, and the
fork server has no CUDA context."""

import time
from contextlib import suppress

from tandem.errors import TandemError
from tandem.system import liveness
from tandem.trainer.agent.agent import FOLLOW_SECONDS, HostAgent, LeavingError, log
from tandem.trainer.agent.hosts import DONE, STOPPED, TAKE_SECONDS
from tandem.trainer.agent.watch import Leave


def serve_and_linger(agent: HostAgent, job: str, number: int, hosts: int | None) -> int:
    """Serves the given attempt, then the attempts that the runner gives to the Kubernetes Job
    `agent.pods`. Returns the agent's exit status. Raises as `HostAgent.serve`.

    Args:
        job, number, hosts: the first attempt, as in `HostAgent.serve`.
    """
    status = agent.serve(job, number, hosts)
    while status == DONE and agent.lingers:
        log.info("lingers for another attempt", seconds=agent.lingers)
        try:
            with suppress(TandemError, OSError):  # the next attempt reports the error
                agent.prepare()
            job, number = _next_attempt(agent)
        except LeavingError as leaving:
            log.info("leaves", why=leaving.leave.why)
            return leaving.leave.status
        status = agent.serve(job, number, hosts)
    return status


def _next_attempt(agent: HostAgent) -> tuple[str, int]:
    """Waits for the runner's order for another attempt. Raises LeavingError if no order comes in
    time, or on SIGTERM. A living runner deletes the Job before the agent's waiting time is over.
    The agent has its own limit for the case that the runner has died."""
    end = time.monotonic() + agent.lingers + TAKE_SECONDS

    def turn() -> None:
        # The exit status must not be 0: the pod would count as done when Kueue admits the Job
        # again.
        if agent.stop.requested:
            raise LeavingError(Leave(STOPPED, "it was asked to stop (SIGTERM)"))
        if time.monotonic() > end:
            raise LeavingError(Leave(DONE, "no attempt came"))

    while True:
        turn()
        with suppress(TandemError, OSError):  # the volume may become usable again
            found = liveness.in_thread(agent.next_attempt, turn, FOLLOW_SECONDS)
            if found is not None:
                return found
        time.sleep(FOLLOW_SECONDS)
