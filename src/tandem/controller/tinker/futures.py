"""Finds the results of logged requests. Clients ask for the results as futures."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tandem.controller.deployment import Deployment
from tandem.controller.tinker.models import Numbers
from tandem.controller.tinker.names import Name, SavedPath
from tandem.controller.tinker.results import encode_pass
from tandem.errors import NotFound
from tandem.spool import Spool
from tandem.spool.schema import (
    LoadRequest,
    LoggedRequest,
    PassRequest,
    RequestResult,
    SaveRequest,
    StepRequest,
    VoidRequest,
)

# Seconds after which a missing request is replaced by a `VoidRequest`, whose result is an error. A
# missing request number delays all later requests of the model. If the client sends requests in
# parallel, the missing request usually arrives soon.
GAP_SECONDS = 60.0
SNAPSHOT = "~"
"""The prefix of the names of checkpoints that the client did not name; the sampler's number follows
it."""
SNAPSHOT_SECONDS = 3600.0
"""Seconds for which a snapshot stays pinned after its client last sampled."""


@dataclass(frozen=True)
class Unfinished:
    """The outcome of a request that has no result yet. `reason` says why the result is missing; it
    is empty while the request is being computed."""

    reason: str = ""


@dataclass(frozen=True)
class Failure:
    message: str
    category: str  # "user" or "server"


Outcome = Unfinished | Failure | bytes | Mapping[str, Any]
"""The result of a request. `bytes`: protobuf; a mapping: JSON."""


class Futures:
    def __init__(self, deployment: Deployment, numbers: Numbers) -> None:
        self._deployment, self._numbers = deployment, numbers

    def look(self, model: Name, number: int | None) -> Outcome:
        """The present outcome of the model's request `number`. Raises NotFound if there is no such
        request."""
        spool, run = self._deployment.spool, model.run
        seq = 1
        if number is None:
            spool.runs.get(run)
            if self._numbers.logged(run, 1) == 1:
                return {"type": "create_model", "model_id": str(model)}
        else:
            seq = self._numbers.logged(run, number)
        logged = spool.requests.get(run, seq)
        if isinstance(logged.request, VoidRequest):
            return Failure(logged.request.reason, "user")
        if (result := spool.requests.result(run, seq)) is None:
            return self._waiting(model)
        if result.error is not None:
            return Failure(result.error.message, result.error.category)
        return self._answer(model, logged, result)

    def _answer(self, model: Name, logged: LoggedRequest, result: RequestResult) -> Outcome:
        match logged.request:
            case PassRequest():
                logprobs = self._deployment.spool.requests.logprobs(model.run, logged.seq)
                return encode_pass(logprobs, result.metrics)
            case StepRequest():
                return {"metrics": result.metrics}
            case LoadRequest():
                return {"type": "load_weights", "model_id": str(model)}
            case SaveRequest() as request:
                return self._saved(model, request, result.step or 0)
            case _:
                raise NotFound(f"request {logged.seq} has no answer", field="request_id")

    def _saved(self, model: Name, request: SaveRequest, step: int) -> Outcome:
        if request.group == "weights":
            path = SavedPath(model, "weights", request.name)
            return {"type": "save_weights", "path": str(path)}
        if (waits := self._unserved(model.run, step)) is not None:
            return waits
        kind = {"type": "save_weights_for_sampler"}
        if request.name.startswith(SNAPSHOT):
            number = int(request.name.removeprefix(SNAPSHOT))
            sampler = Name(model.session, "sample", number)
            return kind | {"sampling_session_id": str(sampler)}
        return kind | {"path": str(SavedPath(model, "sampler", request.name))}

    def _unserved(self, run: str, step: int) -> Outcome | None:
        """The outcome to report while vLLM does not serve the step; None once vLLM serves this step
        or a later step of the run."""
        spool = self._deployment.spool
        served = spool.served.get(run)
        if served is not None and served.step >= step:
            return None
        refused = spool.served.refused(run) if served is None else served.refused
        if refused is not None and refused.step >= step:
            return Failure(f"vLLM can't serve the checkpoint: {refused.reason}", "server")
        return Unfinished("vLLM loads the checkpoint and verifies it")

    def _waiting(self, model: Name) -> Outcome:
        """The outcome of a request that has no result yet, with the reason why it has none. If a
        request with a lower number is missing, and no request has come for GAP_SECONDS, logs a
        `VoidRequest` in place of the missing request."""
        spool, run = self._deployment.spool, model.run
        if (ended := spool.sessions.ended(model.session)) is not None:
            return Failure(f"the session has ended: {ended.reason}", "user")
        pending = spool.requests.pending(run)
        if not pending or spool.requests.next(run) is not None:
            return Unfinished(self._holdup(run))
        newest = max(spool.requests.get(run, at).created for at in pending)
        if time.time() - newest > GAP_SECONDS:
            problem = f"a request with a lower number never came within {GAP_SECONDS:g} s"
            missing = pending[0] - 1
            while missing > 0 and not spool.requests.has(run, missing):
                self._numbers.fill(run, missing, problem)
                missing -= 1
        return Unfinished("a request before it has not come yet")

    def _holdup(self, run: str) -> str:
        """The reason why the run's requests wait; empty if the trainer computes the requests or
        will soon begin to compute them."""
        index = self._deployment.spool.jobs.index
        others = index.running() and not index.running(run)
        return "another job has the trainer" if others else ""


def forget_snapshots(spool: Spool) -> None:
    """Forgets the snapshots of ended sessions, and snapshots that nobody samples, so that their
    checkpoints may be removed."""
    now = time.time()
    for session in spool.sessions.ids():
        ended = spool.sessions.ended(session) is not None
        for run in spool.sessions.runs(session):
            with suppress(NotFound):
                for saved in spool.names.list(run):
                    if saved.group != "sampler" or not saved.name.startswith(SNAPSHOT):
                        continue
                    number = int(saved.name.removeprefix(SNAPSHOT))
                    used = max(saved.created, spool.sessions.sampler_used(session, number))
                    if ended or now - used > SNAPSHOT_SECONDS:
                        spool.names.remove(run, saved.group, saved.name)
