"""What both clients share below the API: addresses and keys, errors, retries. No I/O here.

An exchange is a generator: it yields a `Call` (the driver answers with the response, or with the transport's exception)
or a number (the driver sleeps that many seconds), and returns the result. The two clients are drivers.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from tandem import __version__
from tandem.controller.schemas import ErrorBody
from tandem.errors import TandemError, Unreachable

DEFAULT_URL = "http://127.0.0.1:8080"
CONNECT_SECONDS = 5.0
_RETRIED = frozenset({429, 502, 503, 504})
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0


@dataclass(frozen=True)
class Call[T]:
    """One request, and how to read its answer."""

    method: str
    path: str
    answer: Callable[[httpx.Response], T]
    params: Mapping[str, Any] = field(default_factory=dict)
    body: bytes | None = None
    # Whether sending it twice is the same as sending it once. If not, it is sent again only if it can't have arrived.
    idempotent: bool = True
    seconds: float = 60.0  # how long the answer may take

    def request(self) -> dict[str, Any]:
        """Arguments for httpx's `request`."""
        return {
            "method": self.method,
            "url": self.path,
            "params": self.params,
            "content": self.body,
            "headers": {} if self.body is None else {"Content-Type": "application/json"},
            "timeout": httpx.Timeout(self.seconds, connect=CONNECT_SECONDS),
        }


Reply = httpx.Response | httpx.TransportError | None
type Steps[T] = Generator[Call[Any] | float, Reply, T]


def connection(base_url: str | None, api_key: str | None) -> dict[str, Any]:
    """Arguments for httpx's clients: from the arguments, else TANDEM_URL, TANDEM_API_KEY, TANDEM_API_KEY_FILE."""
    url = base_url or os.environ.get("TANDEM_URL") or DEFAULT_URL
    key = api_key or os.environ.get("TANDEM_API_KEY")
    if not key and (file := os.environ.get("TANDEM_API_KEY_FILE")):
        key = Path(file).read_text()
    # The controller takes several keys; a client's own is the first.
    keys = (key or "").replace(",", " ").split()
    headers = {"User-Agent": f"tandem/{__version__}"} | ({"Authorization": f"Bearer {keys[0]}"} if keys else {})
    return {"base_url": url.rstrip("/"), "headers": headers, "timeout": httpx.Timeout(60.0, connect=CONNECT_SECONDS)}


def send[T](call: Call[T], patience: float) -> Steps[T]:
    """Send until it is answered, for up to `patience` seconds; pauses grow from 0.25 to 5 s.

    Raises the TandemError that the controller answered, or Unreachable.
    """
    pauses = Pauses(patience)
    while True:
        reply = yield call
        error: TandemError
        if isinstance(reply, httpx.Response):
            if reply.is_success:
                return call.answer(reply)
            error = error_of(reply)
            again = reply.status_code in _RETRIED and call.idempotent
        else:
            error = unreachable(reply)
            again = call.idempotent or isinstance(reply, httpx.ConnectError | httpx.ConnectTimeout)
        pause = pauses.next() if again else None
        if pause is None:
            raise error
        yield pause


class Pauses:
    """Pauses between attempts, in seconds: doubling, with jitter so that clients don't come in step, until `patience`
    seconds have gone without success."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.reset()

    def reset(self) -> None:
        """It worked: start anew."""
        self._pause = _FIRST_PAUSE
        self._until = time.monotonic() + self.patience

    def next(self) -> float | None:
        """The next pause; None when patience is at its end."""
        pause = self._pause * random.uniform(0.75, 1.25)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return pause if time.monotonic() + pause <= self._until else None


def unreachable(error: Exception | None) -> Unreachable:
    """The error for a controller that did not answer."""
    return Unreachable(
        f"the controller did not answer: {type(error).__name__}: {error}; is it running, and does TANDEM_URL name it?"
    )


def error_of(response: httpx.Response) -> TandemError:
    """The controller's refusal as the class it was raised as there; its body must have been read."""
    try:
        detail = ErrorBody.model_validate_json(response.content).error
    except ValidationError:  # not the controller's own: a proxy's page
        return TandemError(f"HTTP {response.status_code} from {response.url}: {response.text[:500]}")
    kind = _classes().get(detail.type)
    if kind is not None:
        return kind(detail.message, field=detail.field)
    error = TandemError(detail.message, field=detail.field)
    error.code = detail.type
    return error


def refusal(response: httpx.Response) -> TandemError | httpx.TransportError:
    """Why a stream did not open: a transport's error where trying again may help."""
    if response.status_code in _RETRIED:
        return httpx.RemoteProtocolError(f"HTTP {response.status_code}: {response.text[:200]}")
    return error_of(response)


def _classes() -> dict[str, type[TandemError]]:
    found: dict[str, type[TandemError]] = {}
    waiting = [TandemError]
    while waiting:
        kind = waiting.pop()
        found[kind.code] = kind
        waiting += kind.__subclasses__()
    return found
