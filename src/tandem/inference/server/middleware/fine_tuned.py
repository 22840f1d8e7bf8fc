"""ASGI middleware inside the guard. It accepts the names that OpenAI's API gives fine-tuned models.

The controller calls a model `ft:<base>:<organization>:<suffix>:<run>@<step>`. In vLLM, the model's
name is only the last part, `<run>@<step>`. The middleware replaces the long name in a request by
`<run>@<step>`. The answer names the model `<run>@<step>`.
"""

import json

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.inference.server.middleware.asgi import read_body, route_path
from tandem.vllm_client.names import PUBLIC_PATHS, ROLLOUT_PATHS

PREFIX = "ft:"
_MARK = b'"ft:'


class FineTunedNames:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        paths = PUBLIC_PATHS | ROLLOUT_PATHS | {"/tokenize"}
        if scope["type"] != "http" or scope["method"] != "POST" or route_path(scope) not in paths:
            await self.app(scope, receive, send)
            return
        if (body := await read_body(scope, receive)) is None:
            return
        if _MARK in body and (changed := _with_last_part(body)) != body:
            body, scope = changed, {**scope, "headers": [*scope["headers"]]}
            MutableHeaders(scope=scope)["content-length"] = str(len(body))
        message: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def receive_whole() -> Message:
            nonlocal message
            first, message = message, None
            # Later calls of `receive_changed` ask whether the client is still connected.
            return first or await receive()

        await self.app(scope, receive_whole, send)


def _with_last_part(body: bytes) -> bytes:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):  # vLLM reports that the body is not JSON
        return body
    model = request.get("model") if isinstance(request, dict) else None
    if not isinstance(model, str) or not model.startswith(PREFIX):
        return body
    return json.dumps(request | {"model": model.rpartition(":")[2]}).encode()
