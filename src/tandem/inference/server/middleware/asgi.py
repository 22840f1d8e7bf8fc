"""Functions that the middlewares in vLLM's API server share: for paths, errors, bodies, and changed
answers."""

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send


def route_path(scope: Scope) -> str:
    """The path that Starlette's router matches: `path` without the app's `root_path`."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :]
    return path


def with_bearer(scope: Scope) -> Scope:
    """The request with the API key in the header that vLLM reads. Clients of Anthropic's API send
    the key as X-API-Key."""
    names = [name.lower() for name, _ in scope.get("headers", ())]
    if scope["type"] != "http" or b"authorization" in names or names.count(b"x-api-key") != 1:
        return scope
    if not route_path(scope).startswith("/rollout/v1/messages"):
        return scope
    key = scope["headers"][names.index(b"x-api-key")][1]
    return {**scope, "headers": [*scope["headers"], (b"authorization", b"Bearer " + key)]}


def error(
    status: int,
    kind: str,
    message: str,
    field: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """The HTTP response for an error, in the form of the controller's errors.

    Args:
        kind: the error's type, such as "conflict".
        field: the wrong field of the request; None if no single field is wrong.
    """
    return JSONResponse(
        {"error": {"type": kind, "message": message, "field": field}}, status, headers
    )


async def read_body(scope: Scope, receive: Receive) -> bytes | None:
    """A request's body; None if the client has disconnected."""
    try:
        return await Request(scope, receive).body()
    except ClientDisconnect:
        return None


class ChangedAnswer:
    """Changes vLLM's answer on its way to the client. A JSON answer is changed as a whole. A stream
    is changed one event at a time. Answers with an error status are not changed."""

    def __init__(self, send: Send) -> None:
        self._send = send
        # The headers are sent together with the first event or the whole body, because the headers'
        # values depend on the content.
        self._start: Message | None = None
        self._body = b""
        self._stream = False

    def headers(self) -> dict[str, str]:
        return {}

    def whole(self, body: bytes) -> bytes:
        raise NotImplementedError

    def event(self, body: bytes) -> bytes:
        raise NotImplementedError

    async def send(self, message: Message) -> None:
        body: bytes = message.get("body", b"")
        if message["type"] == "http.response.start" and message["status"] == 200:
            self._start = {**message}
            self._stream = "event-stream" in MutableHeaders(scope=self._start).get(
                "content-type", ""
            )
            return
        if self._start is not None:
            self._body += body
            if message.get("more_body") and not (self._stream and body):
                return
            headers = MutableHeaders(scope=self._start)
            headers.update(self.headers())
            if not self._stream:
                body = self.whole(self._body)
                headers["content-length"] = str(len(body))
                message = {"type": "http.response.body", "body": body}
            await self._send(self._start)
            self._start = None
        if self._stream and body:
            message = {**message, "body": self.event(body)}
        await self._send(message)
