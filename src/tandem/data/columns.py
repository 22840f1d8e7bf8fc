"""Reads columns of a record: texts, JSON, and columns that become messages. The module imports no
numpy and no torch."""

import json
from collections.abc import Mapping
from typing import Any

from tandem.errors import InvalidInput

Record = Mapping[str, Any]


def json_value(value: Any, field: str) -> Any:
    """The value of a column that holds JSON as text. Raises InvalidInput (field `field`) if the
    text is not JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"not JSON: {error}", field=field) from error


def text(record: Record, *names: str) -> str:
    """The text of the first column in `names` that has a value; "" if none has a value. Raises
    InvalidInput if the value is not a text."""
    name = next((name for name in names if record.get(name) is not None), None)
    value = "" if name is None else record[name]
    if not isinstance(value, str):
        raise InvalidInput(f"must be a text, not {value!r}", field=name)
    return value


def turns(*contents: str) -> list[dict[str, Any]]:
    """A message for each of `contents`, with the roles system, user, assistant, user, assistant and
    so on. An empty system message is left out."""
    roles = ["system"] + ["user", "assistant"] * len(contents)
    found = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]
    return found if contents[0] else found[1:]


def answer(content: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": content}]


def asked(record: Record) -> list[dict[str, Any]]:
    """The messages before the answer, made from an alpaca record or from a record with a question.
    Raises InvalidInput if the column `history` is not a list of [question, answer]."""
    try:
        history = [
            part for question, reply in record.get("history") or () for part in (question, reply)
        ]
    except (TypeError, ValueError) as error:
        raise InvalidInput("must be a list of [question, answer]", field="history") from error
    given = text(record, "input", "context")
    question = text(record, "instruction", "question", "query")
    question = f"{question}\n{given}" if question and given else question or given
    return turns(text(record, "system", "system_prompt"), *history, question)


def led(lead: list[dict[str, Any]], messages: Any) -> Any:
    """`lead` followed by `messages`, unless `messages` already begins with `lead`. If `messages` is
    not a list, it is returned unchanged."""
    return lead + messages if isinstance(messages, list) and messages[:1] != lead else messages
