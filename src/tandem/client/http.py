"""HTTP for both clients: the controller's address and key, its paths, pauses between attempts, and the I/O."""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from tandem import __version__
from tandem.client.errors import stream_error
from tandem.errors import TandemError

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0


def connection(base_url: str | None, api_key: str | None) -> dict[str, Any]:
    """Arguments for httpx's clients: URL and key as given, else TANDEM_URL, TANDEM_API_KEY, TANDEM_API_KEY_FILE."""
    url = base_url or os.environ.get("TANDEM_URL") or "http://127.0.0.1:8080"
    key = api_key or os.environ.get("TANDEM_API_KEY")
    if not key and (file := os.environ.get("TANDEM_API_KEY_FILE")):
        key = Path(file).read_text()
    # A controller accepts several keys, so the variable may hold several; a client sends the first.
    keys = (key or "").replace(",", " ").split()
    headers = {"User-Agent": f"tandem/{__version__}"} | ({"Authorization": f"Bearer {keys[0]}"} if keys else {})
    timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
    return {"base_url": url.rstrip("/"), "headers": headers, "timeout": timeout}


def path(*parts: str) -> str:
    """`path("runs", run, "train")` is /v1/runs/<run>/train."""
    return "/".join(["/v1", *(quote(part, safe="") for part in parts)])


class Backoff:
    """Pauses between attempts: doubling from 0.25 to 5 s, with jitter so that clients don't retry in step.

    They end `patience` seconds after the last success.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.reset()

    def reset(self) -> None:
        """Start again, because the controller answered."""
        self._pause = _FIRST_PAUSE
        self._until = time.monotonic() + self.patience

    def next(self, error: TandemError) -> float:
        """Seconds to wait before the next attempt; raises `error` when patience is exhausted."""
        pause = self._pause * random.uniform(0.75, 1.25)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        if time.monotonic() + pause > self._until:
            raise error
        return pause


class AsyncHttp:
    """I/O that suspends the coroutine. `arguments` are those of `httpx.Client.request`; so are the errors raised."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def request(self, **arguments: Any) -> httpx.Response:
        return await self._client.request(**arguments)

    @asynccontextmanager
    async def stream(self, **arguments: Any) -> AsyncIterator[AsyncIterator[bytes]]:
        """The parts of the response's body; raises `stream_error` of a response without success."""
        async with self._client.stream(**arguments) as response:
            if not response.is_success:
                await response.aread()
                raise stream_error(response)
            yield response.aiter_bytes()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def offload[T](self, work: Callable[[], T]) -> T:
        """The result of work that takes long, done in a thread."""
        return await asyncio.to_thread(work)


class BlockingHttp:
    """`AsyncHttp` that blocks the thread instead: coroutines that do their I/O by it are never suspended."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    async def request(self, **arguments: Any) -> httpx.Response:
        return self._client.request(**arguments)

    @asynccontextmanager
    async def stream(self, **arguments: Any) -> AsyncIterator[AsyncIterator[bytes]]:
        with self._client.stream(**arguments) as response:
            if not response.is_success:
                response.read()
                raise stream_error(response)
            yield _as_async(response.iter_bytes())

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def offload[T](self, work: Callable[[], T]) -> T:
        return work()


async def _as_async[T](items: Iterator[T]) -> AsyncIterator[T]:
    for item in items:
        yield item
