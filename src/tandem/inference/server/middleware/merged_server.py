"""ASGI middleware in vLLM's API server, inside the guard. The middleware serves the merged weights
of one run as the model `<run>@<step>`.

The publisher swaps weights, verifies the weights and announces them. New requests wait from the
swap to the announcement, so no client samples from unverified weights. Running requests continue,
and their answers name the weights that sampled each token (`weight_versions.py`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.errors import InvalidInput
from tandem.inference.server import patches
from tandem.inference.server.middleware.asgi import error, read_body, route_path
from tandem.inference.server.middleware.guard import ADMIN
from tandem.inference.server.middleware.orders import read_order
from tandem.inference.server.middleware.weight_versions import (
    InFlight,
    VersionedAnswer,
    current_request,
)
from tandem.vllm_client.names import BASE_MODEL_NAME, MERGED_ROUTE, MergedPhase

SAMPLING = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/inference/v1/generate",
    }
)
HOLD_SECONDS = 60.0
"""Seconds that a new request waits for the announcement of new weights. After this time, the answer
has status 503."""
GRACE_SECONDS = 10.0
"""Seconds after an order's deadline for which the server still waits for the engine's result."""
_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.01, 0.1
_CHECK_SECONDS = 1.0  # seconds between two checks that the engine is alive, while a call waits


@dataclass(frozen=True)
class Version:
    """One version of the weights. `path`: the adapter's path, or a name for the content of whole
    weights; `scale`: the adapter's scale. `transport` tells how the weights came to vLLM (`Way` in
    `config.py`). `again` is a source of `server/worker/landing.py`, from which vLLM can get the
    same weights again."""

    name: str
    path: str
    scale: float = 0.0
    transport: str = "merge"
    again: dict[str, Any] | None = None


class SwapFailed(Exception):
    """An order of the publisher was not carried out. `status` is the status of the HTTP answer; the
    status is 503 if the same order can succeed later."""

    def __init__(self, message: str, status: int = 503) -> None:
        super().__init__(message)
        self.status = status


class Torn(SwapFailed):
    """The workers may have different versions of the weights."""


class MergedServer:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.phase: MergedPhase = "empty"
        self.current = Version(BASE_MODEL_NAME, BASE_MODEL_NAME)
        self.verified = self.current
        self._changed = asyncio.Condition()
        self._swap = asyncio.Lock()
        self._in_flight: set[InFlight] = set()
        self._state: Any = None  # `app.state` of vLLM's API server
        self._engine: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) if scope["type"] == "http" else ""
        if path == MERGED_ROUTE or path.startswith(f"{MERGED_ROUTE}/"):
            self._follow(scope["app"].state)
            await self._administrate(scope, path.removeprefix(MERGED_ROUTE), receive, send)
        elif path in SAMPLING and not scope.get(ADMIN):
            self._follow(scope["app"].state)
            await self._sample(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _follow(self, state: Any) -> None:
        """Makes vLLM mark a request as `in_engine` when it passes the request to the engine. The
        request is the value of the context variable `current_request`."""
        if self._state is state:
            return
        self._state, self._engine = state, state.engine_client

        def note() -> None:
            if (request := current_request.get(None)) is not None:
                request.in_engine = True

        patches.note_added_requests(self._engine, note)

    async def _sample(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._until(
            lambda: self.phase not in ("swapping", "unverified"), time.monotonic() + HOLD_SECONDS
        )
        if self.phase != "served":
            reasons = {
                "empty": "no checkpoint is served yet",
                "torn": "the last swap of weights failed",
            }
            reason = reasons.get(
                self.phase, f"the weights were not verified within {HOLD_SECONDS:.0f} s"
            )
            if self._engine.errored:
                reason = "vLLM's engine has died"
            problem = f"{reason}; try again later"
            answer = error(503, "inference_unavailable", problem, headers={"retry-after": "5"})
            await answer(scope, receive, send)
            return
        scope = {**scope}
        headers = MutableHeaders(scope=scope)
        request = InFlight(self._request_id(headers), self.current.name, asyncio.current_task())
        current_request.set(request)
        headers["x-request-id"] = request.id
        self._in_flight.add(request)
        try:
            await self.app(scope, receive, VersionedAnswer(send, request).send)
        finally:
            self._in_flight.discard(request)
            async with self._changed:
                self._changed.notify_all()

    def _request_id(self, headers: Headers) -> str:
        """The client's own request id, or a new id if the client sent none or if a running request
        has the same id."""
        given = headers.get("x-request-id", "")
        if given and all(other.id != given for other in self._in_flight):
            return given
        return f"{given}-{uuid4().hex}" if given else uuid4().hex

    async def _until(self, check: Callable[[], bool], deadline: float) -> bool:
        """Wait until `check()` is true. Returns False if the engine dies or the deadline (monotonic
        clock) passes before that."""
        async with self._changed:
            while (
                not check()
                and not self._engine.errored
                and (left := deadline - time.monotonic()) > 0
            ):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(left, _CHECK_SECONDS))
        return check()

    async def _administrate(self, scope: Scope, action: str, receive: Receive, send: Send) -> None:
        if (body := await read_body(scope, receive)) is None:
            return
        actions: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "/swap": self._swap_to,
            "/announce": self._announce,
            "/revert": self._revert,
            "/rows": self._rows,
        }
        try:
            if action == "" and scope["method"] == "GET":
                result: dict[str, Any] = {}
            elif action in actions and scope["method"] == "POST":
                result = await actions[action](read_order(action, body))
            else:
                raise SwapFailed(f"there is no route {scope['method']} {MERGED_ROUTE}{action}", 404)
        except SwapFailed as failure:
            await error(failure.status, "inference_refused", str(failure))(scope, receive, send)
            return
        except InvalidInput as wrong:
            await error(400, wrong.code, str(wrong), wrong.field)(scope, receive, send)
            return
        current = self.current
        state = {
            "phase": self.phase,
            "name": current.name,
            "path": current.path,
            "transport": current.transport,
        }
        await JSONResponse({**state, "in_flight": len(self._in_flight), **result})(
            scope, receive, send
        )

    async def _rows(self, order: dict[str, Any]) -> dict[str, Any]:
        answers = await self._call("rows", time.monotonic() + 60, order["rows"])
        return {"rows": [row for answer in answers for row in answer["result"]]}

    async def _announce(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["path"] != self.current.path or self.phase not in ("unverified", "served"):
            raise SwapFailed(f"the current weights are {self.current.name} ({self.phase})", 409)
        self.verified = self.current
        await self._set("served")
        return {}

    async def _revert(self, order: dict[str, Any]) -> dict[str, Any]:
        """Restores the last announced weights, because the publisher refuses the current weights.
        `to_base`: the run of the weights was deleted, so the base model's weights are restored, and
        no run is served."""
        async with self._swap:
            if order["path"] != self.current.path or (
                self.phase == "served" and not order.get("to_base")
            ):
                return {}
            if order.get("to_base"):
                self.verified = Version(BASE_MODEL_NAME, BASE_MODEL_NAME)
            deadline = time.monotonic() + HOLD_SECONDS
            await self._stage(self.verified, self.verified.again, deadline)
            seconds = await self._write(self.verified, "keep", deadline)
            await self._set("empty" if self.current.path == BASE_MODEL_NAME else "served")
        return seconds

    async def _swap_to(self, order: dict[str, Any]) -> dict[str, Any]:
        """Bring the new weights to the workers, then swap. The old weights stay in use until all
        new weights have arrived."""
        version = Version(order["name"], order["path"], order["scale"], again=order["again"])
        begin = time.monotonic()
        deadline = begin + order["seconds"]
        async with self._swap:
            transport = await self._stage(version, order["source"], deadline)
            staged = time.monotonic()
            seconds = await self._write(
                replace(version, transport=transport), order["requests"], deadline
            )
            await self._set("unverified")
        return {"stage_seconds": staged - begin, **seconds}

    async def _stage(self, version: Version, source: dict[str, Any] | None, deadline: float) -> str:
        """Bring the weights to the workers. Returns the `Way` by which the weights came to the
        workers."""
        await self._call("stage", deadline, version.path, version.scale, source)
        pause = _POLL_SECONDS
        while not all(
            ways := [a["result"] for a in await self._call("staged", deadline, version.path)]
        ):
            await asyncio.sleep(pause)
            # Each call of the workers delays the engine's next step.
            pause = min(1.2 * pause, _LONGEST_POLL_SECONDS)
        return str(ways[0])

    async def _write(self, version: Version, requests: str, deadline: float) -> dict[str, Any]:
        """Swap the weights between two engine steps. If the swap fails, the old weights stay in
        use. If the old weights can't be restored, the phase is `torn`."""
        before: MergedPhase = self.phase
        await self._set("swapping")
        begin = time.monotonic()
        try:
            if requests == "wait" and not await self._until(lambda: not self._in_flight, deadline):
                raise SwapFailed(f"{len(self._in_flight)} requests still run; the old weights stay")
            swapped = time.monotonic()
            outcome = await self._order_swap(version, deadline)
        except Torn:
            await self._set("torn")
            for request in self._in_flight:
                if request.task is not None:
                    request.task.cancel()
            raise
        except BaseException:
            await self._set(before)
            raise
        self._rename(version)
        self.current = version
        return {"drain_seconds": swapped - begin, "swap_seconds": outcome["seconds"]}

    async def _order_swap(self, version: Version, deadline: float) -> dict[str, Any]:
        """Makes the engine swap the weights. The engine starts no swap after the deadline. If no
        answer has come GRACE_SECONDS after the deadline, the engine is considered hung, and the
        weights count as torn."""
        in_engine = {request: request.in_engine for request in self._in_flight}
        arguments = (version.path, version.name, deadline)

        # Tokens that were sampled after the swap reach clients only after `tell` has run.
        def tell(answers: list[dict[str, Any]]) -> None:
            if "tokens" in answers[0] and version.path != self.current.path:
                for request in self._in_flight:
                    request.swapped(
                        version.name, answers[0]["tokens"], in_engine=in_engine.get(request, False)
                    )

        try:
            [outcome] = await self._call("swap", deadline + GRACE_SECONDS, *arguments, tell=tell)
        except SwapFailed as failure:
            raise failure if failure.status != 503 else Torn(str(failure)) from failure
        if "torn" in outcome:
            raise Torn(outcome["torn"])
        if "late" in outcome:
            raise SwapFailed(
                "the engine was busy until the deadline, or sleeps; the old weights stay"
            )
        return dict(outcome)

    async def _call(
        self,
        method: str,
        deadline: float,
        *args: Any,
        tell: Callable[[list[dict[str, Any]]], None] | None = None,
    ) -> list[dict[str, Any]]:
        """The answer of each worker or, for `swap`, of the engine (`server/worker/extension.py`).
        Raises SwapFailed with status 422 if an answer is an error, and with status 503 if no answer
        came in time. `tell` is called with the answers as soon as they arrive."""

        async def ask() -> list[dict[str, Any]]:
            answers: list[dict[str, Any]] = await self._engine.collective_rpc(
                "tandem_call", args=(method, *args)
            )
            if tell is not None:
                tell(answers)
            return answers

        call = asyncio.ensure_future(ask())
        while not call.done():
            left = deadline - time.monotonic()
            if self._engine.errored or left <= 0:
                call.cancel()
                raise SwapFailed(
                    f"{method}:"
                    f" {'no answer from vLLM in time' if left <= 0 else 'the engine has died'}"
                )
            await asyncio.wait([call], timeout=min(left, _CHECK_SECONDS))
        if (failure := call.exception()) is not None:
            raise SwapFailed(
                f"{method} failed in vLLM: {type(failure).__name__}: {failure}"
            ) from failure
        answers: list[dict[str, Any]] = call.result()
        if problem := next((answer["error"] for answer in answers if "error" in answer), ""):
            raise SwapFailed(f"{method} failed in vLLM: {problem}", 422)
        return answers

    async def _set(self, phase: MergedPhase) -> None:
        async with self._changed:
            self.phase = phase
            self._changed.notify_all()

    def _rename(self, version: Version) -> None:
        """Makes vLLM accept the names `<run>@<step>` and `<run>` for the weights."""
        paths = self._state.openai_serving_models.registry.base_model_paths
        kind = type(paths[0])
        names = (version.name, version.name.rpartition("@")[0])
        paths[:] = [kind(name=name, model_path=version.path) for name in names if name]
