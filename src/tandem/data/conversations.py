"""Turns conversations of files into lists of messages in OpenAI's form. Reads the formats of
sharegpt, ms-swift and Anthropic, and texts that contain calls and tools' answers. The module
imports no numpy and no torch.
"""

import ast
import json
import re
from typing import Any

from tandem.data.dialects import decoded
from tandem.errors import InvalidInput

_OPENAI = ("system", "developer", "user", "assistant", "tool")
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function": "tool",
} | {role: role for role in _OPENAI}
_CALLS = ("function_call", "tool_call")
_ONE_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_ONE_ANSWER = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
_SWITCHES = ("loss", "training")


def chat(value: Any, field: str) -> Any:
    """The messages from a list of messages, from the JSON text of such a list, or from a single
    message. A message is OpenAI's {role, content} or sharegpt's {from, value}. Any other value is
    returned unchanged, and is checked when the example is validated."""
    if isinstance(value, str):
        found = decoded(value)
        items = found if isinstance(found, list) else []
        if items and all(isinstance(one, dict) and {"role", "from"} & one.keys() for one in items):
            value = found
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        return value
    messages: list[Any] = []
    for i, item in enumerate(value):
        for one, calls_only in _messages(item, f"{field}.{i}"):
            before = messages[-1] if messages else None
            if calls_only and isinstance(before, dict) and before.get("role") == "assistant":
                # Text before the calls, and parallel calls, belong to one turn.
                calls = [*before.get("tool_calls", ()), *one["tool_calls"]]
                messages[-1] = before | one | {"tool_calls": calls}
            else:
                messages.append(one)
    return messages


def _messages(item: Any, field: str) -> list[tuple[Any, bool]]:
    """The messages of one item of a conversation, each with a flag: whether the message has only
    calls. If a message has only calls, the caller adds its calls to a preceding message of the
    assistant."""
    if not isinstance(item, dict) or (
        item.keys() == {"role", "content"}
        and isinstance(item["content"], str)
        and item["role"] in _OPENAI
    ):
        return [(item, False)]
    item = dict(item)
    if item.keys() == {"human", "assistant"}:  # ms-swift's
        both = (("user", item["human"]), ("assistant", item["assistant"]))
        return [({"role": role, "content": text}, False) for role, text in both]
    names = {name.lower(): name for name in item}
    # In Axolotl's format pygmalion, the key `role` takes the place of `from`.
    speaker = names.get("from") or (names.get("role") if "value" in names else None)
    shared = speaker is not None and "content" not in item
    if shared and speaker is not None:
        source, item["content"] = item.pop(speaker), item.pop(names.get("value", ""), None)
        role = source.lower() if isinstance(source, str) else ""
        if role not in _ROLES:
            problem = f"{source!r} is no role; use one of {', '.join(_ROLES)}"
            raise InvalidInput(problem, field=f"{field}.{speaker}")
        if not isinstance(item["content"], str):
            problem = f"must be a text, not {item['content']!r}"
            raise InvalidInput(problem, field=f"{field}.value")
    else:
        role = item.get("role")
        if not isinstance(role, str) or role not in (*_CALLS, "tool_response"):
            role = None
    for switch in _SWITCHES:
        if isinstance(item.get(switch), bool) and "train" not in item:
            item["train"] = item.pop(switch)
    if role in _CALLS:
        return [(_called(item, f"{field}.{'value' if shared else 'content'}"), True)]
    if role is not None:
        item["role"] = _ROLES[role]
    if isinstance(item.get("content"), list):
        return [(one, False) for one in _anthropic(item, field)]
    return [(one, False) for one in (_written(item) if shared else [item])]


def _called(item: dict[str, Any], field: str) -> dict[str, Any]:
    """The message for an item whose text is the JSON of one or several calls."""
    text = item.pop("content")
    calls = decoded(text)
    if not isinstance(calls, dict | list):
        try:
            json.loads(text if isinstance(text, str) else "")
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"not JSON: {error}", field=field) from error
    given = calls if isinstance(calls, list) else [calls]
    return item | {"role": "assistant", "tool_calls": [decoded(one) for one in given]}


def _written(item: dict[str, Any]) -> list[dict[str, Any]]:
    """Makes messages from a message whose text has calls or tools' answers between Hermes tags. If
    the text between tags is not a call, the message is returned unchanged."""
    text = item["content"]
    if item["role"] == "assistant" and "tool_calls" not in item:
        calls = [_literal(one) for one in _ONE_CALL.findall(text)]
        rest = _ONE_CALL.sub("", text)
        if calls and all(_is_call(one) for one in calls) and "<tool_call>" not in rest:
            return [item | {"content": rest.strip() or None, "tool_calls": calls}]
    if item["role"] in ("tool", "user"):
        answers = _ONE_ANSWER.findall(text)
        if answers and not _ONE_ANSWER.sub("", text).strip():
            return [item | {"role": "tool", "content": answer} for answer in answers]
    return [item]


def _literal(text: str) -> Any:
    """The value of a text that is JSON or a Python literal."""
    found = decoded(text)
    if isinstance(found, str):
        try:
            found = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
    return found


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and "arguments" in value


def _anthropic(item: dict[str, Any], field: str) -> list[dict[str, Any]]:
    """The messages for one message whose content is a list of Anthropic's parts. A message without
    parts of the types tool_use, tool_result and thinking is returned unchanged."""
    parts = item["content"]
    kinds = {part.get("type") for part in parts if isinstance(part, dict)}
    if not kinds & {"tool_use", "tool_result", "thinking"}:
        return [item]
    found: list[dict[str, Any]] = []
    said: dict[str, Any] = item | {"content": []}
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        try:
            if kind == "tool_use":
                call = {"name": part["name"], "arguments": part["input"]}
                made = {"type": "function", "function": call}
                made |= {"id": part["id"]} if "id" in part else {}
                said["tool_calls"] = [*said.get("tool_calls", ()), made]
            elif kind == "thinking":
                said["reasoning_content"] = said.get("reasoning_content", "") + part["thinking"]
            elif kind == "tool_result":
                answer = {"role": "tool", "content": part.get("content") or ""}
                answer |= {"tool_call_id": part["tool_use_id"]} if "tool_use_id" in part else {}
                found.append(answer)
            else:
                said["content"].append(part)
        except (KeyError, TypeError) as error:
            problem = f"Anthropic's part {kind!r} lacks {error}; add it"
            raise InvalidInput(problem, field=f"{field}.content.{i}") from error
    if not said["content"]:
        said["content"] = None
    has_more = said["content"] or "tool_calls" in said or "reasoning_content" in said
    return [*found, said] if has_more else found
