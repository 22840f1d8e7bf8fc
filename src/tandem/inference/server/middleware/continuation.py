"""Makes vLLM continue the tokens that a session of the rollout door has sampled, and records the
next sampled tokens.

For each request, vLLM renders the whole history of messages. The client sends back the text of the
sampled tokens, and the chat template may render this text differently. Possible differences are
`False` in place of `false` in a tool call, different white space, missing thoughts, and a missing
stop string. If the session has the tokens of the history's last answer, the prompt contains these
tokens instead of the rendered text of the answer. To build the prompt, vLLM renders the history
with a mark in place of the last answer. The text after the mark is tokenized and appended to the
sampled tokens.

A context variable contains each request's `Recording`. On every route, vLLM's code between the
rollout door and the engine runs in the request's context, and so finds the `Recording`.
"""

import json
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from tandem.inference.server import patches
from tandem.inference.server.middleware.sessions import (
    RolloutSession,
    SampledTurn,
    SentMessages,
    malformed,
    plain,
    reason_of_break,
)

recording: ContextVar["Recording | None"] = ContextVar("recording", default=None)

_MARK, _PROBE = f"TANDEM{uuid4().hex}", f"PROBE{uuid4().hex}"
# Options of the chat template that affect only the end of the prompt.
_OF_THE_END = frozenset({"tokenize", "add_generation_prompt", "continue_final_message"})

Render = Callable[[Any, Any], Awaitable[tuple[Any, Any]]]


@dataclass
class SampledSequence:
    """One sequence that the engine has sampled."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    truncated: bool = False
    stop: str | None = None
    ended: bool = False


@dataclass(eq=False)
class Recording:
    """A sampling request of a session. `messages` has the messages, at first as the client sent
    them, and later in vLLM's form. `head` is the turn that the request continues. `samples` has the
    sampled sequences by their index in the answer. If the request does not continue a turn,
    `broken` is called with the reason."""

    session: RolloutSession
    broken: Callable[[str], None]
    conversation: SentMessages | None = None
    messages: Sequence[Any] = ()
    head: SampledTurn | None = None
    prompt: list[int] | None = None
    samples: dict[int, SampledSequence] = field(default_factory=dict)
    only_ids: bool = False
    """Whether only this module reads the log-probs, so that the tokens need not be decoded to
    text."""

    def turns(self, answers: Sequence[dict[str, Any]], model: str) -> list[SampledTurn]:
        """The sampled turns, each with its answer in the client's form."""
        if self.prompt is None:
            return []
        # Turns of GPT-OSS get a random key, so no later request finds them by their history.
        asked = self.conversation.digests[-1] if self.conversation else uuid4().bytes
        head = self.head or self.session.deepest(self.prompt)
        new = self.prompt[len(head.all_tokens()) if head else 0 :]
        made = []
        for answer, (_, sample) in zip(answers, sorted(self.samples.items()), strict=True):
            parts = [{**answer, "role": "assistant"}, {"content": sample.stop}]
            turn = SampledTurn(
                head=head,
                new=array("i", new),
                tokens=sample.tokens,
                logprobs=sample.logprobs,
                asked=asked,
                answer=plain(parts[:1]),
                model=model,
                truncated=sample.truncated,
                stop=sample.stop,
                with_stop=plain(parts) if sample.stop else None,
                ended=sample.ended,
            )
            made.append(turn)
        return [turn for turn in made if turn.tokens]

    async def record(
        self, outputs: Any, stops: Mapping[int, str], *, delta: bool
    ) -> AsyncIterator[Any]:
        """Passes the engine's outputs on, and records them.

        Args:
            delta: whether each output contains only the new tokens.
        """
        first = True
        async with aclosing(outputs):
            async for output in outputs:
                if first:
                    self._sampled_from([*output.prompt_token_ids])
                    first = False
                for one in output.outputs:
                    _note(
                        self.samples.setdefault(one.index, SampledSequence()),
                        one,
                        stops,
                        delta=delta,
                    )
                yield output

    def _sampled_from(self, prompt: list[int]) -> None:
        """Record the prompt's tokens. Call `broken` if the request should continue a turn and the
        prompt does not begin with the turn's tokens."""
        self.prompt, self.samples = prompt, {}
        if self.conversation is None:  # vLLM renders chats for GPT-OSS in the Harmony format
            answered = any(_sampled(message) for message in self.messages)
            if answered and self.session.turns and self.session.deepest(prompt) is None:
                self.broken("template")
            return
        known = self.session.find(self.conversation)
        turn = known[0] if known else self.session.expected(self.conversation)
        if turn is None or prompt[: len(ids := turn.all_tokens())] == ids:
            return
        self.head = None
        at = self.conversation.last_answer
        assert at is not None
        given = self.conversation.messages[at]
        self.broken("template" if known else reason_of_break(turn, given))


