"""Checks the lines of an uploaded file. Each line is a conversation or a pair of answers, in
OpenAI's JSON format."""

import json
import re
from pathlib import Path
from typing import Any

from tandem.controller.openai.errors import BadRequest
from tandem.data.formats import Examples
from tandem.errors import InvalidInput
from tandem.spool.schema.tuning import ULID, TuningMethod
from tandem.system.plain_files import open_plain

LINE_BYTES = 4 * 2**20
FORMATS = {"supervised": "messages", "dpo": "preference"}
"""The names of the formats in `tandem.data.formats`."""
_OURS = re.compile(rf"file-{ULID}\.jsonl line (\d+)[.:]? *")
_CODE = "invalid_file_format"
_KEYS = {
    "supervised": {"messages", "tools", "parallel_tool_calls"},
    "dpo": {"input", "preferred_output", "non_preferred_output"},
}
_INPUT_KEYS = {"messages", "tools", "parallel_tool_calls"}
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_HINTS = {
    "functions": "give tools and tool_calls, which replaced functions",
    "prompt": 'a conversation is {"messages": [...]}, a pair has input, preferred_output and'
    " non_preferred_output",
}


def check_lines(path: Path) -> tuple[TuningMethod, int]:
    """Returns the fine-tuning method that fits the file, and the number of the file's non-blank
    lines. Raises BadRequest that names the first bad line."""
    method: TuningMethod | None = None
    count, number = 0, 0
    with open_plain(path) as file:
        while line := file.readline(LINE_BYTES + 1):
            number += 1
            if len(line) > LINE_BYTES:
                raise _bad(number, f"it has more than {LINE_BYTES} bytes; split the example")
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.isspace() or not line:
                continue
            record = _record(line, number)
            found: TuningMethod = "dpo" if "preferred_output" in record else "supervised"
            if method not in (None, found):
                kinds = "conversations and pairs can't be in one file"
                raise _bad(number, f"{kinds}, and the first line is for {method}")
            method = found
            _check_record(record, method, number)
            count += 1
    if method is None:
        raise BadRequest(
            "the file is empty; give an example in each line", param="file", code=_CODE
        )
    _check_shapes(path, method)
    return method, count


def _record(line: bytes, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        start = line[:40].decode(errors="replace").strip()
        problem = f"it is not JSON ({error}); it starts with {start!r}"
        raise _bad(number, f"{problem}. Every line is one JSON object (JSON lines)") from error
    if not isinstance(record, dict):
        raise _bad(number, f"it is a {type(record).__name__}; every line is one JSON object")
    return record


def _check_record(record: dict[str, Any], method: TuningMethod, number: int) -> None:
    """Refuses a record that `tandem.data` would ignore or would read in another format."""
    if unknown := sorted(record.keys() - _KEYS[method]):
        hint = _HINTS.get(unknown[0], "remove it")
        raise _bad(number, f"{unknown[0][:64]!r} is not a key of an example for {method}; {hint}")
    conversations = {"messages": record.get("messages")}
    if method == "dpo":
        if missing := sorted(_KEYS["dpo"] - record.keys()):
            raise _bad(number, f"{missing[0]} is missing; add it")
        if not isinstance(record["input"], dict):
            raise _bad(number, "input must be an object with messages")
        if unknown := sorted(record["input"].keys() - _INPUT_KEYS):
            raise _bad(number, f"input.{unknown[0][:64]} is not a key of input; remove it")
        conversations = {
            "input.messages": record["input"].get("messages"),
            "preferred_output": record["preferred_output"],
            "non_preferred_output": record["non_preferred_output"],
        }
    for name, messages in conversations.items():
        if not isinstance(messages, list) or not messages:
            raise _bad(number, f"{name} must be a list of messages, and not empty")
        for i, message in enumerate(messages):
            role = message.get("role") if isinstance(message, dict) else None
            if role not in _ROLES:
                shown = repr(role)[:64]
                roles = ", ".join(sorted(_ROLES))
                raise _bad(number, f"{name}.{i}.role is {shown}; use one of {roles}")


def _check_shapes(path: Path, method: TuningMethod) -> None:
    """Refuses a record that no job can train. The controller checks the examples and pairs of
    requests to Tandem's own API in the same way."""
    try:
        examples = Examples(path, FORMATS[method], "sft" if method == "supervised" else "dpo")
        for index in range(len(examples)):
            examples.parse(index)
    except InvalidInput as error:
        raise BadRequest(in_lines(error), param="file", code=_CODE) from error


def in_lines(error: InvalidInput) -> str:
    """The message of `error` without the name of Tandem's own file. For example, the result begins
    with `line 3:` instead of `file-<id>.jsonl line 3:`."""
    return _OURS.sub(r"line \1: ", str(error), count=1)


def _bad(number: int, problem: str) -> BadRequest:
    return BadRequest(f"line {number}: {problem}", param="file", code=_CODE)
