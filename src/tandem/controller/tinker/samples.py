"""Samples in progress, in memory only. A restarted controller does not know the earlier samples.
The controller answers that the request no longer exists, and the client sends the request again."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from tandem.errors import InvalidInput, TandemError

MOST = 20_000
# Seconds for which a result is kept after a client has fetched it. The result is kept because a
# client whose connection broke asks for the result again.
TAKEN_SECONDS = 60.0
# Seconds for which the controller keeps a result that no client has asked for.
LEFT_SECONDS = 900.0
_SWEEP_SECONDS = 10.0


class TooManySamples(TandemError, code="too_many_samples", http_status=429):
    """Raised if clients ask for more samples than the controller keeps at the same time. Clients
    send the same request again later."""


@dataclass(eq=False)
class _Sampling:
    session: str
    digest: bytes  # of the request
    task: asyncio.Task[bytes]
    # The monotonic time, in seconds, after which the sample is forgotten. The value is None until a
    # client has fetched the result. A sample for which a client waits is never forgotten.
    forget: float | None = None
    waiting: int = 0
    touched: float = field(default_factory=time.monotonic)


class SampleFutures:
    """The samples in progress, for one event loop."""

    def __init__(self) -> None:
        self._samples: dict[str, _Sampling] = {}
        self._swept = 0.0

    def start(
        self,
        request_id: str,
        session: str,
        digest: bytes,
        sample: Callable[[], Coroutine[None, None, bytes]],
    ) -> None:
        """Begins the sample, unless the same request has already begun it. Raises InvalidInput if a
        different request has this number. Raises TooManySamples if too many samples are kept.

        Args:
            session: the session whose end cancels the sample.
            digest: a hash of the request, which identifies a repeated request.
            sample: an async function that samples, and returns the body of the answer.
        """
        self._sweep()
        if (known := self._samples.get(request_id)) is not None:
            if known.digest != digest:
                problem = "another request of this sampler has this number"
                raise InvalidInput(f"{problem}; give each one its own", field="seq_id")
            return
        if len(self._samples) >= MOST:
            raise TooManySamples(f"{MOST} samples are on their way; send it again later")
        task = asyncio.create_task(sample(), name=request_id)
        # `wait` reports the task's error; without this callback, Python would warn if no client
        # asks for the result.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._samples[request_id] = _Sampling(session, digest, task)

    async def wait(self, request_id: str, seconds: float) -> asyncio.Task[bytes] | None:
        """Returns the task once the task has ended; None if the task still runs after `seconds`.
        Raises KeyError if the request is unknown."""
        found = self._samples[request_id]
        found.waiting += 1
        try:
            await asyncio.wait({found.task}, timeout=seconds)
        finally:
            found.waiting -= 1
            found.touched = time.monotonic()
        if not found.task.done():
            return None
        found.forget = found.touched + TAKEN_SECONDS
        return found.task

    def cancel(self, request_id: str) -> None:
        if (found := self._samples.pop(request_id, None)) is not None:
            found.task.cancel()

    def cancel_session(self, session: str) -> None:
        for request_id in [i for i, one in self._samples.items() if one.session == session]:
            self.cancel(request_id)

    def _sweep(self) -> None:
        now = time.monotonic()
        if now - self._swept < _SWEEP_SECONDS:
            return
        self._swept = now
        for request_id, one in list(self._samples.items()):
            forget = one.forget or one.touched + LEFT_SECONDS
            if not one.waiting and now > forget:
                self.cancel(request_id)
