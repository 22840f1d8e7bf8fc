"""Serves one run's merged weights as `<run>@<step>`: ASGI middleware in vLLM's API server, inside the guard.

The publisher swaps weights, verifies them and announces them. From the swap to the announcement new requests wait, so
nobody samples from weights that were not verified. Requests that run go on; their answers say which tokens came from
which weights. Standard library only.
"""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from tandem.inference.server.guard import ADMIN, App, Receive, Scope, Send, route_path
from tandem.vllm_client.names import BASE_MODEL_NAME, MERGED_ROUTE

SAMPLING = frozenset({"/v1/chat/completions", "/v1/completions"})
HOLD_SECONDS = 60.0
"""How long a new request waits for weights to be announced. After that the answer is 503."""
_POLL_SECONDS = 0.01
_ENGINE_ID = re.compile(r"(?:(?P<sample>\d+)_)?(?:chat)?cmpl-(?P<id>.+?)(?:-(?P<prompt>\d+))?(?:-[0-9a-f]{8})?")

Phase = Literal["empty", "swapping", "unverified", "served", "torn"]


@dataclass
class Version:
    """Merged weights: the served name, and the path of the adapter, which names its content."""

    name: str
    path: str


@dataclass(eq=False)
class InFlight:
    """A sampling request and the swaps that it saw: (name before, name after, tokens of each engine request)."""

    id: str
    task: asyncio.Task[Any] | None
    swaps: list[tuple[str, str, dict[str, int]]] = field(default_factory=list)


