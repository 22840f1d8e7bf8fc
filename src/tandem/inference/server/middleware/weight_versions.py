"""Adds to each answer the names of the weights that sampled its tokens. The names are in the header
`x-tandem-weights`. If the weights were swapped during the request, the field `weight_versions`
lists the versions of the weights for each sequence. Each version has the index of the first token
that it sampled."""

import asyncio
import json
import re
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Send

from tandem.inference.server.middleware.asgi import ChangedAnswer

current_request: ContextVar["InFlight"] = ContextVar("current_request")

Sequence = tuple[int, int]  # the index of a prompt and the index of a sample


@dataclass(eq=False)
class InFlight:
    """A running sampling request. `id`: the header X-Request-Id, as vLLM reads it; `first`: the
    name of the weights with which the request began.

    `swaps`: for each swap during the request, the name of the new weights, and the number of tokens
    that each running sequence had at the swap.
    """

    id: str
    first: str
    task: asyncio.Task[Any] | None
    in_engine: bool = False
    swaps: list[tuple[str, dict[Sequence, int]]] = field(default_factory=list)

    def swapped(self, name: str, tokens: dict[str, int], *, in_engine: bool) -> None:
        """Records a swap to the weights with the name `name`.

        Args:
            tokens: the number of tokens of each sequence in the engine.
            in_engine: whether this request had reached the engine when the swap began.
        """
        if mine := self._of_this_request(tokens):
            self.swaps.append((name, mine))
        elif not in_engine:
            self.first = name
        # If a request in the engine has no sequence in `tokens`, all sequences of the request had
        # ended before the swap.

    def _of_this_request(self, tokens: dict[str, int]) -> dict[Sequence, int]:
        """Selects the sequences of this request. The name of a sequence in vLLM is `chatcmpl-<id>`,
        `generate-tokens-<id>` or `cmpl-<id>-<prompt>`. The name has a prefix `<sample>_` if there
        are several samples, and a suffix of 8 random hexadecimal digits."""
        of = re.escape(self.id)
        name = re.compile(
            rf"(?:(\d+)_)?(?:(?:chatcmpl|generate-tokens)-{of}|cmpl-{of}-(\d+))(?:-[0-9a-f]{{8}})?"
        )
        found = ((name.fullmatch(engine_id), count) for engine_id, count in tokens.items())
        return {(int(match[2] or 0), int(match[1] or 0)): count for match, count in found if match}

    def versions(self) -> list[dict[str, Any]]:
        """For each sequence during which the weights were swapped: the list `spans` of [name of the
        weights, index of the first token], in order."""
        found: dict[Sequence, list[list[Any]]] = {}
        for name, tokens in self.swaps:
            for sequence, count in tokens.items():
                spans = found.setdefault(sequence, [[self.first, 0]])
                if spans[-1][1] == count:
                    spans.pop()  # the previous weights produced no token
                if not spans or spans[-1][0] != name:
                    spans.append([name, count])
        return [
            {"prompt": prompt, "sample": sample, "spans": spans}
            for (prompt, sample), spans in sorted(found.items())
        ]


class VersionedAnswer(ChangedAnswer):
    def __init__(self, send: Send, request: InFlight) -> None:
        super().__init__(send)
        self._request = request

    def headers(self) -> dict[str, str]:
        return {
            "x-tandem-weights": ",".join(
                [self._request.first, *(name for name, _ in self._request.swaps)]
            )
        }

    def whole(self, body: bytes) -> bytes:
        if not self._request.swaps:
            return body
        return json.dumps(json.loads(body) | {"weight_versions": self._request.versions()}).encode()

    def event(self, body: bytes) -> bytes:
        if not self._request.swaps or not body.startswith(b"data: [DONE]"):
            return body
        event = {
            "object": "tandem.weight_versions",
            "choices": [],
            "weight_versions": self._request.versions(),
        }
        return b"data: " + json.dumps(event).encode() + b"\n\n" + body
