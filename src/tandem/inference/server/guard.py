"""The admin guard: ASGI middleware that vLLM loads by `--middleware tandem.inference.server.guard.AdminGuard`.

vLLM (0.26 to 0.33) checks its API key only on `/v1`, `/v2`, `/inference` and `/cohere`, and every sampling client has
that key. Routes that change what vLLM serves (`/v1/load_lora_adapter`, `/pause`, `/update_weights`, ...) need the admin
token here. The guard has an allow-list, so that a route that a new vLLM version adds is closed until somebody adds it.
Standard library only: this code runs in vLLM's process.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

from tandem.vllm_client.names import ADMIN_HEADER

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PUBLIC_PATHS = frozenset({
    "/health", "/ping", "/version", "/metrics", "/metrics/",
    "/v1/models", "/v1/chat/completions", "/v1/completions", "/inference/v1/generate",
})  # fmt: skip
"""Paths that the guard lets through: liveness, metrics, and routes on which vLLM checks the API key itself."""

ROLLOUT_PATHS = frozenset({
    "/rollout/v1/models", "/rollout/v1/chat/completions", "/rollout/v1/completions", "/rollout/inference/v1/generate",
})  # fmt: skip
"""Paths of the rollout door (`rollout.py`), which is inside the guard and reads requests before vLLM does."""

ADMIN = "tandem.admin"
"""The scope's key that says that a request had the admin token."""

API_KEY_PATHS = frozenset({"/tokenize", "/detokenize"}) | ROLLOUT_PATHS
"""Paths on which vLLM does not check the API key, or not soon enough. The guard does, if one is configured."""


def route_path(scope: Scope) -> str:
    """The path that Starlette's router matches: `path` without the `root_path` that the app is mounted under."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :]
    return path


class AdminGuard:
    """Requires the admin token on every path that is not listed above. Without a configured token those are closed.

    The token comes from `TANDEM_ADMIN_TOKEN` or from the file that `TANDEM_ADMIN_TOKEN_FILE` names, the API key from
    `VLLM_API_KEY`. An unreadable token file raises OSError and so stops the start of vLLM.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self._admin_digest = _digest(_read_secret("TANDEM_ADMIN_TOKEN"))
        self._api_key_digest = _digest(os.environ.get("VLLM_API_KEY", ""))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ADMIN] = self._is_admin(scope)
        if scope["type"] == "lifespan" or (scope["type"] in ("http", "websocket") and self._allows(scope)):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            # ASGI refuses a handshake by a close before the accept. The server answers 403.
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "admin token required"})
        elif scope["type"] == "http":
            await self._refuse(scope, send)
        # The guard drops every other type of scope, because it can't judge it.

    def _allows(self, scope: Scope) -> bool:
        path = route_path(scope)
        if path in PUBLIC_PATHS and scope["type"] == "http":
            return True
        headers: Iterable[tuple[bytes, bytes]] = scope.get("headers", ())
        if path in API_KEY_PATHS and scope["type"] == "http":
            if self._api_key_digest is None:
                return True
            scheme, _, key = _single_header(headers, "authorization").partition(b" ")
            if scheme.lower() == b"bearer" and _matches(key.strip(), self._api_key_digest):
                return True
        return bool(scope[ADMIN])

    def _is_admin(self, scope: Scope) -> bool:
        given = _single_header(scope.get("headers", ()), ADMIN_HEADER)
        return self._admin_digest is not None and _matches(given, self._admin_digest)

    async def _refuse(self, scope: Scope, send: Send) -> None:
        if route_path(scope) in API_KEY_PATHS:
            message = "send the API key in the header Authorization: Bearer <key>"
        elif self._admin_digest is None:
            message = "the admin routes are closed, because no admin token is set: set TANDEM_ADMIN_TOKEN for vLLM"
        else:
            message = f"{route_path(scope)} is not a public route: send the admin token in the header {ADMIN_HEADER}"
        await answer_json(send, 401, error_body("unauthorized", message), head=scope["method"] == "HEAD")


def error_body(kind: str, message: str, field: str | None = None) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message, "field": field}}


async def read_body(receive: Receive) -> bytes | None:
    """A request's body; None where the client is gone."""
    body: bytes = b""
    while (message := await receive())["type"] != "http.disconnect":
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body
    return None


async def send_json(send: Send, start: MutableMapping[str, Any], content: Any) -> None:
    """Answer with another body than the one that `start` was made for."""
    body = json.dumps(content).encode()
    headers = [(key, value) for key, value in start["headers"] if key.lower() != b"content-length"]
    await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body})


async def answer_json(
    send: Send, status: int, content: dict[str, Any], headers: Iterable[tuple[bytes, bytes]] = (), *, head: bool = False
) -> None:
    """Answer a request. `head`: without the body, as HEAD wants it."""
    body = json.dumps(content).encode()
    own = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": b"" if head else body})


def _read_secret(name: str) -> str:
    value = os.environ.get(name, "").strip()
    file = os.environ.get(f"{name}_FILE", "").strip()
    return value or (Path(file).read_text().strip() if file else "")


def _digest(secret: str) -> bytes | None:
    """SHA-256 of a secret, None for an empty one. A comparison of digests also hides the secret's length."""
    return hashlib.sha256(secret.encode()).digest() if secret else None


def _matches(given: bytes, digest: bytes) -> bool:
    return hmac.compare_digest(hashlib.sha256(given).digest(), digest)


def _single_header(headers: Iterable[tuple[bytes, bytes]], name: str) -> bytes:
    """The value of a header that occurs exactly once, else empty: with two values it is unclear which one counts."""
    values = [value for key, value in headers if key.lower() == name.encode()]
    return values[0] if len(values) == 1 else b""
