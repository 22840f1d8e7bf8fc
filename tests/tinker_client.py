"""Tinker's package, unmodified, against a controller. A thread acts as a session's ranks."""

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import numpy as np
import pytest
import tinker
from tinker import types

from api_server import KEY
from tandem.errors import NotFound
from tandem.spool import Spool
from tandem.spool.schema import (
    PassRequest,
    Probe,
    RequestError,
    RequestResult,
    SavedName,
    SaveRequest,
    Served,
    VoidRequest,
)

TINKER_KEY = f"tml-{KEY}"


@contextmanager
def service(url: str, key: str = TINKER_KEY, **more: Any) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=url, api_key=key, **more)
    try:
        yield client
    finally:
        client.close("success").result(timeout=60)


def datum(tokens: Sequence[int], **inputs: Any) -> types.Datum:
    """A datum with `tokens`. The target of each token is the next token."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), **inputs},
    )


@contextmanager
def refused(status: int, words: str) -> Iterator[pytest.ExceptionInfo[tinker.APIStatusError]]:
    """Checks the error that Tinker's package raises for a refusal."""
    with pytest.raises(tinker.APIStatusError) as caught:
        yield caught
    assert caught.value.status_code == status, caught.value.message
    assert words in caught.value.message


class PlayedRanks:
    """Answers requests in their order. The log-probs of a pass are 0, -1, -2, and so on. The loss
    is the negative sum of the log-probs."""

    def __init__(self, spool: Spool, *, serves: bool = True) -> None:
        self.spool, self.serves = spool, serves
        self.held = threading.Event()  # while `held` is set, no request is answered
        self.problem: RequestError | None = None  # the error of the next request
        self.done: list[tuple[str, int, str]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            for session in self.spool.sessions.ids():
                for run in self.spool.sessions.runs(session):
                    with suppress(NotFound):
                        self._work(run)

    def _work(self, run: str) -> None:
        while not self.held.is_set() and (seq := self.spool.requests.next(run)) is not None:
            request = self.spool.requests.get(run, seq).request
            result, logprobs = RequestResult(finished=time.time()), None
            if self.problem is not None:
                result, self.problem = result.model_copy(update={"error": self.problem}), None
            elif isinstance(request, VoidRequest):
                error = RequestError(category="user", message=request.reason)
                result = result.model_copy(update={"error": error})
            elif isinstance(request, PassRequest):
                values = np.arange(sum(request.lengths), dtype="<f4")
                logprobs = (-values).tobytes()
                result = result.model_copy(update={"metrics": {"loss:sum": float(values.sum())}})
            elif isinstance(request, SaveRequest):
                result = result.model_copy(update={"step": self._save(run, request)})
            self.done.append((run, seq, request.kind))
            self.spool.requests.answer(run, seq, result, logprobs)

    def _save(self, run: str, request: SaveRequest) -> int:
        spool, step = self.spool, self.spool.checkpoints.newest(run)
        staged = spool.paths.runs / ".staged-by-a-test"
        (staged / "optimizer").mkdir(parents=True)
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            shutil.copyfile(spool.checkpoints.path(run, step) / name, staged / name)
        (staged / "optimizer" / "adam.safetensors").write_bytes(b"moments")
        probe = Probe(tokens=[], logprobs=[], previous=[], base=[])
        spool.checkpoints.commit(staged, run, step + 1, f"job-{step}", metrics={}, probe=probe)
        saved = SavedName(
            group=request.group, name=request.name, step=step + 1, created=time.time()
        )
        spool.names.put(run, saved)
        if self.serves:
            serve(spool, run, step + 1)
        return step + 1


def serve(spool: Spool, run: str, step: int, **refused: Any) -> None:
    """Record that vLLM serves a step."""
    manifest = spool.checkpoints.manifest(run, step)
    served = Served(
        step=step,
        model=f"{run}@{step}",
        verified=time.time(),
        mean_abs_logprob_error=0.001,
        allowed_logprob_error=0.15,
        tokens_checked=10,
        checkpoint=manifest.weights_sha256,
        manifest=spool.checkpoints.manifest_identity(run, step),
        **refused,
    )
    spool.served.put(run, served)
