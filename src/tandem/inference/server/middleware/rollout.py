"""The rollout door: `/rollout/v1/...` is vLLM's `/v1/...` for clients that are not made for
training. `/rollout/inference/v1/generate` is vLLM's route from token ids to token ids.

The rollout door is ASGI middleware inside the guard, which checks the API key. The rollout door
asks vLLM for token ids and log-probs. The door puts the prompt's token ids and the model's name
into each choice (in a stream, into its first chunk). Each choice of an answer therefore contains
all data that `turn_from_openai` needs.

In a session (header X-Session-ID), each turn continues the sampled tokens of the previous turn
(`continuation.py`), and the server keeps the turns. `POST /rollout/sessions/{id}/finish` returns
the kept turns as a trajectory. The header X-Session-ID is required in the API dialects whose
clients can't send tokens back. In a session, a chat answer that is not streamed gets its tokens and
log-probs from the session's record instead of from vLLM. To return the tokens, vLLM would make
several Python objects for each token. For long answers, this would be most of the API server's
work.
"""

import json
import math
from typing import Any

from prometheus_client import Counter
from pydantic_core import to_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.inference.server.middleware.asgi import ChangedAnswer, error, read_body, route_path
from tandem.inference.server.middleware.continuation import (
    Recording,
    follow,
    malformed_call,
    recording,
)
from tandem.inference.server.middleware.dialects import (
    CHAT,
    MESSAGES,
    RESPONSES,
    THREADS_ELSEWHERE,
    Answers,
    refused,
    unforced,
)
from tandem.inference.server.middleware.guard import FINISH
from tandem.inference.server.middleware.sessions import (
    BREAKS,
    HEADER,
    NAME,
    Sessions,
    malformed,
    reasoning_of,
)
from tandem.vllm_client.names import ROLLOUT_PATHS

_BREAKS = Counter(
    "tandem_rollout_prefix_breaks",
    "Turns in sessions of the rollout door (/rollout) whose prompts do not begin with the tokens "
    "of the preceding turn.",
    ["reason"],
)
for _reason in BREAKS:
    _BREAKS.labels(_reason)

Options = dict[str, Any]


class RolloutDoor:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.sessions = Sessions()
        self._followed: Any = None  # vLLM's engine client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) if scope["type"] == "http" else ""
        if path not in ROLLOUT_PATHS and not FINISH.fullmatch(path):
            await self.app(scope, receive, send)
            return
        inner = path.removeprefix("/rollout")
        if scope["method"] != "POST" and path in ROLLOUT_PATHS:
            await self.app(_at(scope, path, inner), receive, send)
            return
        if (body := await read_body(scope, receive)) is None:
            return
        if found := FINISH.fullmatch(path):
            await self._finish(found[1], _object(body))(scope, receive, send)
            return
        options, session, adds = _object(body), Headers(scope=scope).get(HEADER), False
        if options is not None:
            if inner == MESSAGES and options.get("thread") is not None:
                await JSONResponse(THREADS_ELSEWHERE, 400)(scope, receive, send)
                return
            if problem := _problem(inner, options, session):
                await error(400, "invalid_input", problem[1], problem[0])(scope, receive, send)
                return
            asked = _asking(inner, options)
            if adds := session is not None and _may_add_tokens(inner, options):
                asked = {key: value for key, value in asked.items() if key not in _OF_TOKENS}
            body = json.dumps(asked).encode()
        scope = _at(scope, path, inner)
        MutableHeaders(scope=scope)["content-length"] = str(len(body))
        message: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def receive_changed() -> Message:
            nonlocal message
            first, message = message, None
            # Later calls of `receive_changed` ask whether the client is still connected.
            return first or await receive()

        if session is None or inner not in (CHAT, RESPONSES, MESSAGES):
            await self.app(scope, receive_changed, _CompleteAnswer(send, inner).send)
            return
        history = (options or {}).get("input" if inner == RESPONSES else "messages")
        request = self._record(scope["app"].state.engine_client, session, history)
        made = request if adds else None
        answer = _RecordedAnswer(
            send, inner, lambda found: self._keep(session, request, found), made
        )
        token = recording.set(request)
        try:
            await self.app(scope, receive_changed, answer.send)
        finally:
            recording.reset(token)

    def _record(self, engine: Any, session: str, history: Any) -> Recording:
        if self._followed is not engine:
            follow(engine)
            self._followed = engine
        request = Recording(self.sessions.use(session), lambda reason: _BREAKS.labels(reason).inc())
        request.messages = history if isinstance(history, list) else ()
        return request

    def _keep(self, session: str, request: Recording, answers: Answers) -> None:
        turns = request.turns(answers.messages, answers.model)
        for turn in turns:
            self.sessions.add(session, turn)
        if turns:
            request.session.messages = [*request.messages, answers.messages[0]]

    def _finish(self, name: str, options: Options | None) -> JSONResponse:
        """The session as a trajectory. The session is kept, so that a repeated request gets the
        same trajectory."""
        reward = None if options is None else options.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            return error(400, "invalid_input", 'missing: send {"reward": <number>}', "reward")
        if not math.isfinite(reward):
            return error(400, "invalid_input", f"{reward} is not finite", "reward")
        assert options is not None
        if (session := self.sessions.known(name)) is None:
            problem = (
                f"this server has no turns of the session {name!r}: nothing was sampled with this"
                f" name, others have taken its memory, or vLLM has started again since; play the"
                f" rollout again"
            )
            return error(410, "gone", problem)
        more = {key: options[key] for key in ("advantage", "metrics") if key in options}
        turns = [turn.trained() for turn in session.turns]
        return JSONResponse(
            {"turns": turns, "reward": reward, "messages": session.messages, **more}
        )


