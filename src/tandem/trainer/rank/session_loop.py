"""Runs a session's job, which computes the requests of the session's run as they arrive. The job
ends when no request has arrived for a while.

Rank 0 looks for the next request and sends it to the other ranks. If a rank dies, the next
attempt's ranks read all requests since the newest checkpoint from the log, and compute them again.
The repeated computation gives bit-identical results. Results that already exist are not written
again.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from tandem.errors import CheckpointDamaged, InvalidInput, NotFound
from tandem.families.arch import Arch
from tandem.model import parallel
from tandem.model.parallel import Topology
from tandem.spool import fs
from tandem.spool.schema import (
    AnyRequest,
    LoadRequest,
    PassRequest,
    RequestError,
    RequestResult,
    SavedName,
    SaveRequest,
    StepRequest,
    VoidRequest,
)
from tandem.spool.session_jobs import others_wait
from tandem.trainer.rank import full_volume
from tandem.trainer.rank.calls import ModelCalls
from tandem.trainer.rank.commit import NewCheckpoint
from tandem.trainer.rank.model_loader import LoadedModel
from tandem.trainer.rank.probe import JobProbe
from tandem.trainer.rank.rendezvous import Assignment
from tandem.trainer.rank.session import Session
from tandem.training.optimizer import NonFinite
from tandem.training.rows import Fit

POLL_SECONDS = 0.01
BEAT_SECONDS = 1.0
"""Rank 0 sends a message to the other ranks at least this often."""
SOON_SECONDS = 2.0
"""Seconds for which a session without requests may keep other jobs waiting."""
MOST_SECONDS = 43200.0
"""The maximum duration of a job in seconds. Another job then continues the session. The limit keeps
a job's list of events from growing without end."""
AUTOSAVE_SECONDS = 600.0
"""Seconds between automatic checkpoints, which limit the work that is repeated after a crash."""
MOST_STARTS = 5
"""A request whose computation has started this many times without a result gets an error, because
the request may be the cause of the ranks' crashes."""


@dataclass(frozen=True)
class NextCall:
    """The next action of all ranks. `answered`: whether the request already has a result.
    `refused`: whether the request already has an error, or gets an error without being computed."""

    kind: Literal["request", "save", "wait", "leave"]
    answered: bool = False
    refused: bool = False


