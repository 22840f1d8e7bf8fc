"""How large a request's body may be."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.controller.http_errors import refuse
from tandem.errors import RequestTooLarge

SMALL_BODY_BYTES = 2**20
_TRAIN_PATH = re.compile(r"^/v1/runs/[^/]+/train$")


class BodyLimit:
    """ASGI middleware: training requests may have `max_bytes`, all others 1 MiB."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = self.max_bytes if _TRAIN_PATH.match(scope["path"]) else min(SMALL_BODY_BYTES, self.max_bytes)
        declared = Headers(scope=scope).get("content-length", "0")
        if not declared.isdigit() or int(declared) > limit:
            await refuse(_too_large(limit))(scope, receive, send)
            return
        received = 0

        async def receive_limited() -> Message:
            # The body may be longer than its Content-Length, or have none.
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _too_large(limit)
            return message

        await self.app(scope, receive_limited, send)


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"the body is larger than {limit} bytes; train on fewer trajectories per job or raise TANDEM_MAX_REQUEST_BYTES",
        field="body",
    )