class _CompleteAnswer(ChangedAnswer):
    def __init__(self, send: Send, path: str) -> None:
        super().__init__(send)
        self._has_choices = path not in (RESPONSES, MESSAGES)

    def whole(self, body: bytes) -> bytes:
        return json.dumps(_complete(json.loads(body))).encode() if self._has_choices else body

    def event(self, body: bytes) -> bytes:
        # The search finds only a key of the event and never sampled text, because JSON escapes
        # quotes in texts.
        if not self._has_choices or b'"prompt_token_ids":' not in body:
            return body
        return b"data: " + self.whole(body.removeprefix(b"data: ")) + b"\n\n"


class _RecordedAnswer(_CompleteAnswer):
    """Calls `keep` with the answer before the client has received the whole answer, because the
    client's next request may follow immediately. `request`: the recording whose tokens are added to
    the answer; None if vLLM was asked for the tokens."""

    def __init__(self, send: Send, path: str, keep: Any, request: Recording | None) -> None:
        super().__init__(send, path)
        self._answers, self._keep, self._request = Answers(path), keep, request

    def whole(self, body: bytes) -> bytes:
        if self._stream:
            return super().whole(body)
        answer = json.loads(body)
        self._answers.whole(answer)
        self._keep(self._answers)
        if self._request is not None:
            return to_json(_with_tokens(answer, self._request))
        return to_json(_complete(answer)) if self._has_choices else body

    def event(self, body: bytes) -> bytes:
        if not self._answers.ended and self._answers.event(body):
            self._keep(self._answers)
        return super().event(body)


def _at(scope: Scope, path: str, inner: str) -> Scope:
    return {**scope, "path": scope["path"].removesuffix(path) + inner}


def _asking(path: str, options: Options) -> Options:
    """The request, with options that also ask vLLM for token ids and log-probs."""
    if isinstance(params := options.get("sampling_params"), dict):
        return {**options, "sampling_params": {**params, "logprobs": params.get("logprobs") or 1}}
    options = unforced(options)
    if path.startswith((RESPONSES, MESSAGES)):
        return options
    if path == CHAT and isinstance(messages := options.get("messages"), list):
        options["messages"] = [_in_vllms_names(message) for message in messages]
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return {
        **options,
        **ids,
        "logprobs": True if path == CHAT else options.get("logprobs") or 0,
    }


