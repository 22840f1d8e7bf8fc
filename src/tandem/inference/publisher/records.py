"""The publisher's records of served steps, if the spool has only one vLLM. (`replica.py` has the
records for one of several vLLM servers.)"""

from collections.abc import Collection, Sequence
from typing import Protocol

from tandem.inference.publisher.checkpoint_loader import ServedCheckpoint
from tandem.spool import Spool
from tandem.spool.schema import Refused, Served
from tandem.system.logs import Log

log = Log("publisher")


class Records(Protocol):
    def served(self, run: str) -> Served | None:
        """The newest step of a run that this vLLM serves, according to the records."""

    def put(self, run: str, serves: Sequence[Served], refused: Refused | None) -> None:
        """Records which steps of a run this vLLM serves.

        Args:
            serves: the steps that vLLM serves, newest first; empty: vLLM serves no step of the run.
            refused: a newer step that was refused; None: no newer step was refused.
        """

    def tell(self, run: str, served: ServedCheckpoint) -> None:
        """Records, in the events of the step's job, that vLLM serves the step."""

    def keep(self, run: str) -> set[str]:
        """The names of steps that must stay loaded, even if the publisher would unload them."""

    def unload(self, run: str, name: str) -> bool:
        """Remove a step from the records before the step is unloaded from vLLM. Returns False if
        the step must stay loaded."""

    def withdraw(self, listed: Collection[str]) -> None:
        """Remove the records of steps that are not among the names in `listed`, for example after a
        restart of vLLM."""

    def turn_begins(self) -> None:
        """The publisher calls this method before it reads vLLM's list of models."""

    def turn_done(self, runs: Collection[str]) -> None:
        """The publisher calls this method after each pass over all runs, when vLLM serves the right
        steps. `runs`: the names of all runs."""


class OnlyServer:
    """The records of the spool's only vLLM."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def served(self, run: str) -> Served | None:
        return self._spool.served.get(run)

    def put(self, run: str, serves: Sequence[Served], refused: Refused | None) -> None:
        if not serves:
            if refused is not None:
                self._spool.served.put_refused(run, refused)
            return
        step, reason = (refused.step, refused.reason) if refused else (None, None)
        record = serves[0].model_copy(update={"refused_step": step, "refused_reason": reason})
        if self._spool.served.get(run) != record:
            self._spool.served.put(run, record)

    def tell(self, run: str, served: ServedCheckpoint) -> None:  # noqa: ARG002
        if served.job is not None and not served.told:
            tell_job(self._spool, served.job, served.record)
        served.told = True

    def keep(self, run: str) -> set[str]:  # noqa: ARG002
        return set()

    def unload(self, run: str, name: str) -> bool:  # noqa: ARG002
        return True

    def withdraw(self, listed: Collection[str]) -> None:
        for run in self._spool.runs.names():
            record = self._spool.served.get(run)
            if record is not None and record.model not in listed:
                log.warning(
                    "vLLM does not have the step any more that it served", model=record.model
                )
                self._spool.served.withdraw(run)

    def turn_begins(self) -> None:
        """Does nothing, because readiness is recorded only if there are several servers."""

    def turn_done(self, runs: Collection[str]) -> None:
        """Does nothing, because there is no other replica."""


def tell_job(spool: Spool, job: str, served: Served) -> None:
    """Append the event `served` to the events of the checkpoint's job. The event is appended only
    once, however often the checkpoint is loaded."""
    with spool.job_lock(job):
        events = spool.events.read(job)
        # If the job has no events, the job's records were removed.
        if events and not any(event.type == "served" for event in events):
            told = {
                "step",
                "model",
                "transport",
                "mean_abs_logprob_error",
                "allowed_logprob_error",
                "tokens_checked",
                "seconds",
            }
            spool.events.append(job, "served", **served.model_dump(include=told))