class SessionLoop:
    def __init__(
        self,
        session: Session,
        assignment: Assignment,
        arch: Arch,
        model: LoadedModel,
        topology: Topology,
        versions: dict[str, str],
    ) -> None:
        """Reads the number of the last request whose effect is in the checkpoint that the job
        starts from.

        Args:
            assignment: the assignment, whose `base_step` is the run's newest checkpoint.
            model: the loaded model, in the state of the run's newest checkpoint.
            versions: package -> version, for the manifests.
        """
        self._session, self._assignment, self._model = session, assignment, model
        self._versions, self._run = versions, assignment.run
        self._spool = spool = session.attempt.spool
        self._log = spool.requests
        self._newest = assignment.job.base_step
        # `_seq` is the last computed request. `_changed_by` is the last request that changed
        # weights or Adam's state. `_saved` is the last request whose effect is in a checkpoint.
        self._seq = self._changed_by = self._saved = (
            spool.checkpoints.manifest(self._run.name, self._newest).seq or 0
        )
        fit = Fit(model.policy, session.device, on=session.settings.recompute == "auto")
        self._calls = ModelCalls(
            spool, self._run, arch, model, topology, session.device, session.phases, fit
        )
        self._steps, self._patience = 0, session.settings.session_idle_seconds
        self._begin = self._idle_since = self._saved_at = time.monotonic()
        self._next_look, self._others = 0.0, False

    def run(self) -> None:
        """Runs until no request has arrived for a while. At the end, the run's newest checkpoint
        contains the effects of all requests, except gradients that no optimizer step has
        applied."""
        self._calls.forget()
        while (call := self._next()).kind != "leave":
            if call.kind == "save":
                self._checkpoint()
            else:
                self._seq += 1
                self._do(self._seq, call)
                self._idle_since = time.monotonic()
        if self._unsaved:
            self._checkpoint()
        if self._session.rank == 0:
            fs.write_atomic(self._session.attempt.left, b"")

    @property
    def _unsaved(self) -> bool:
        return self._changed_by > self._saved

    def _next(self) -> NextCall:
        """Waits for the next call that is not "wait". Rank 0 decides, and all ranks return the same
        call."""
        while True:
            mine = self._look() if self._session.rank == 0 else NextCall("wait")
            if (call := parallel.gather_objects(mine)[0]).kind != "wait":
                return call
            self._session.heartbeat("wait")

    def _look(self) -> NextCall:
        """The next call, on rank 0; "wait" if no request arrives for BEAT_SECONDS."""
        end, run = time.monotonic() + BEAT_SECONDS, self._run.name
        while (now := time.monotonic()) < end:
            if self._unsaved and now - self._saved_at > AUTOSAVE_SECONDS:
                return NextCall("save")
            if self._has_to_leave(now):
                return NextCall("leave")
            if self._log.has(run, self._seq + 1):
                return self._call_of(self._seq + 1)
            if now - self._idle_since > (SOON_SECONDS if self._others else self._patience):
                return NextCall("leave")
            time.sleep(POLL_SECONDS)
        return NextCall("wait")

    def _call_of(self, seq: int) -> NextCall:
        result = self._log.result(self._run.name, seq)
        if result is not None:
            return NextCall("request", answered=True, refused=result.error is not None)
        return NextCall("request", refused=self._log.begin(self._run.name, seq) > MOST_STARTS)

    def _has_to_leave(self, now: float) -> bool:
        """Whether the session has ended, the job has run for too long, or the session has kept
        other jobs waiting for too long."""
        if now >= self._next_look:
            self._next_look = now + BEAT_SECONDS
            self._others = others_wait(self._spool)
            assert self._run.session is not None
            if self._spool.sessions.ended(self._run.session) is not None:
                return True
        most = max(self._patience, SOON_SECONDS) if self._others else MOST_SECONDS
        return now - self._begin > most

    def _do(self, seq: int, call: NextCall) -> None:
        request = self._log.get(self._run.name, seq).request
        if call.refused:
            if isinstance(request, StepRequest):
                self._calls.forget()
            message = (
                f"its ranks ended {MOST_STARTS} times while they computed it; see the job's log"
            )
            self._answer(seq, RequestError(category="server", message=message))
            return
        error, metrics, logprobs, step = None, dict[str, float](), None, None
        try:
            if isinstance(request, SaveRequest):
                step = None if call.answered else self._save(request)
            elif not isinstance(request, PassRequest) or self._matters(request, call):
                metrics, logprobs = self._compute(seq, request)
        except (NonFinite, InvalidInput, NotFound, CheckpointDamaged) as refusal:
            error = RequestError(category="user", message=str(refusal))
        if not call.answered:
            self._answer(seq, error, metrics, logprobs, step)
            if isinstance(request, StepRequest) and error is None:
                self._report(metrics)

    def _matters(self, request: PassRequest, call: NextCall) -> bool:
        """Whether the pass has to be computed, because its result is not written yet or because its
        gradients are needed."""
        return request.kind == "forward_backward" or not call.answered

    def _compute(self, seq: int, request: AnyRequest) -> tuple[dict[str, float], bytes | None]:
        metrics, logprobs = dict[str, float](), None
        if isinstance(request, PassRequest):
            return self._calls.compute(seq, request)
        if isinstance(request, StepRequest):
            metrics = self._calls.step(request)
        elif isinstance(request, LoadRequest):
            self._calls.load(request)
        elif isinstance(request, VoidRequest):
            raise InvalidInput(request.reason)
        self._changed_by = seq
        # After a load, the run needs a checkpoint of its own, because the loaded checkpoint may be
        # removed.
        if isinstance(request, LoadRequest):
            self._checkpoint()
        return metrics, logprobs

    def _answer(
        self,
        seq: int,
        error: RequestError | None,
        metrics: dict[str, float] | None = None,
        logprobs: bytes | None = None,
        step: int | None = None,
    ) -> None:
        if self._session.rank == 0:
            result = RequestResult(
                error=error, metrics=metrics or {}, step=step, finished=time.time()
            )
            self._log.answer(self._run.name, seq, result, logprobs)

    def _report(self, metrics: dict[str, float]) -> None:
        self._steps += 1
        self._session.heartbeat.step = self._session.heartbeat.steps = self._steps
        seconds, _ = self._session.phases.take()
        metrics = metrics | {f"seconds_{name}": value for name, value in seconds.items()}
        with full_volume.event_left_out():
            self._session.event("step", step=self._steps, steps=self._steps, metrics=metrics)

    def _save(self, request: SaveRequest) -> int:
        if self._unsaved:
            self._checkpoint()
        if self._session.rank == 0:
            saved = SavedName(
                group=request.group, name=request.name, step=self._newest, created=time.time()
            )
            self._spool.names.put(self._run.name, saved)
        return self._newest

    def _checkpoint(self) -> None:
        """Makes the run's next checkpoint, and removes the arrays of requests whose effect the
        checkpoint contains."""
        session, calls, policy = self._session, self._calls, self._model.policy
        if calls.probe is None:  # no pass has been computed since the last checkpoint
            calls.probe = JobProbe(_any_tokens(policy.arch.vocab_size), [], 128, session.device)
            calls.previous = calls.probe.logprobs(policy)
        job = self._assignment.job.model_copy(update={"base_step": self._newest})
        assignment = self._assignment.model_copy(update={"job": job})
        with session.phases.phase("checkpoint"), ThreadPoolExecutor(1) as thread:
            new = NewCheckpoint(session, assignment, self._model, self._versions, thread)
            new.write()
            new.commit({}, calls.probe.score(policy, calls.previous), seq=self._changed_by)
        self._newest += 1
        self._saved, self._saved_at = self._changed_by, time.monotonic()
        calls.saved()
        if session.rank == 0:
            self._log.trim(self._run.name, self._saved)


def _any_tokens(vocab_size: int) -> list[list[int]]:
    return [[token % vocab_size for token in range(1, 17)]]
