"""Converts other forms of a message, a call or a tool to OpenAI's form. The module imports no numpy
and no torch.

A value in an unknown form stays unchanged, so that `tandem.data.examples` refuses the value.
"""

import json
from typing import Any

REASONING = ("reasoning_content", "reasoning", "thinking")
"""The keys under which clients and templates store a message's reasoning."""
_PLAIN = {"role", "content"}
# Maximum number of nested JSON encodings of a value.
_ENCODINGS = 3


def decoded(value: Any) -> Any:
    """The value of JSON text that was encoded once or several times (at most _ENCODINGS). Text that
    is not JSON is returned unchanged."""
    for _ in range(_ENCODINGS):
        if not isinstance(value, str):
            break
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            break
    return value


def message(item: Any) -> Any:
    """A message with OpenAI's keys. Keys without a value are left out."""
    if not isinstance(item, dict) or (
        item.keys() == _PLAIN and isinstance(item["content"], str) and item["role"] != "function"
    ):
        return item
    made = {key: value for key, value in item.items() if value not in (None, "", [], {})}
    # The content of a tool message may be an empty value.
    made |= {key: item[key] for key in ("role", "content") if item.get(key) is not None}
    _say_reasoning(made)
    _say_calls(made)
    if made.get("role") == "function":
        made["role"] = "tool"
    content = made.get("content")
    if made.get("role") == "tool" and not isinstance(content, str) and not _is_parts(content):
        made["content"] = json.dumps(content, ensure_ascii=False)
    return made


def _say_reasoning(made: dict[str, Any]) -> None:
    said = {name: made.pop(name) for name in REASONING if name in made}
    if len({str(value) for value in said.values()}) > 1:
        raise ValueError(f"{' and '.join(said)} differ; keep one of them")
    if said:
        made["reasoning_content"] = next(iter(said.values()))


def _say_calls(made: dict[str, Any]) -> None:
    """Turns OpenAI's older key `function_call`, and calls in JSON text, into `tool_calls`."""
    if "function_call" in made and "tool_calls" not in made:
        made["tool_calls"] = [made.pop("function_call")]
    calls = decoded(made.get("tool_calls"))
    if isinstance(calls, dict):
        calls = [calls]
    if isinstance(calls, list):
        made["tool_calls"] = [decoded(call) for call in calls]
    if calls in ([], None):
        made.pop("tool_calls", None)


def _is_parts(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("type"), str) for part in content
    )


def call(value: Any) -> Any:
    """A call in OpenAI's form; a plain `{name, arguments}` is accepted too."""
    if not isinstance(value, dict):
        return value
    if "function" not in value and "name" in value:
        return {"function": value}
    # A streamed call also has the key `index`.
    kept = {key: one for key, one in value.items() if key != "index" and one is not None}
    if isinstance(kept.get("function"), str):
        kept["function"] = decoded(kept["function"])
    return kept


def tool(value: Any) -> Any:
    """A tool in the form in which vLLM renders it: fixed keys in a fixed order, null for an absent
    key. The key `strict` is left out, because vLLM's path /rollout/v1 removes the key. A plain
    `{name, parameters}` and Anthropic's form are accepted too."""
    value = decoded(value)
    if not isinstance(value, dict):
        return value
    function = decoded(value.get("function", value))
    if not isinstance(function, dict) or "name" not in function:
        return value
    parameters = function.get("parameters", function.get("input_schema"))
    rendered = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": parameters,
    }
    return {"type": "function", "function": rendered}


def tools(value: Any) -> Any:
    """A list of tools; None if there are none."""
    value = decoded(value)
    return None if value in ([], {}, "") else value
