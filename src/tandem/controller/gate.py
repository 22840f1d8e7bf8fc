"""What every request passes before the API sees it: the key, the host, the size. Pure ASGI, so streams stay streams."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Sequence

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.controller.refusals import body_of
from tandem.errors import InvalidInput, RequestTooLarge, TandemError, Unauthorized

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json", "/docs"})
SMALL_BODY = 2**20
_TRAIN = re.compile(r"^/v1/runs/[^/]+/train$")


def is_loopback(host: str) -> bool:
    """Whether `host` reaches this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Gate:
    """ASGI middleware.

    With keys, everything but `OPEN_PATHS` needs `Authorization: Bearer <key>`. Without keys, the Host header must name
    the loopback interface: a web page that rebinds its DNS name to 127.0.0.1 is then refused.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], max_bytes: int) -> None:
        self.app = app
        self.digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name: value for name, value in scope["headers"] if name in (b"authorization", b"host")}
        limit = self.max_bytes if _TRAIN.match(scope["path"]) else min(SMALL_BODY, self.max_bytes)
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        started = False

        async def counted_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS:
                self._admit(headers)
            if not length.isdigit() or int(length) > limit:
                raise _too_large(limit)
            await self.app(scope, _counted(receive, limit), counted_send)
        except TandemError as error:
            if started:
                raise
            challenge = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else None
            # The rest of the body stays unread, so this connection can't carry another request.
            refusal = JSONResponse(body_of(error), error.http_status, {"Connection": "close", **(challenge or {})})
            await refusal(scope, receive, send)

    def _admit(self, headers: dict[bytes, bytes]) -> None:
        if not self.digests:
            host = headers.get(b"host", b"").decode("latin-1")
            if not is_loopback(re.sub(r":\d+$", "", host)):
                raise InvalidInput(
                    f"a controller without API keys answers to localhost only, not to {host!r}; set TANDEM_API_KEY",
                    field="Host",
                )
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # Every key is compared, in constant time: how long it takes says nothing about which one nearly fits.
        fits = sum(hmac.compare_digest(digest, known) for known in self.digests)
        if scheme.lower() != b"bearer" or not fits:
            what = "is not one of this controller's keys" if key else "is missing"
            raise Unauthorized(f"the bearer key {what}; set TANDEM_API_KEY to a key of this deployment",
                               field="Authorization")  # fmt: skip


def _counted(receive: Receive, limit: int) -> Receive:
    """`receive` that stops a body without Content-Length, or with a false one, at `limit` bytes."""
    seen = 0

    async def limited() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise _too_large(limit)
        return message

    return limited


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"the body is larger than {limit} bytes; train on fewer trajectories per job or raise TANDEM_MAX_REQUEST_BYTES",
        field="body",
    )
