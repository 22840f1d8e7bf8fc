"""The two clients: `AsyncTandem` has the coroutines of `tandem.client.api`; `Tandem` runs these
coroutines over blocking I/O."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from functools import wraps
from typing import Any, Concatenate, Self

import httpx

from tandem.client.api import JOB_SECONDS, Api
from tandem.client.http import AsyncHttp, BlockingHttp, connection
from tandem.spool.schema import Event


class AsyncTandem(Api):
    """The client with coroutines, for one event loop; the arguments are those of `Tandem`."""

    def __init__(
        self, base_url: str | None = None, api_key: str | None = None, *, patience: float = 30.0
    ) -> None:
        self._client = httpx.AsyncClient(**connection(base_url, api_key))
        super().__init__(AsyncHttp(self._client), patience)

    @property
    def url(self) -> str:
        """The controller's address."""
        return str(self._client.base_url)

    async def close(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _run[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine over `BlockingHttp`. The first `send` runs the coroutine to its
    end, because nothing suspends it."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("the coroutine was suspended")


def _iterate[T](items: AsyncGenerator[T, None]) -> Iterator[T]:
    try:
        while True:
            try:
                item = _run(anext(items))
            except StopAsyncIteration:
                return
            yield item
    finally:
        _run(items.aclose())


def _blocking[**P, T](
    method: Callable[Concatenate[Api, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Tandem", P], T]:
    """The blocking form of a method: the same arguments, and the coroutine's result."""

    @wraps(method)
    def call(self: "Tandem", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _run(method(self._api, *args, **kwargs))

    return call


class Tandem:
    """A client of a controller; several threads may use one client.

    A refusal of the controller is raised as a class of `tandem.errors`, with the offending
    `field`. Raises Unreachable when the controller has not answered for `patience` seconds.

    Args:
        base_url: the controller's address; None: TANDEM_URL, else http://127.0.0.1:8080.
        api_key: the key; None: TANDEM_API_KEY, else the file that TANDEM_API_KEY_FILE names.
        patience: seconds for which a request is repeated while the controller doesn't answer.
    """

    def __init__(
        self, base_url: str | None = None, api_key: str | None = None, *, patience: float = 30.0
    ) -> None:
        self._client = httpx.Client(**connection(base_url, api_key))
        self._api = Api(BlockingHttp(self._client), patience)

    @property
    def url(self) -> str:
        """The controller's address."""
        return str(self._client.base_url)

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    create_run = _blocking(Api.create_run)
    render = _blocking(Api.render)
    get_run = _blocking(Api.get_run)
    list_runs = _blocking(Api.list_runs)
    fork = _blocking(Api.fork)
    rollback = _blocking(Api.rollback)
    delete_run = _blocking(Api.delete_run)
    delete_checkpoint = _blocking(Api.delete_checkpoint)
    pin = _blocking(Api.pin)
    unpin = _blocking(Api.unpin)
    wait_served = _blocking(Api.wait_served)

    train_rl = _blocking(Api.train_rl)
    train_sft = _blocking(Api.train_sft)
    train_dpo = _blocking(Api.train_dpo)
    train = _blocking(Api.train)

    get_job = _blocking(Api.get_job)
    list_jobs = _blocking(Api.list_jobs)
    cancel = _blocking(Api.cancel)
    wait_job = _blocking(Api.wait_job)
    job_events = _blocking(Api.job_events)
    memory = _blocking(Api.memory)
    logs = _blocking(Api.logs)
    log_part = _blocking(Api.log_part)

    def events(self, job: str, after: int = -1, timeout: float = JOB_SECONDS) -> Iterator[Event]:
        """A job's events as they happen, up to the terminal event.

        Args:
            after: only events with a higher `seq` are returned; -1: all events.
            timeout: seconds after which TimeoutError is raised.
        """
        return _iterate(self._api.events(job, after, timeout))

    checkpoints = _blocking(Api.checkpoints)
    checkpoint = _blocking(Api.checkpoint)
    download = _blocking(Api.download)
