"""Serves one run's merged weights as `<run>@<step>`: ASGI middleware in vLLM's API server, inside the guard.

The publisher swaps weights, verifies them and announces them. From the swap to the announcement new requests wait, so
nobody samples from weights that were not verified. Requests that run go on; their answers say which tokens came from
which weights (`weight_versions.py`). Standard library only.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from tandem.inference.server import guard
from tandem.inference.server.guard import ADMIN, App, Receive, Scope, Send, answer_json, error_body, route_path
from tandem.inference.server.weight_versions import InFlight, VersionedAnswer, current_request
from tandem.vllm_client.names import BASE_MODEL_NAME, MERGED_ROUTE, MergedPhase

SAMPLING = frozenset({"/v1/chat/completions", "/v1/completions", "/inference/v1/generate"})
HOLD_SECONDS = 60.0
"""How long a new request waits for weights to be announced. After that the answer is 503."""
GRACE_SECONDS = 10.0
"""How long the server waits beyond an order's deadline for the engine to say what came of it."""
_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.01, 0.1
_CHECK_SECONDS = 1.0  # how often whoever waits looks whether the engine is alive


@dataclass(frozen=True)
class Version:
    """Weights: the served name; the path of the adapter, or what names the content of whole weights; the adapter's
    scale; how the weights came, and where they may be got again (`worker/landing.py`)."""

    name: str
    path: str
    scale: float = 0.0
    transport: str = "merge"
    source: dict[str, Any] | None = field(default=None, compare=False)


class SwapFailed(Exception):
    """The order was not carried out. `status`: of the HTTP answer; 503 where the same order can succeed later."""

    def __init__(self, message: str, status: int = 503) -> None:
        super().__init__(message)
        self.status = status


class Torn(SwapFailed):
    """The workers may have different weights."""


