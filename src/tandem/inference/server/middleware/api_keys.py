"""ASGI middleware around the guard. The middleware accepts every key of the deployment, and
replaces it by the one key that vLLM knows. Without this middleware, vLLM accepts several keys only
on its command line, which every user of the machine can read.
"""

import json
import logging
import os

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.inference.server.middleware.asgi import with_bearer
from tandem.system.api_keys import asking, name_in_log, name_of
from tandem.vllm_client.names import KEYS_VARIABLE


class ApiKeys:
    """Replaces a known key by the key of VLLM_API_KEY, and puts the key's name into the access
    log."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._known: dict[str, str] = json.loads(os.environ[KEYS_VARIABLE])
        self._of_vllm = f"Bearer {os.environ['VLLM_API_KEY']}".encode()
        logging.getLogger("uvicorn.access").addFilter(name_in_log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = with_bearer(scope)
        headers = scope.get("headers", ())
        given = [value for name, value in headers if name.lower() == b"authorization"]
        # A request with two keys is passed on unchanged, and the guard refuses it.
        if (
            len(given) == 1
            and (name := name_of(given[0].decode("latin-1"), self._known)) is not None
        ):
            asking.set(name)
            others = [(key, value) for key, value in headers if key.lower() != b"authorization"]
            scope = {**scope, "headers": [*others, (b"authorization", self._of_vllm)]}
        await self.app(scope, receive, send)
