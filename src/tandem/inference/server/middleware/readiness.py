"""ASGI middleware inside the guard, for one of several vLLM servers behind one address. The
middleware decides whether this vLLM answers requests.

The publisher permits this vLLM to answer requests for a few seconds at a time
(`inference.publisher.replica`). Without permission, requests are answered with status 503. The
permission expires if the publisher does not renew it. A vLLM that has just started has no
permission. `GET /tandem/ready` answers with status 503 a little before the permission ends, so that
the proxy stops sending requests in time.
"""

import json
import secrets
import time

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.inference.server.middleware.asgi import error, read_body, route_path
from tandem.inference.server.middleware.guard import ADMIN
from tandem.vllm_client.names import PROBE_PATHS, READY_MARGIN_SECONDS, READY_ROUTE

OPEN = PROBE_PATHS | {"/v1/models"}
"""Paths that are answered without permission: probes, metrics, and the list of models."""


class Readiness:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        # Each vLLM process has its own id, so a permission for an earlier process does not apply.
        self.instance = secrets.token_hex(8)
        # the end of the permission, on the monotonic clock that the publisher on this machine
        # shares
        self.until = 0.0

    def answers(self, margin: float = 0.0) -> bool:
        return time.monotonic() < self.until - margin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif route_path(scope) == READY_ROUTE:
            await (await self._answer(scope, receive))(scope, receive, send)
        elif self.answers() or scope.get(ADMIN) or route_path(scope) in OPEN:
            await self.app(scope, receive, send)
        else:
            await self._refusal()(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> JSONResponse:
        if scope["method"] == "POST" and scope.get(ADMIN):
            order = json.loads(await read_body(scope, receive) or b"{}")
            if order.get("instance") not in (None, self.instance):
                return error(409, "conflict", "this vLLM has started again since")
            self.until = float(order["until"])
        elif scope["method"] not in ("GET", "HEAD"):
            return error(401, "unauthorized", "the admin token says whether vLLM is ready")
        ready = self.answers(READY_MARGIN_SECONDS)
        if not ready and not scope.get(ADMIN):
            return self._refusal()
        return JSONResponse({"ready": ready, "instance": self.instance})

    def _refusal(self) -> JSONResponse:
        problem = "this inference server does not have every announced step; another one has"
        return error(503, "inference_unavailable", problem, headers={"retry-after": "1"})