class MergedServer:
    def __init__(self, app: App) -> None:
        self.app = app
        self.phase: MergedPhase = "empty"
        self.current = Version(BASE_MODEL_NAME, BASE_MODEL_NAME)
        self.verified = self.current
        self._changed = asyncio.Condition()
        self._swap = asyncio.Lock()
        self._in_flight: set[InFlight] = set()
        self._engine: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) if scope["type"] == "http" else ""
        if path == MERGED_ROUTE or path.startswith(f"{MERGED_ROUTE}/"):
            self._follow(scope["app"].state.engine_client)
            await self._administrate(scope, path.removeprefix(MERGED_ROUTE), receive, send)
        elif path in SAMPLING and not scope.get(ADMIN):
            self._follow(scope["app"].state.engine_client)
            await self._sample(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _follow(self, engine: Any) -> None:
        """Note of each request when vLLM gives it to the engine."""
        if self._engine is engine:
            return
        self._engine, generate = engine, engine.generate

        def note_and_generate(*args: Any, **kwargs: Any) -> Any:
            if (request := current_request.get(None)) is not None:
                request.in_engine = True
            return generate(*args, **kwargs)

        engine.generate = note_and_generate

    async def _sample(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not await self._wait_until_served():
            reasons = {"empty": "no checkpoint is served yet", "torn": "the last swap of weights failed"}
            reason = reasons.get(self.phase, f"the weights were not verified within {HOLD_SECONDS:.0f} s")
            if self._engine.errored:
                reason = "vLLM's engine has died"
            error = error_body("inference_unavailable", f"{reason}; try again later")
            await answer_json(send, 503, error, [(b"retry-after", b"5")])
            return
        request = InFlight(self._request_id(scope), self.current.name, asyncio.current_task())
        current_request.set(request)
        headers = [(key, value) for key, value in scope["headers"] if key.lower() != b"x-request-id"]
        headers.append((b"x-request-id", request.id.encode("latin-1")))
        self._in_flight.add(request)
        try:
            await self.app({**scope, "headers": headers}, receive, VersionedAnswer(send, request).send)
        finally:
            self._in_flight.discard(request)
            async with self._changed:
                self._changed.notify_all()

    def _request_id(self, scope: Scope) -> str:
        """The client's own, unless a request with the same one runs."""
        header = next((value for key, value in scope["headers"] if key.lower() == b"x-request-id"), b"")
        given: str = header.decode("latin-1")
        if given and all(other.id != given for other in self._in_flight):
            return given
        return f"{given}-{uuid4().hex}" if given else uuid4().hex

    async def _wait_until_served(self) -> bool:
        deadline = time.monotonic() + HOLD_SECONDS
        while self.phase in ("swapping", "unverified") and not self._engine.errored:
            if not await self._wait_for_change(deadline):
                break
        return self.phase == "served"

    async def _wait_for_change(self, deadline: float) -> bool:
        """Wait for a change or `_CHECK_SECONDS`, whichever is shorter. False where the deadline has passed."""
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        async with self._changed:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left, _CHECK_SECONDS))
        return True

    async def _administrate(self, scope: Scope, action: str, receive: Receive, send: Send) -> None:
        if (body := await guard.read_body(receive)) is None:
            return
        actions: dict[str, Callable[[Any, dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "/swap": self._swap_to, "/announce": self._announce, "/revert": self._revert, "/rows": self._rows,
        }  # fmt: skip
        try:
            if action == "" and scope["method"] == "GET":
                result: dict[str, Any] = {}
            elif action in actions and scope["method"] == "POST":
                result = await actions[action](scope["app"].state, json.loads(body))
            else:
                raise SwapFailed(f"there is no route {scope['method']} {MERGED_ROUTE}{action}", 404)
        except SwapFailed as error:
            await answer_json(send, error.status, error_body("inference_refused", str(error)))
            return
        current = self.current
        state = {"phase": self.phase, "name": current.name, "path": current.path, "transport": current.transport}
        await answer_json(send, 200, {**state, "in_flight": len(self._in_flight), **result})

    async def _rows(self, _: Any, order: dict[str, Any]) -> dict[str, Any]:
        answers = await self._call("tandem_rows", time.monotonic() + 60, order["rows"])
        return {"rows": [row for answer in answers for row in answer["rows"]]}

    async def _announce(self, _: Any, order: dict[str, Any]) -> dict[str, Any]:
        """The publisher has verified the current weights: new requests go on."""
        if order["path"] != self.current.path or self.phase not in ("unverified", "served"):
            raise SwapFailed(f"the current weights are {self.current.name} ({self.phase})", 409)
        self.verified = self.current
        await self._set("served")
        return {}

    async def _revert(self, state: Any, order: dict[str, Any]) -> dict[str, Any]:
        """The publisher refuses the weights of `path`: those that were announced last are served again. `to_base`:
        their run was deleted, so the base model's weights come back, and nothing is served."""
        async with self._swap:
            if order["path"] != self.current.path or (self.phase == "served" and not order.get("to_base")):
                return {}
            if order.get("to_base"):
                self.verified = Version(BASE_MODEL_NAME, BASE_MODEL_NAME)
            deadline = time.monotonic() + HOLD_SECONDS
            await self._stage(self.verified, [self.verified.source], deadline)
            seconds = await self._write(state, self.verified, "keep", deadline)
            await self._set("empty" if self.current.path == BASE_MODEL_NAME else "served")
        return seconds

    async def _swap_to(self, state: Any, order: dict[str, Any]) -> dict[str, Any]:
        """Stage the weights, then swap. The old ones stay in use until all of the new ones are here."""
        sources = order.get("sources") or [None]
        version = Version(order["name"], order["path"], order["scale"], source=sources[-1])
        begin = time.monotonic()
        deadline = begin + order["seconds"]
        async with self._swap:
            try:
                transport, failed = await self._stage(version, sources, deadline)
                version = replace(version, transport=transport)
                staged = time.monotonic()
                seconds = await self._write(state, version, order["requests"], deadline)
                await self._set("unverified")
            finally:
                # Its failure costs memory until the next swap, no more.
                with suppress(SwapFailed):
                    keep = [self.verified.path, self.current.path]
                    await self._call("tandem_discard", time.monotonic() + GRACE_SECONDS, keep)
        return {"stage_seconds": staged - begin, "failed": failed, **seconds}

    async def _stage(
        self, version: Version, sources: Sequence[dict[str, Any] | None], deadline: float
    ) -> tuple[str, list[str]]:
        """Bring the weights to the workers from the first source that has them; None: merged from the adapter. Returns
        how they came, and why each source before failed."""
        failed: list[str] = []
        for number, source in enumerate(sources, 1):
            try:
                await self._call("tandem_stage", deadline, version.path, version.path, version.scale, source)
                pause = _POLL_SECONDS
                while not all(ways := [w["way"] for w in await self._call("tandem_staged", deadline, version.path)]):
                    await asyncio.sleep(pause)
                    pause = min(1.2 * pause, _LONGEST_POLL_SECONDS)  # each call comes between two steps of the engine
            except SwapFailed as error:
                if number == len(sources) or error.status == 503:
                    raise
                failed.append(str(error))
            else:
                return ways[0], failed
        raise AssertionError("there is a source")

    async def _write(self, state: Any, version: Version, requests: str, deadline: float) -> dict[str, Any]:
        """Swap between two steps. If that fails the old weights are in use, or the phase is `torn`."""
        before: MergedPhase = self.phase
        await self._set("swapping")
        begin = time.monotonic()
        try:
            if requests == "wait":
                await self._drain(deadline)
            swapped = time.monotonic()
            outcome = await self._order_swap(version, requests, deadline)
        except Torn:
            await self._set("torn")
            for request in self._in_flight:
                if request.task is not None:
                    request.task.cancel()
            raise
        except BaseException:
            await self._set(before)
            raise
        self._rename(state, version)
        self.current = version
        return {"drain_seconds": swapped - begin, "swap_seconds": outcome["seconds"]}

    async def _order_swap(self, version: Version, requests: str, deadline: float) -> dict[str, Any]:
        """The engine begins no swap after the deadline, so a missing answer means that it hangs."""
        in_engine = {request: request.in_engine for request in self._in_flight}
        arguments = (version.path, requests, version.name, deadline)
        try:
            [outcome] = await self._call("tandem_swap", deadline + GRACE_SECONDS, *arguments)
        except SwapFailed as error:
            raise error if error.status != 503 else Torn(str(error)) from error
        if "torn" in outcome:
            raise Torn(outcome["torn"])
        if "late" in outcome:
            raise SwapFailed("the engine was busy until the deadline; the old weights stay")
        if version != self.current:
            for request in self._in_flight:
                request.swapped(version.name, outcome["tokens"], in_engine=in_engine.get(request, False))
        return dict(outcome)

    async def _drain(self, deadline: float) -> None:
        while self._in_flight:
            if self._engine.errored or not await self._wait_for_change(deadline):
                raise SwapFailed(f"{len(self._in_flight)} requests still run; the old weights stay")

    async def _call(self, method: str, deadline: float, *args: Any) -> list[Any]:
        """The answer of each worker. SwapFailed: 503 where none came in time, 422 where a worker told an error."""
        call = asyncio.ensure_future(self._engine.collective_rpc(method, args=args))
        while not call.done():
            left = deadline - time.monotonic()
            if self._engine.errored or left <= 0:
                call.cancel()
                raise SwapFailed(
                    f"{method}: " + ("no answer from vLLM in time" if left <= 0 else "the engine has died")
                )
            await asyncio.wait([call], timeout=min(left, _CHECK_SECONDS))
        if (error := call.exception()) is not None:
            raise SwapFailed(f"{method} failed in vLLM: {type(error).__name__}: {error}") from error
        answers = list(call.result())
        if problem := next((answer["error"] for answer in answers if answer and "error" in answer), ""):
            raise SwapFailed(f"{method} failed in vLLM: {problem}", 422)
        return answers

    async def _set(self, phase: MergedPhase) -> None:
        async with self._changed:
            self.phase = phase
            self._changed.notify_all()

    def _rename(self, state: Any, version: Version) -> None:
        """vLLM knows the weights as `<run>@<step>` and as `<run>`."""
        paths = state.openai_serving_models.registry.base_model_paths
        kind = type(paths[0])
        names = [version.name, version.name.rpartition("@")[0]] if "@" in version.name else [version.name]
        paths[:] = [kind(name=name, model_path=version.path) for name in names]