class SwapFailed(Exception):
    """The swap did not happen. `status`: that of the HTTP answer."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


class MergedServer:
    def __init__(self, app: App) -> None:
        self.app = app
        self.phase: Phase = "empty"
        self.current = Version(BASE_MODEL_NAME, BASE_MODEL_NAME)
        self.verified = self.current
        self._changed = asyncio.Condition()
        self._swap = asyncio.Lock()
        self._in_flight: set[InFlight] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) if scope["type"] == "http" else ""
        if path == MERGED_ROUTE or path.startswith(f"{MERGED_ROUTE}/"):
            await self._administrate(scope, path.removeprefix(MERGED_ROUTE), receive, send)
        elif path in SAMPLING and not scope.get(ADMIN):
            await self._sample(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _sample(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not await self._wait_until_served():
            reasons = {"empty": "no checkpoint is served yet", "torn": "the last swap of weights failed"}
            reason = reasons.get(self.phase, f"the weights were not verified within {HOLD_SECONDS:.0f} s")
            await _answer(send, 503, _error("inference_unavailable", f"{reason}; try again later"), retry_after=5)
            return
        request_id = _single(scope, b"x-request-id") or uuid4().hex
        request = InFlight(request_id, asyncio.current_task())
        headers = [(key, value) for key, value in scope["headers"] if key.lower() != b"x-request-id"]
        self._in_flight.add(request)
        try:
            told = _Versions(send, request, self)
            await self.app({**scope, "headers": [*headers, (b"x-request-id", request_id.encode())]}, receive, told.send)
        finally:
            self._in_flight.discard(request)
            async with self._changed:
                self._changed.notify_all()

    async def _wait_until_served(self) -> bool:
        deadline = time.monotonic() + HOLD_SECONDS
        async with self._changed:
            while self.phase in ("swapping", "unverified") and time.monotonic() < deadline:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
        return self.phase == "served"

    async def _administrate(self, scope: Scope, action: str, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        order = json.loads(body or b"{}")
        actions: dict[str, Callable[[Any, dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "/swap": self._swap_to, "/announce": self._announce, "/revert": self._revert, "/rows": self._rows,
        }  # fmt: skip
        try:
            if action == "" and scope["method"] == "GET":
                result: dict[str, Any] = {}
            elif action in actions and scope["method"] == "POST":
                result = await actions[action](scope["app"].state, order)
            else:
                raise SwapFailed(f"there is no route {scope['method']} {MERGED_ROUTE}{action}", 404)
        except SwapFailed as error:
            await _answer(send, error.status, _error("inference_refused", str(error)))
            return
        state = {"phase": self.phase, "name": self.current.name, "path": self.current.path}
        await _answer(send, 200, {**state, "in_flight": len(self._in_flight), **result})

    async def _rows(self, state: Any, order: dict[str, Any]) -> dict[str, Any]:
        answers = await state.engine_client.collective_rpc("tandem_rows", 60, args=(order["rows"],))
        return {"rows": [row for rows in answers for row in rows]}

    async def _announce(self, _: Any, order: dict[str, Any]) -> dict[str, Any]:
        """The publisher has verified the current weights: new requests go on."""
        if order["path"] != self.current.path or self.phase not in ("unverified", "served"):
            raise SwapFailed(f"the current weights are {self.current.name} ({self.phase})", 409)
        self.verified = self.current
        await self._set(self.current, "served")
        return {}

    async def _revert(self, state: Any, order: dict[str, Any]) -> dict[str, Any]:
        """The publisher refuses the current weights: those before them are served again. `to_base`: their run was
        deleted, and nothing is served."""
        if order.get("to_base"):
            self.verified = Version(BASE_MODEL_NAME, BASE_MODEL_NAME)
        if self.current == self.verified:
            return {}
        async with self._swap:
            before = self.verified
            told = await self._write(state, before, "keep", time.monotonic() + HOLD_SECONDS)
            await self._set(before, "empty" if before.path == BASE_MODEL_NAME else "served")
        return told

    async def _swap_to(self, state: Any, order: dict[str, Any]) -> dict[str, Any]:
        """Stage the adapter at `path`, then swap. The old weights stay in use until all of it is on the devices."""
        version, engine = Version(order["name"], order["path"]), state.engine_client
        begin = time.monotonic()
        deadline = begin + order["seconds"]
        async with self._swap:
            await self._call(engine, "tandem_stage", deadline, version.path, version.path, order["scale"])
            while not all(
                answer["ready"] for answer in await self._call(engine, "tandem_staged", deadline, version.path)
            ):
                await asyncio.sleep(_POLL_SECONDS)
            staged = time.monotonic()
            told = await self._write(state, version, order["requests"], deadline)
            await self._set(version, "unverified")
            await self._call(engine, "tandem_discard", deadline + 10, [self.verified.path, version.path])
        return {"stage_seconds": staged - begin, **told}

    async def _write(self, state: Any, version: Version, requests: str, deadline: float) -> dict[str, Any]:
        """Swap between two steps. If that fails the old weights are in use, or the phase is `torn`."""
        before = self.current, self.phase
        await self._set(self.current, "swapping")
        begin = time.monotonic()
        try:
            if requests == "wait":
                await self._drain(deadline)
            swapped = time.monotonic()
            arguments = (version.path, requests, version.name)
            *workers, engine = await self._call(state.engine_client, "tandem_swap", deadline, *arguments)
        except SwapFailed as error:
            await self._set(before[0], before[1] if error.status == 409 else await self._repair(state, before))
            raise
        for request in self._in_flight:
            request.swaps.append((before[0].name, version.name, engine["running"]))
        self._rename(state, version)
        self.current = version
        return {"drain_seconds": swapped - begin, "swap_seconds": max(worker["seconds"] for worker in workers)}

    async def _repair(self, state: Any, before: tuple[Version, Phase]) -> Phase:
        """After a failed swap: all workers back to the old weights, or nobody gets an answer from torn ones."""
        try:
            await self._call(
                state.engine_client, "tandem_swap", time.monotonic() + 30, before[0].path, "keep", before[0].name
            )
        except SwapFailed:
            for request in self._in_flight:
                if request.task is not None:
                    request.task.cancel()
            return "torn"
        return before[1]

    async def _drain(self, deadline: float) -> None:
        async with self._changed:
            while self._in_flight:
                try:
                    await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    raise SwapFailed(f"{len(self._in_flight)} requests still run; the old weights stay", 409) from None

    async def _call(self, engine: Any, method: str, deadline: float, *args: Any) -> list[Any]:
        left = deadline - time.monotonic()
        if left <= 0:
            raise SwapFailed(f"no time was left for {method}", 409 if method.startswith("tandem_stage") else 500)
        try:
            answers = await asyncio.wait_for(engine.collective_rpc(method, left, args=args), left)
        except Exception as error:
            message = f"{method} failed in vLLM: {type(error).__name__}: {error}"
            raise SwapFailed(message, 409 if method.startswith("tandem_stage") else 500) from error
        return list(answers)

    async def _set(self, version: Version, phase: Phase) -> None:
        async with self._changed:
            self.current, self.phase = version, phase
            self._changed.notify_all()

    def _rename(self, state: Any, version: Version) -> None:
        """vLLM knows the weights as `<run>@<step>` and as `<run>`."""
        paths = state.openai_serving_models.registry.base_model_paths
        kind = type(paths[0])
        names = [version.name, version.name.rpartition("@")[0]] if "@" in version.name else [version.name]
        paths[:] = [kind(name=name, model_path=version.path) for name in names]


class _Versions:
    """Adds to a response which weights it came from: the header `x-tandem-weights`, and, if a swap happened during the
    request, the field `weight_versions` with the first token of each."""

    def __init__(self, send: Send, request: InFlight, server: MergedServer) -> None:
        self._send, self._request, self._server = send, request, server
        self._start: dict[str, Any] | None = None
        self._body = b""
        self._stream = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            swaps = self._request.swaps
            names = [swaps[0][0], *(after for _, after, _ in swaps)] if swaps else [self._server.current.name]
            headers = [*message.get("headers", ()), (b"x-tandem-weights", ",".join(names).encode())]
            self._stream = any(key.lower() == b"content-type" and b"event-stream" in value for key, value in headers)
            self._start = {**message, "headers": headers}
            if not swaps or self._stream or message["status"] != 200:
                await self._send(self._start)
                self._start = None
            return
        if self._start is not None:
            await self._add_to_json(message)
            return
        if self._stream and self._request.swaps and b"data: [DONE]" in message.get("body", b""):
            event = {"object": "tandem.weight_versions", "choices": [], "weight_versions": _spans(self._request)}
            told = b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]"
            message = {**message, "body": message["body"].replace(b"data: [DONE]", told)}
        await self._send(message)

    async def _add_to_json(self, message: Any) -> None:
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        answer = json.loads(self._body) | {"weight_versions": _spans(self._request)}
        body = json.dumps(answer).encode()
        assert self._start is not None
        headers = [(key, value) for key, value in self._start["headers"] if key.lower() != b"content-length"]
        await self._send({**self._start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})


def _spans(request: InFlight) -> list[dict[str, Any]]:
    """For each sequence of a request: `spans` of [name, first token] in order."""
    found: dict[tuple[int, int], list[list[Any]]] = {}
    for before, after, tokens in request.swaps:
        for engine_id, count in tokens.items():
            match = _ENGINE_ID.fullmatch(engine_id)
            if match is not None and match["id"] == request.id:
                key = int(match["prompt"] or 0), int(match["sample"] or 0)
                found.setdefault(key, [[before, 0]]).append([after, count])
    return [{"prompt": prompt, "sample": sample, "spans": spans} for (prompt, sample), spans in sorted(found.items())]


async def _answer(send: Send, status: int, body: dict[str, Any], retry_after: int | None = None) -> None:
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    if retry_after is not None:
        headers.append((b"retry-after", str(retry_after).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message, "field": None}}


def _single(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name), "")
