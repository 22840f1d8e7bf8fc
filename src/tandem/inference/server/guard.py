"""The admin guard: an ASGI middleware that vLLM loads with `--middleware tandem.inference.server.guard.AdminGuard`.

vLLM's own API key covers only what starts with `/v1`, `/v2`, `/inference` and `/cohere`, and it is the samplers' key;
the routes that change what is served (`/v1/load_lora_adapter`, `/pause`, `/update_weights`, ...) need
the admin token instead. The rule is an allow-list, so that a route that a new vLLM version adds is closed until
somebody has looked at it. Needs nothing but the standard library, because it runs inside vLLM's process.
"""

from __future__ import annotations

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

PUBLIC = frozenset({
    "/health", "/ping", "/version", "/metrics", "/metrics/",
    "/v1/models", "/v1/chat/completions", "/v1/completions",
})  # fmt: skip
"""Open to whoever may sample: liveness, metrics, and the `/v1` routes that vLLM's own API key covers."""

KEYED = frozenset({"/tokenize", "/detokenize"})
"""Open to whoever has the API key; vLLM leaves them open, so the guard asks for it where one is set."""


def route_path(scope: Scope) -> str:
    """The path that Starlette's router will match: `path` without the `root_path` it was mounted under."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :]
    return path


class AdminGuard:
    """Asks for the admin token on every route that is not plainly public; without a token configured they are closed.

    The token comes from `TANDEM_ADMIN_TOKEN` or the file that `TANDEM_ADMIN_TOKEN_FILE` names, the API key from
    `VLLM_API_KEY`. A file that can't be read fails the start rather than closing the routes unnoticed.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self._admin = _digest(_secret("TANDEM_ADMIN_TOKEN"))
        self._api_key = _digest(os.environ.get("VLLM_API_KEY", ""))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] in ("http", "websocket") and self._allows(scope)):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            # Closing before accepting is how ASGI refuses a handshake; the server answers 403.
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "admin token required"})
        elif scope["type"] == "http":
            await self._refuse(scope, send)
        # Any other kind of scope is one that this guard does not know: it is dropped.

    def _allows(self, scope: Scope) -> bool:
        path = route_path(scope)
        if path in PUBLIC and scope["type"] == "http":
            return True
        headers: Iterable[tuple[bytes, bytes]] = scope.get("headers", ())
        if path in KEYED and scope["type"] == "http":
            if self._api_key is None:
                return True
            scheme, _, key = _single(headers, "authorization").partition(b" ")
            if scheme.lower() == b"bearer" and _same(key.strip(), self._api_key):
                return True
        return self._admin is not None and _same(_single(headers, ADMIN_HEADER), self._admin)

    async def _refuse(self, scope: Scope, send: Send) -> None:
        if self._admin is None:
            why = "no admin token is configured, so the admin routes are closed: set TANDEM_ADMIN_TOKEN for vLLM"
        else:
            why = f"{route_path(scope)} is not a public route: send the admin token in the header {ADMIN_HEADER}"
        body = json.dumps({"error": {"type": "unauthorized", "message": why, "field": None}}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def _secret(name: str) -> str:
    value = os.environ.get(name, "").strip()
    file = os.environ.get(f"{name}_FILE", "").strip()
    return value or (Path(file).read_text().strip() if file else "")


def _digest(secret: str) -> bytes | None:
    """SHA-256 of a secret, None for an empty one: comparing digests hides the secret's length too."""
    return hashlib.sha256(secret.encode()).digest() if secret else None


def _same(given: bytes, digest: bytes) -> bool:
    return hmac.compare_digest(hashlib.sha256(given).digest(), digest)


def _single(headers: Iterable[tuple[bytes, bytes]], name: str) -> bytes:
    """The value of a header that occurs exactly once, else empty: two values would leave open which one counts."""
    values = [value for key, value in headers if key.lower() == name.encode()]
    return values[0] if len(values) == 1 else b""
