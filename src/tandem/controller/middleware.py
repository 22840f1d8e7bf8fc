"""The layers that a request passes before its route, in this order: `CountRequests`,
`Authentication`, `BodyLimit`. The layers are pure ASGI, so that streamed answers are not collected
in memory.
"""

import re
import time
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.controller.http_errors import refuse
from tandem.controller.tinker.errors import bearer, is_tinker
from tandem.errors import InvalidInput, RequestTooLarge, TandemError, Unauthorized
from tandem.metrics.controller import METHODS
from tandem.metrics.metric import Samples
from tandem.system.api_keys import asking, digests, name_of
from tandem.system.loopback import foreign_header

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
SMALL_BODY_BYTES = 2**20
OTHER_ROUTE = "other"  # the label of unknown paths and of requests refused before routing
_LARGE_BODIES = re.compile(
    r"^/v1/(runs/[^/]+/train|data/render|files)$|^/api/v1/(forward_backward|asample|telemetry)$"
)


class CountRequests:
    """ASGI middleware that counts requests, and measures the duration of requests that are not
    event streams.

    A request is counted under the template of its route, so that ids and other parts of a path
    never become labels.
    """

    def __init__(self, app: ASGIApp, counts: Samples) -> None:
        self.app = app
        self.counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin = time.perf_counter()
        status, is_stream = 0, False

        async def send_noted(message: Message) -> None:
            nonlocal status, is_stream
            if message["type"] == "http.response.start":
                status = message["status"]
                is_stream = (b"content-type", b"text/event-stream; charset=utf-8") in message[
                    "headers"
                ]
            await send(message)

        try:
            await self.app(scope, receive, send_noted)
        except Exception:
            status = status or 500
            raise
        finally:
            route = getattr(scope.get("route"), "path", OTHER_ROUTE)
            method = scope["method"] if scope["method"] in METHODS else "other"
            labels = {"route": route, "method": method, "status_class": f"{status // 100}xx"}
            if status:
                self.counts.inc("tandem_http_requests_total", **labels)
            if status and not is_stream:
                seconds = time.perf_counter() - begin
                self.counts.observe("tandem_http_request_duration_seconds", seconds, route=route)


class Authentication:
    """ASGI middleware that checks keys. If keys are set, requests to all paths except `OPEN_PATHS`
    need a key in the header `Authorization`, in the form `Bearer <key>`. If no key is set, the Host
    header must name the loopback interface. The check of the Host header refuses requests from a
    web page that rebinds its DNS name to 127.0.0.1. The context variable `asking` contains the name
    of the request's key.
    """

    def __init__(self, app: ASGIApp, keys: Mapping[str, str]) -> None:
        self.app = app
        self.digests = digests(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                self._check_key(scope) if self.digests else _check_host(scope)
            except TandemError as error:
                await refuse(error, scope["path"])(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check_key(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        given = headers.get("authorization", "")
        if not given and is_tinker(scope["path"]):
            given = bearer(headers.get("x-api-key", ""))
        if (name := name_of(given, self.digests)) is None:
            problem = "is not one of this controller's keys" if " " in given else "is missing"
            message = f"the bearer key {problem}; set TANDEM_API_KEY to a key of this deployment"
            raise Unauthorized(message, field="Authorization")
        asking.set(name)


def _check_host(scope: Scope) -> None:
    """Refuses requests that come from a page of another site, in a browser on this machine."""
    headers = Headers(scope=scope)
    host, origin = headers.get("host", ""), headers.get("origin")
    match foreign_header(host, origin):
        case "Host":
            message = (
                f"a controller without API keys answers to localhost only, not to {host!r}; set"
                " TANDEM_API_KEY"
            )
            raise InvalidInput(message, field="Host")
        case "Origin":
            message = f"a controller without API keys answers no page of {(origin or '')[:100]!r}"
            raise InvalidInput(message, field="Origin")


class BodyLimit:
    """ASGI middleware that limits the size of bodies. The limit is `max_bytes` for requests with
    examples and for files of examples, and 1 MiB for all other bodies."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = (
            self.max_bytes
            if _LARGE_BODIES.match(scope["path"])
            else min(SMALL_BODY_BYTES, self.max_bytes)
        )
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isdigit() or int(declared) > limit:
            await refuse(_too_large(limit), scope["path"])(scope, receive, send)
            return
        received = 0

        async def receive_limited() -> Message:
            # The body may be longer than its Content-Length says, or have no Content-Length.
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _too_large(limit)
            return message

        await self.app(scope, receive_limited, send)


def _too_large(limit: int) -> RequestTooLarge:
    remedy = "send fewer trajectories or examples at once, or raise TANDEM_MAX_REQUEST_BYTES"
    return RequestTooLarge(f"the body is larger than {limit} bytes; {remedy}", field="body")
