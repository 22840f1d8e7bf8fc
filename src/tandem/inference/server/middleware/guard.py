"""The admin guard: ASGI middleware that vLLM loads by `--middleware
tandem.inference.server.middleware.guard.AdminGuard`.

vLLM (0.26 to 0.33) checks its API key only on `/v1`, `/v2`, `/inference` and `/cohere`, and every
sampling client has that key. This guard therefore requires the admin token on the routes that
change the served weights (`/v1/load_lora_adapter`, `/pause`, `/update_weights`, ...). The guard has
a list of allowed routes. A route that a new vLLM version adds needs the admin token until the route
is in this list.
"""

import hmac
import os
import re
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.inference.server.middleware.asgi import error, route_path, with_bearer
from tandem.inference.server.middleware.sessions import NAME
from tandem.system.loopback import foreign_header
from tandem.vllm_client.names import ADMIN_HEADER, PROBE_PATHS, PUBLIC_PATHS, ROLLOUT_PATHS

FINISH = re.compile(rf"/rollout/sessions/({NAME.pattern})/finish")
"""The path that returns a session of the rollout door as a trajectory."""

ADMIN = "tandem.admin"
"""The key in the ASGI scope that marks a request with the admin token."""

API_KEY_PATHS = frozenset({"/tokenize", "/detokenize"}) | ROLLOUT_PATHS
"""Paths on which vLLM does not check the API key, or checks it too late. If a key is configured,
the guard checks it on these paths."""


class AdminGuard:
    """Requires the admin token on every path, except PUBLIC_PATHS, PROBE_PATHS, API_KEY_PATHS and
    the paths that FINISH matches. If no admin token is configured, the guard refuses all requests
    that require the admin token.

    If no API key is configured, every path except liveness and metrics accepts only requests to
    localhost, and refuses requests from a web page of another site. The controller has the same
    rule for requests without an API key.

    The admin token comes from `TANDEM_ADMIN_TOKEN`, or from the file that `TANDEM_ADMIN_TOKEN_FILE`
    names. The API key comes from `VLLM_API_KEY`. An unreadable token file raises OSError and so
    stops the start of vLLM.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        token, file = (
            os.environ.get(f"TANDEM_ADMIN_TOKEN{kind}", "").strip() for kind in ("", "_FILE")
        )
        self._admin_token = token or (
            Path(file).read_text(encoding="utf-8-sig").strip() if file else ""
        )
        self._api_key = os.environ.get("VLLM_API_KEY", "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = with_bearer(scope)
        scope[ADMIN] = _matches(_single_header(scope, ADMIN_HEADER), self._admin_token)
        if header := self._foreign_header(scope):
            message = (
                f"a vLLM without an API key answers to localhost only, and no page of another site:"
                f" {header} names another; set TANDEM_API_KEY"
            )
            await error(422, "invalid_input", message, header)(scope, receive, send)
        elif scope["type"] == "lifespan" or (
            scope["type"] in ("http", "websocket") and self._allows(scope)
        ):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            # In ASGI, a close message before the accept message refuses a WebSocket handshake. The
            # client of a refused handshake gets status 403.
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "admin token required"})
        elif scope["type"] == "http":
            await error(401, "unauthorized", self._refusal(route_path(scope)))(scope, receive, send)
        # The guard ignores scopes of other types, because it has no rule for them.

    def _allows(self, scope: Scope) -> bool:
        if scope[ADMIN] or scope["type"] != "http":
            return bool(scope[ADMIN])
        path = route_path(scope)
        if path in PUBLIC_PATHS or path in PROBE_PATHS:
            return True
        return _asks_for_the_key(path) and self._has_api_key(scope)

    def _foreign_header(self, scope: Scope) -> str | None:
        if scope["type"] != "http" or self._api_key or scope[ADMIN]:
            return None
        if route_path(scope) in PROBE_PATHS:
            return None
        headers = Headers(scope=scope)
        return foreign_header(headers.get("host", ""), headers.get("origin"))

    def _has_api_key(self, scope: Scope) -> bool:
        scheme, _, key = _single_header(scope, "authorization").partition(b" ")
        return not self._api_key or (
            scheme.lower() == b"bearer" and _matches(key.strip(), self._api_key)
        )

    def _refusal(self, path: str) -> str:
        if _asks_for_the_key(path):
            return "send the API key in the header Authorization: Bearer <key>"
        if not self._admin_token:
            return (
                "the admin routes are closed, because no admin token is set: set TANDEM_ADMIN_TOKEN"
                " for vLLM"
            )
        remedy = "the base URL of OpenAI clients ends with /v1"
        return (
            f"{path} is not a public route: {remedy}; other routes need the admin token in the"
            f" header {ADMIN_HEADER}"
        )


def _asks_for_the_key(path: str) -> bool:
    return path in API_KEY_PATHS or FINISH.fullmatch(path) is not None


def _matches(given: bytes, secret: str) -> bool:
    """Whether a given value equals a secret; an empty secret equals nothing. Digests of the two
    values are compared, which also hides the secret's length."""
    return bool(secret) and hmac.compare_digest(
        sha256(given).digest(), sha256(secret.encode()).digest()
    )


def _single_header(scope: Scope, name: str) -> bytes:
    """The value of a header that occurs exactly once. The result is empty if the header occurs
    several times, because it would be unclear which value counts."""
    values: list[bytes] = [
        value for key, value in scope.get("headers", ()) if key.lower() == name.encode()
    ]
    return values[0] if len(values) == 1 else b""