_OF_TOKENS = frozenset({"logprobs", "return_token_ids", "return_tokens_as_token_ids"})


def _may_add_tokens(path: str, options: Options) -> bool:
    """Whether the rollout door can add the tokens to an answer. The answer must not be streamed,
    and must have log-probs of the sampled tokens only."""
    more = ("stream", "top_logprobs", "logprob_token_ids")
    return path == CHAT and not any(options.get(name) for name in more)


def _with_tokens(answer: Options, request: Recording) -> Options:
    """The answer with the fields that vLLM would have added if it had been asked for tokens."""
    for choice in answer["choices"]:
        sample = request.samples[choice["index"]]
        content: list[Options] = [
            {
                "token": f"token_id:{token}",
                "logprob": max(logprob, _LEAST_LOGPROB),
                "bytes": None,
                "top_logprobs": [],
            }
            for token, logprob in zip(sample.tokens, sample.logprobs, strict=True)
        ]
        choice["prompt_token_ids"], choice["token_ids"] = request.prompt, sample.tokens.tolist()
        choice["logprobs"], choice["model"] = {"content": content}, answer.get("model")
    return answer


_LEAST_LOGPROB = -9999.0
"""The lowest log-prob that vLLM writes, because JSON has no infinity."""


def _in_vllms_names(message: Any) -> Any:
    """The message of the history, with its reasoning under the key `reasoning`. vLLM silently drops
    reasoning under any other key that clients use."""
    if isinstance(message, dict) and (reasoning := reasoning_of(message)):
        return {**message, "reasoning": reasoning}
    return message


def _complete(answer: Options) -> Options:
    for choice in answer.get("choices", ()):
        choice["prompt_token_ids"] = choice.get("prompt_token_ids") or answer.get(
            "prompt_token_ids"
        )
        choice["model"] = answer.get("model")
        # As of 0.32, vLLM's /inference/v1/generate identifies tokens by numbers; `renderers`
        # expects the older names `token_id:<number>`.
        content = (choice.get("logprobs") or {}).get("content") or ()
        for entry, token in zip(content, choice.get("token_ids") or (), strict=False):
            entry.setdefault("token", f"token_id:{token}")
    return answer


def _problem(path: str, options: Options, session: str | None) -> tuple[str, str] | None:
    """The field that makes the rollout door refuse a request, and the reason; None if it accepts
    the request."""
    if session is not None and not NAME.fullmatch(session):
        return HEADER, f"{session!r} is not a name of a session: 1 to 128 of A-Z a-z 0-9 . _ : -"
    if session is None and path in (RESPONSES, MESSAGES):
        problem = (
            "missing: name the rollout in the header X-Session-ID (default_headers of the client);"
            " the server keeps its tokens, and POST /rollout/sessions/<name>/finish returns them"
        )
        return HEADER, problem
    if (forced := refused(path, options)) is not None:
        return forced
    return _forks(options) if session is None and path == CHAT else None


def _forks(options: Options) -> tuple[str, str] | None:
    """The field that would make vLLM render other tokens than the sampled tokens, and the reason;
    None if no field would do so."""
    messages = options.get("messages")
    answers = [
        (i, message)
        for i, message in enumerate(messages if isinstance(messages, list) else ())
        if isinstance(message, dict) and message.get("role") == "assistant"
    ]
    for i, message in answers:
        if name := malformed(message):
            return f"messages.{i}.tool_calls", malformed_call(name)
    if answers and options.get("stop") and not options.get("include_stop_str_in_output"):
        problem = (
            "answers end before their stop string, so this turn can't continue the tokens of the"
            " one before: send the header X-Session-ID in all requests of the rollout, or"
            " include_stop_str_in_output=true"
        )
        return "stop", problem
    return None


def _object(body: bytes) -> Options | None:
    """The body as a JSON object. None if the body is not a JSON object; vLLM then reports the
    mistake."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
