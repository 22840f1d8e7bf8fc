"""The rollout door: `/rollout/v1/...` is vLLM's `/v1/...` for OpenAI clients that know nothing of
training, and `/rollout/inference/v1/generate` its route from tokens to tokens.

ASGI middleware inside the guard, which asks for the API key. It asks vLLM for token ids and
log-probs, and puts the prompt's token ids and the model's name into each choice (of a stream, its
first chunk), so that a choice alone holds what `turn_from_openai` needs.
"""

import json
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.inference.server.asgi import ChangedAnswer, error, read_body, route_path
from tandem.inference.server.guard import ROLLOUT_PATHS
from tandem.vllm_client.sampling import distorting

# With these the answer would not have exactly the sampled tokens.
_INCOMPLETE: dict[str, tuple[object, ...]] = {
    "echo": (None, False),
    "include_reasoning": (None, True),
}


class RolloutDoor:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) if scope["type"] == "http" else ""
        if path not in ROLLOUT_PATHS:
            await self.app(scope, receive, send)
            return
        inner = path.removeprefix("/rollout")
        scope = {**scope, "path": scope["path"].removesuffix(path) + inner}
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        if (body := await read_body(scope, receive)) is None:
            return
        options = _object(body)
        if options is not None:
            if refused := _refused(options):
                await error(400, "invalid_input", refused[1], refused[0])(scope, receive, send)
                return
            body = json.dumps(_asking(inner, options)).encode()
        MutableHeaders(scope=scope)["content-length"] = str(len(body))
        message: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def receive_changed() -> Message:
            nonlocal message
            first, message = message, None
            return first or await receive()  # later: whether the client is still there

        await self.app(scope, receive_changed, _CompleteAnswer(send).send)


class _CompleteAnswer(ChangedAnswer):
    def whole(self, body: bytes) -> bytes:
        return json.dumps(_complete(json.loads(body))).encode()

    def event(self, body: bytes) -> bytes:
        if b'"prompt_token_ids":' not in body:  # in a text, quotes are escaped
            return body
        return b"data: " + self.whole(body.removeprefix(b"data: ")) + b"\n\n"


def _asking(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """The request, also for token ids and log-probs."""
    if isinstance(params := options.get("sampling_params"), dict):
        return {**options, "sampling_params": {**params, "logprobs": params.get("logprobs") or 1}}
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return {
        **options,
        **ids,
        "logprobs": True if path.endswith("chat/completions") else options.get("logprobs") or 0,
    }


def _complete(answer: dict[str, Any]) -> dict[str, Any]:
    for choice in answer.get("choices", ()):
        choice["prompt_token_ids"] = choice.get("prompt_token_ids") or answer.get(
            "prompt_token_ids"
        )
        choice["model"] = answer.get("model")
        # vLLM's /inference/v1/generate names them by numbers by 0.32; `renderers` knows the older
        # names.
        content = (choice.get("logprobs") or {}).get("content") or ()
        for entry, token in zip(content, choice.get("token_ids") or (), strict=False):
            entry.setdefault("token", f"token_id:{token}")
    return answer


def _refused(options: dict[str, Any]) -> tuple[str, str] | None:
    for name, allowed in _INCOMPLETE.items():
        if options.get(name) not in allowed:
            return name, f"{name}={options[name]} leaves tokens without log-probs; leave it out"
    params = options.get("sampling_params")
    return distorting({**options, **(params if isinstance(params, dict) else {})})


def _object(body: bytes) -> dict[str, Any] | None:
    """None for what is no JSON object: vLLM says what is wrong with a request."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
