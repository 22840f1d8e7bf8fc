"""A vLLM in this process, for code that uses `tandem.client.vllm.Vllm`."""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from tandem.client.vllm import HttpAnswer, Vllm

URL = "http://vllm/v1"


class MockVllm(Vllm):
    """A vLLM that answers by `answer`. `answer` gets each request, and returns or awaits the
    response, or raises."""

    def __init__(self, answer: Callable[[httpx.Request], Any]) -> None:
        super().__init__(URL, {})
        self._answer = answer

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        seconds: float = 60.0,
        session: str | None = None,
        group: str | None = None,
    ) -> HttpAnswer:
        content = None if body is None else json.dumps(body)
        named = {"X-Session-ID": session, "X-Tandem-Group": group}
        headers = {name: value for name, value in named.items() if value is not None}
        request = httpx.Request(method, f"{self.url}/{path}", content=content, headers=headers)
        response = self._answer(request)
        if inspect.isawaitable(response):
            response = await response
        return HttpAnswer(response.status_code, response.content)
