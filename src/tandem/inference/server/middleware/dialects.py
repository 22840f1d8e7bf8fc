"""The API dialects of the rollout door, which are OpenAI's chat completions, OpenAI's Responses and
Anthropic's Messages. The answers to requests in all three dialects come from vLLM itself. This
module finds options that would change the sampling distribution, and converts the assistant's
message of an answer into the form of chat completions.
"""

import json
from collections.abc import Mapping
from typing import Any

from tandem.vllm_client.sampling import distorting

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"

THREADS_ELSEWHERE = {
    "type": "error",
    "error": {
        "type": "invalid_request_error",
        "message": "threads are kept by Anthropic's servers only: send the whole history",
        "details": {"error_code": "thread_unsupported_request", "unsupported": []},
    },
}
"""The answer to a client that sends only the new messages of a thread. vLLM would treat these
messages as the whole conversation. After this answer, Anthropic's SDK (2.12) sends the whole
history by itself."""

# Options with which the answer would not contain exactly the sampled tokens, or would lack the
# log-probs of some tokens. The mapping gives the harmless values of each option.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "echo": (None, False),
    "include_reasoning": (None, True),
    # vLLM 0.32 enforces `parallel_tool_calls: false` by a grammar.
    "parallel_tool_calls": (None, True),
    "background": (None, False),
}


def refused(path: str, options: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first option that the rollout door refuses, and the reason; None if it refuses no
    option."""
    params = options.get("sampling_params")
    asked = {**options, **(params if isinstance(params, dict) else {})}
    if path == RESPONSES and isinstance(text := options.get("text"), dict):
        asked["response_format"] = text.get("format")
    if path.startswith(MESSAGES):
        choice = options.get("tool_choice")
        if isinstance(choice, dict):
            kind = choice.get("type")
            asked["tool_choice"] = kind if kind in ("auto", "none") else choice
            asked["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
        if isinstance(config := options.get("output_config"), dict):
            asked["response_format"] = config.get("format")
    for name, neutral in _NEUTRAL.items():
        if asked.get(name) not in neutral:
            problem = "does not leave the model's own tokens with their log-probs; leave it out"
            return name, f"{name}={asked[name]} {problem}"
    return distorting(asked)


def unforced(options: Mapping[str, Any]) -> dict[str, Any]:
    """The request without a thinking budget and without the option `strict` in the schemas of
    tools. Agent frameworks send `strict` and a thinking budget by default. For either option, vLLM
    would constrain the sampled tokens by a grammar."""
    changed = dict(options)
    if isinstance(tools := options.get("tools"), list):
        changed["tools"] = [_not_strict(tool) for tool in tools]
    thinking = options.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        del changed["thinking"]
    return changed


def _not_strict(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    tool = {key: value for key, value in tool.items() if key != "strict"}
    if isinstance(tool.get("function"), dict):
        tool["function"] = {k: v for k, v in tool["function"].items() if k != "strict"}
    return tool


class Answers:
    """Collects the assistant's messages of one answer, in the form of chat completions, and the
    model's name. `ended`: whether the answer is complete."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._parts: dict[int, dict[str, Any]] = {}
        self.messages: list[dict[str, Any]] = []
        self.model = ""
        self.ended = False

    def whole(self, answer: Mapping[str, Any]) -> None:
        self.model = str(answer.get("model"))
        if self._path == RESPONSES:
            self.messages = [_of_items(answer.get("output") or ())]
        elif self._path == MESSAGES:
            self.messages = [_of_blocks(answer.get("content") or ())]
        else:
            self.messages = [choice["message"] for choice in answer.get("choices") or ()]
        self.ended = True

    def event(self, body: bytes) -> bool:
        """Reads an event of a stream. Returns whether this event completes the answer."""
        for line in body.splitlines():
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                self._end()
            elif isinstance(event := json.loads(data), dict):
                self._model(event)
                (self._chunk if self._path == CHAT else self._event)(event)
        return self.ended

    def _model(self, event: Mapping[str, Any]) -> None:
        message = event.get("message")
        named = message if isinstance(message, dict) else event
        if isinstance(named.get("model"), str):
            self.model = named["model"]

    def _chunk(self, event: Mapping[str, Any]) -> None:
        for choice in event.get("choices") or ():
            message = self._parts.setdefault(choice.get("index", 0), {"content": ""})
            delta = choice.get("delta") or {}
            for name in ("content", "reasoning"):
                if isinstance(delta.get(name), str):
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls") or ():
                calls = message.setdefault("calls", {})
                function = calls.setdefault(call.get("index", 0), {"name": "", "arguments": ""})
                for name in function:
                    function[name] += (call.get("function") or {}).get(name) or ""

    def _event(self, event: Mapping[str, Any]) -> None:
        match event.get("type"):
            case "response.completed" | "response.incomplete":
                self.whole(event["response"])
            case "content_block_start":
                self._parts[event["index"]] = {**event["content_block"], "json": ""}
            case "content_block_delta":
                block, delta = self._parts[event["index"]], event["delta"]
                block["json"] += delta.get("partial_json", "")
                for name in ("text", "thinking"):
                    if name in delta:
                        block[name] = (block.get(name) or "") + delta[name]
            case "message_stop":
                self._end()

    def _end(self) -> None:
        if self.ended:
            return
        parts = [part for _, part in sorted(self._parts.items())]
        if self._path == MESSAGES:
            self.messages = [_of_blocks(parts)]
        else:
            for part in parts:
                calls = [{"function": call} for _, call in sorted(part.pop("calls", {}).items())]
                self.messages.append({**part, **({"tool_calls": calls} if calls else {})})
        self.ended = True


def _of_items(items: Any) -> dict[str, Any]:
    """The message in the items of a response of the Responses API."""
    text, reasoning, calls = "", "", []
    for item in items:
        match item.get("type"):
            case "message":
                text += "".join(part.get("text") or "" for part in item.get("content") or ())
            case "reasoning":
                parts = item.get("content") or item.get("summary") or ()
                reasoning += "".join(part.get("text") or "" for part in parts)
            case "function_call":
                calls.append({"name": item.get("name"), "arguments": item.get("arguments")})
            case "custom_tool_call":
                arguments = json.dumps({"input": item.get("input")})
                calls.append({"name": item.get("name"), "arguments": arguments})
    return _message(text, reasoning, calls)


def _of_blocks(blocks: Any) -> dict[str, Any]:
    """The message in the content blocks of Anthropic's Messages API."""
    text, reasoning, calls = "", "", []
    for block in blocks:
        match block.get("type"):
            case "text":
                text += block.get("text") or ""
            case "thinking":
                reasoning += block.get("thinking") or ""
            case "tool_use":
                arguments = block.get("json") or json.dumps(block.get("input") or {})
                calls.append({"name": block.get("name"), "arguments": arguments})
    return _message(text, reasoning, calls)


def _message(text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return message