def follow(engine: Any) -> None:
    """Makes vLLM's engine client and its renderer use the recording of the request."""
    generate, tokenizer = engine.generate, engine.renderer.tokenizer
    stops = _stop_tokens(engine, tokenizer)

    async def render(original: Render, messages: Any, params: Any) -> tuple[Any, Any]:
        request = recording.get()
        if request is None:
            return await original(messages, params)
        messages = [_listed(message) for message in messages]
        options = params.chat_template_kwargs
        shape = {key: value for key, value in options.items() if key not in _OF_THE_END}
        request.head, request.messages = None, messages
        request.conversation = SentMessages.of(messages, [params.chat_template, shape])
        found = request.session.find(request.conversation)
        if found is not None and not options.get("continue_final_message"):
            turn, end = found
            conversation, tail = await _rendered_tail(original, messages, params, turn, end, stops)
            if tail:
                request.head = turn
                ids = turn.all_tokens() + tokenizer.encode(tail, add_special_tokens=False)
                return conversation, {"prompt_token_ids": ids}
        for message in messages:
            if name := malformed(message):
                raise ValueError(malformed_call(name))
        return await original(messages, params)

    def record(prompt: Any, params: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        request = recording.get()
        if request is None:
            original: AsyncIterator[Any] = generate(prompt, params, *args, **kwargs)
            return original
        if params.logprobs is None:
            params.logprobs = 0  # with 0, vLLM returns only the sampled tokens' log-probs
            request.only_ids = True
        delta = params.output_kind.name == "DELTA"
        return request.record(generate(prompt, params, *args, **kwargs), stops, delta=delta)

    def unneeded() -> bool:
        request = recording.get()
        return request is not None and request.only_ids

    patches.continue_sampled_tokens(engine, render, record)
    patches.leave_texts_of_tokens_out(unneeded)


def malformed_call(name: str) -> str:
    """The error message if vLLM can't render the arguments of a tool call in the history."""
    return (
        f"the arguments of the call of {name!r} in the history are not a JSON object, and vLLM"
        f" would render a call without arguments: send the answer back as it came, with the header"
        f" X-Session-ID in all requests of the rollout, or leave the call out"
    )


def _note(sample: SampledSequence, output: Any, stops: Mapping[int, str], *, delta: bool) -> None:
    if not delta:
        del sample.tokens[:], sample.logprobs[:]
    sample.tokens.extend(output.token_ids)
    for token, entry in zip(output.token_ids, output.logprobs or (), strict=False):
        sample.logprobs.append(entry[token].logprob)
    if output.finish_reason is not None:
        sample.truncated = output.finish_reason == "length"
        sample.stop = output.stop_reason if isinstance(output.stop_reason, str) else None
        sample.ended = bool(sample.tokens) and sample.tokens[-1] in stops and sample.stop is None


def _stop_tokens(engine: Any, tokenizer: Any) -> dict[int, str]:
    """The tokens that end a turn, each with its text."""
    config = engine.model_config.try_get_generation_config() or {}
    given = config.get("eos_token_id")
    found = {*(given if isinstance(given, list) else [given]), tokenizer.eos_token_id} - {None}
    return {token: tokenizer.decode([token]) for token in found}


def _sampled(message: Any) -> bool:
    """Whether a message, or an item of the Responses API, comes from the model."""
    return isinstance(message, dict) and (
        message.get("role") == "assistant" or message.get("type") == "function_call"
    )


def _listed(message: Any) -> Any:
    """The message with its calls as a list, because pydantic returns an iterator that can be read
    only once."""
    if isinstance(message, dict) and message.get("tool_calls") is not None:
        message["tool_calls"] = [*message["tool_calls"]]
    return message


def _begin(messages: Sequence[Any], end: int) -> int:
    """The beginning of the unbroken series of assistant messages that ends right before index
    `end`. Returns the index of the first message in this series."""
    begin = end
    while begin and messages[begin - 1].get("role") == "assistant":
        begin -= 1
    return begin


def _marked(answer: Sequence[Any]) -> list[dict[str, Any]]:
    """Candidates for the message that replaces the answer in the history. Each candidate contains
    the mark. If the answer has tool calls, the mark is in the arguments of the calls. If the answer
    has no calls, the mark is the message's text."""
    arguments = json.dumps({"mark": _MARK})
    calls = [
        {**call, "function": {**call["function"], "arguments": arguments}}
        for one in answer
        for call in one.get("tool_calls") or ()
    ]
    in_text = {"role": "assistant", "content": _MARK}
    if not calls:
        return [in_text]
    return [{**in_text, "content": "", "tool_calls": calls}, {**in_text, "tool_calls": calls}]


def _parsable(message: Any) -> Any:
    """The message with `{}` in place of calls' malformed arguments, so that vLLM can parse the
    message. In the prompt, the sampled tokens replace the malformed calls."""
    if not malformed(message):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": "{}"}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


async def _rendered_tail(
    render: Render,
    messages: Sequence[Any],
    params: Any,
    turn: SampledTurn,
    end: int,
    stops: Mapping[int, str],
) -> tuple[Any, str | None]:
    """vLLM's conversation, and the text that follows the turn's tokens in the rendered prompt. The
    text is None if its beginning can't be found."""
    begin = _begin(messages, end)
    before, new = [*map(_parsable, messages[:begin])], messages[end:]
    # Some templates do not write a tool's answer right after the call (Gemma 4), and a message may
    # contain the text of a stop token. To find the new messages reliably, the prompt is rendered a
    # second time, with different texts in the new messages. In both prompts the new messages must
    # begin at the same place.
    probes = [{**message, "content": _PROBE} for message in new]
    conversation = None
    for marked in _marked(messages[begin:end]):
        conversation, prompt = await render([*before, marked, *new], params)
        _, probed = await render([*before, marked, *probes], params)
        cut, expected = (_behind_the_turn(one, turn, stops) for one in (prompt, probed))
        if cut is None or expected is None or cut[1] != expected[1]:
            continue
        if expected[0].count(_PROBE) == probed["prompt"].count(_PROBE):
            return conversation, cut[0]
    return conversation, None


def _behind_the_turn(
    prompt: Any, turn: SampledTurn, stops: Mapping[int, str]
) -> tuple[str, int] | None:
    """The text after the turn, and the distance in characters from the mark to the beginning of
    this text. None if the end of the turn can't be found."""
    if not isinstance(prompt, dict) or {"multi_modal_data", "prompt_embeds"} & {*prompt}:
        return None
    text = prompt.get("prompt")
    if not isinstance(text, str) or _MARK not in text:
        return None
    rest = text[text.rindex(_MARK) + len(_MARK) :]
    found = [(at, token) for token, stop in stops.items() if (at := rest.find(stop)) >= 0]
    if not found:
        return None if turn.answer["calls"] else (rest, 0)
    at, token = min(found)
    if turn.ended and turn.tokens[-1] == token:
        at += len(stops[token])
    return rest[at:], at
