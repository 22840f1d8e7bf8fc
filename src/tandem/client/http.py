"""HTTP for both clients: the controller's address, key, paths and errors, the I/O, and repeated
requests."""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from tandem import __version__, errors
from tandem.controller.schemas import CheckpointInfo, ErrorBody, JobStatus, RunStatus
from tandem.errors import Conflict, InvalidInput, JobFailed, TandemError, Unreachable
from tandem.spool.schema import Event
from tandem.system.api_keys import split_name

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0
# HTTP statuses of a controller or proxy that can't answer now, but may answer soon.
_RETRIED_STATUSES = frozenset({429, 502, 503, 504})
_CLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, TandemError)
]
# A base class precedes its subclasses in `tandem.errors`. If several classes have the same code,
# the base class is raised.
_KINDS = {kind.code: kind for kind in reversed(_CLASSES)}


def connection(
    base_url: str | None, api_key: str | None, given_by: str = "base_url"
) -> dict[str, Any]:
    """Arguments for httpx's clients. Raises InvalidInput if the key's file can't be read, the key
    is not printable ASCII, or the address is not a URL.

    Args:
        base_url: the controller's or vLLM's address; None: TANDEM_URL, else http://127.0.0.1:8080.
        api_key: the key, or several keys separated by commas or white space: the first key is sent.
            None: TANDEM_API_KEY, else the file that TANDEM_API_KEY_FILE names, else no key.
        given_by: the name of the setting that gave `base_url`, for errors.
    """
    url = base_url or os.environ.get("TANDEM_URL") or "http://127.0.0.1:8080"
    given_by = given_by if base_url else "TANDEM_URL"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InvalidInput(f"{url!r} is not a URL: {error}", field=given_by) from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidInput(f"{url!r} is not a URL such as http://127.0.0.1:8080", field=given_by)
    key = api_key or os.environ.get("TANDEM_API_KEY")
    if not key and (file := os.environ.get("TANDEM_API_KEY_FILE")):
        try:
            text = Path(file).read_text(encoding="utf-8-sig")
            key = " ".join(split_name(entry)[1] for entry in text.replace(",", " ").split())
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(
                f"can't read {file}: {error}", field="TANDEM_API_KEY_FILE"
            ) from error
    # A controller accepts several keys, so the variable may hold several keys. A client sends the
    # first key.
    keys = (key or "").replace(",", " ").split()
    if keys and not (keys[0].isascii() and keys[0].isprintable()):
        raise InvalidInput(
            "the API key has other characters than printable ASCII", field="TANDEM_API_KEY"
        )
    headers = {"User-Agent": f"tandem/{__version__}"} | (
        {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    )
    timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
    # Each waiting call and each stream holds a connection.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    return {"base_url": url.rstrip("/"), "headers": headers, "timeout": timeout, "limits": limits}


def path(*parts: str) -> str:
    """`path("runs", run, "train")` is /v1/runs/<run>/train."""
    return "/".join(["/v1", *(quote(part, safe="") for part in parts)])


def _unreachable(error: httpx.TransportError) -> Unreachable:
    return Unreachable(
        f"the controller did not answer ({type(error).__name__}: {error}); check that it runs and"
        " that TANDEM_URL is its address"
    )


def error_of(response: httpx.Response) -> TandemError:
    """The exception that the controller raised, made from a response. The response's body must
    have been read. The exception is `retriable` if another attempt may succeed."""
    retriable = response.status_code in _RETRIED_STATUSES
    try:
        detail = ErrorBody.model_validate_json(response.content, extra="ignore").error
    except ValidationError:  # the body may be a proxy's HTML page
        kind = Unreachable if retriable else TandemError
        return kind(f"HTTP {response.status_code} from {response.url}: {response.text[:500]}")
    error = _KINDS.get(detail.type, TandemError)(detail.message, field=detail.field)
    error.code, error.retriable = detail.type, retriable
    return error


def raise_if_failed(job: JobStatus) -> None:
    """Raises JobFailed if the job ended without success. The error's message has the reason and the
    end of the job's log."""
    if job.state == "succeeded":
        return
    reason = job.error.type if job.error else job.state
    message = f"job {job.id} {job.state} in attempt {job.attempt}: {reason}"
    if job.error:
        message += f": {job.error.message}"
        if job.error.log_tail:
            message += f"\n--- end of its log ---\n{job.error.log_tail.rstrip()}"
    raise JobFailed(message, job_id=job.id, reason=reason)


def raise_if_other(run: RunStatus, wanted: Mapping[str, Any], field: str) -> None:
    """Raises Conflict if an existing run differs from the given `trainable` and `lora`.

    Args:
        wanted: the settings that the user gave. Only `trainable` and `lora` are compared. A setting
            that the user did not give matches every run.
        field: the `field` of the exception.
    """
    existing, lora = run.spec.lora, wanted.get("lora") or {}
    other = lora.items() - (existing.model_dump() if existing else {}).items()
    if other or wanted.get("trainable", run.spec.trainable) != run.spec.trainable:
        shape = f"a LoRA of {existing}" if existing else "all weights"
        problem = f"run {run.spec.name!r} exists and trains {shape}"
        raise Conflict(f"{problem}; name another run, or leave the shape out", field=field)


def discarded(job: str, base: int, checkpoints: Iterable[CheckpointInfo]) -> bool:
    """Whether a rollback removed the step that the job made.

    Args:
        job: the job's id.
        base: the step that the job started from.
        checkpoints: the run's present chain.
    """
    # A checkpoint whose job's record is damaged has no job id (None).
    made, step = {info.step: info.job for info in checkpoints}, base + 1
    return made[step] not in (job, None) if step in made else max(made) < step


class Backoff:
    """Pauses between attempts, each twice as long as the one before. Random jitter keeps several
    clients from retrying at the same moment.

    Args:
        patience: seconds for which failing attempts are repeated, counted from the first failure
            after a success. The duration of the first failing attempt does not count towards
            `patience`.
        first: the first pause in seconds, without jitter.
        longest: the longest pause in seconds, without jitter.
    """

    def __init__(
        self, patience: float, first: float = _FIRST_PAUSE, longest: float = _LONGEST_PAUSE
    ) -> None:
        self.patience, self._first, self._longest = patience, first, longest
        self.reset()

    def reset(self) -> None:
        """Start again with the shortest pause, because the controller answered."""
        self._pause = self._first
        self._until: float | None = None

    def next(self, error: Exception) -> float:
        """Seconds to wait before the next attempt; raises `error` after `patience` seconds."""
        pause = self._pause * random.uniform(0.75, 1.25)
        self._pause = min(2 * self._pause, self._longest)
        now = time.monotonic()
        if self._until is None:
            self._until = now + self.patience
        if now + pause > self._until:
            raise error
        return pause


class AsyncHttp:
    """I/O that suspends the coroutine. `arguments` are the arguments of `httpx.Client.request`. The
    methods raise httpx's errors."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def request(self, **arguments: Any) -> httpx.Response:
        return await self._client.request(**arguments)

    @asynccontextmanager
    async def stream(self, url: str, **arguments: Any) -> AsyncIterator[AsyncIterator[bytes]]:
        """The parts of the response's body; raises `error_of` for a response without success."""
        async with self._client.stream("GET", url, **arguments) as response:
            if not response.is_success:
                await response.aread()
                raise error_of(response)
            yield response.aiter_bytes()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def offload[T](self, work: Callable[[], T]) -> T:
        """The result of slow work, done in a thread."""
        return await asyncio.to_thread(work)


class BlockingHttp:
    """The same I/O as `AsyncHttp`, except that each call blocks the thread. A coroutine that awaits
    only calls of `BlockingHttp` is never suspended."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    async def request(self, **arguments: Any) -> httpx.Response:
        return self._client.request(**arguments)

    @asynccontextmanager
    async def stream(self, url: str, **arguments: Any) -> AsyncIterator[AsyncIterator[bytes]]:
        with self._client.stream("GET", url, **arguments) as response:
            if not response.is_success:
                response.read()
                raise error_of(response)
            yield _as_async(response.iter_bytes())

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def offload[T](self, work: Callable[[], T]) -> T:
        return work()


async def _as_async[T](items: Iterator[T]) -> AsyncIterator[T]:
    for item in items:
        yield item


async def whole_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The bytes of `chunks`, cut at newlines, so that each part consists of whole lines. The
    newline at the end of a part is left out. Bytes after the last newline are dropped."""
    rest = b""
    async for chunk in chunks:
        whole, _, rest = (rest + chunk).rpartition(b"\n")
        yield whole


def events_of(content: bytes) -> list[Event]:
    """The events in complete lines of Server-Sent Events. Only `data:` lines are parsed, because
    they contain everything that the other lines contain.

    The lines are split as bytes. An event's text may contain U+2028 and similar characters, which
    str.splitlines and httpx treat as line ends.
    """
    lines = (line for line in content.split(b"\n") if line.startswith(b"data:"))
    return [event for line in lines if (event := _event(line.removeprefix(b"data:"))) is not None]


def _event(line: bytes) -> Event | None:
    """The event in a line; None if the event has an unknown type, which a newer controller may
    send."""
    try:
        return Event.model_validate_json(line, extra="ignore")
    except ValidationError as error:
        if [(reason["loc"], reason["type"]) for reason in error.errors()] == [
            (("type",), "literal_error")
        ]:
            return None
        raise _not_understood(line) from error


def parsed[T](kind: TypeAdapter[T], content: bytes) -> T:
    """An answer of the controller as a pydantic model. Unknown fields are ignored, because a newer
    controller may send them. Raises TandemError if the answer does not fit the model."""
    try:
        return kind.validate_json(content, extra="ignore")
    except ValidationError as error:
        raise _not_understood(content) from error


def _not_understood(content: bytes) -> TandemError:
    problem = (
        f"version {__version__} does not understand this answer; check TANDEM_URL, and the"
        " controller's version"
    )
    return TandemError(f"{problem}: {content[:200].decode(errors='replace')}")


class Requests:
    def __init__(self, http: AsyncHttp | BlockingHttp, patience: float) -> None:
        self._http = http
        self._patience = patience

    async def _call[T](self, kind: type[T], method: str, *parts: str, **options: Any) -> T:
        """The response of `_request`, parsed as an object of the type `kind`."""
        response = await self._request(method, *parts, **options)
        return parsed(TypeAdapter(kind), response.content)

    async def _request(
        self,
        method: str,
        *parts: str,
        params: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        idempotent: bool = True,
        seconds: float = ANSWER_SECONDS,
    ) -> httpx.Response:
        """Send a request to /v1/<parts>. Until the controller answers, the request is repeated for
        up to `patience` seconds. Values in `params` and `body` that are None are left out.

        A request that is not idempotent is repeated only if it cannot have reached the controller.
        Raises the controller's error, or Unreachable.
        """
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        arguments: dict[str, Any] = {"method": method, "url": path(*parts), "timeout": timeout}
        arguments["params"] = _given(params or {})
        if body is not None:
            # NaN is sent as NaN, so that the controller's error names the field that contains NaN.
            arguments |= {"content": to_json(_given(body), inf_nan_mode="constants")}
            arguments |= {"headers": {"Content-Type": "application/json"}}
        backoff = Backoff(self._patience)
        while True:
            try:
                response = await self._http.request(**arguments)
                if response.is_success:
                    return response
                error, again = error_of(response), idempotent
            except httpx.TransportError as failure:
                error = _unreachable(failure)
                again = idempotent or isinstance(failure, httpx.ConnectError | httpx.ConnectTimeout)
            if not (again and error.retriable):
                raise error
            await self._http.sleep(backoff.next(error))

    @asynccontextmanager
    async def _stream(self, *parts: str, **arguments: Any) -> AsyncIterator[AsyncIterator[bytes]]:
        """The body of a GET of /v1/<parts>, in chunks. Raises the controller's error, or
        Unreachable if the connection breaks, even in the middle of the body."""
        try:
            async with self._http.stream(path(*parts), **arguments) as chunks:
                yield chunks
        except httpx.TransportError as failure:
            raise _unreachable(failure) from failure


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
