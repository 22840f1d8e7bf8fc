"""Turns the records that people have into what `tandem.data.examples` describes. Imports no numpy
and no torch."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from tandem.data.examples import PreferencePair, SFTExample
from tandem.data.records import open_records
from tandem.errors import InvalidInput, from_validation_error

Kind = Literal["sft", "dpo"]
Record = Mapping[str, Any]
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
} | {role: role for role in ("system", "developer", "user", "assistant", "tool")}


def _chat(value: Any, field: str) -> Any:
    """Messages of a list of messages, or of one; each as OpenAI's {role, content} or sharegpt's
    {from, value}. Other values are checked with the example."""
    if isinstance(value, dict):
        value = [value]
    return (
        [_message(item, f"{field}.{i}") for i, item in enumerate(value)]
        if isinstance(value, list)
        else value
    )


def _message(item: Any, field: str) -> Any:
    if not isinstance(item, dict) or "from" not in item:
        return item
    item = dict(item)
    source, value = item.pop("from"), item.pop("value", None)
    if not isinstance(source, str) or source not in _ROLES:
        raise InvalidInput(
            f"{source!r} is no role; use one of {', '.join(_ROLES)}", field=f"{field}.from"
        )
    if not isinstance(value, str):
        raise InvalidInput(f"must be a text, not {value!r}", field=f"{field}.value")
    if source != "function_call":
        return {"role": _ROLES[source], "content": value} | item
    calls = _json(value, f"{field}.value")
    return {"role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]} | item


def _json(value: Any, field: str) -> Any:
    """The content of a column that has JSON as text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"not JSON: {error}", field=field) from error


def _text(record: Record, *names: str) -> str:
    """The first of these columns; "" where there is none."""
    name = next((name for name in names if record.get(name) is not None), None)
    value = "" if name is None else record[name]
    if not isinstance(value, str):
        raise InvalidInput(f"must be a text, not {value!r}", field=name)
    return value


def _turns(*contents: str) -> list[dict[str, Any]]:
    """system, user, assistant, user, ...; without the first where it is empty."""
    roles = ["system"] + ["user", "assistant"] * len(contents)
    turns = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]
    return turns if contents[0] else turns[1:]


def _answer(content: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": content}]


def _asked(record: Record) -> list[dict[str, Any]]:
    """The messages before the answer of an alpaca record, or of a question."""
    try:
        history = [
            text for question, answer in record.get("history") or () for text in (question, answer)
        ]
    except (TypeError, ValueError) as error:
        raise InvalidInput("must be a list of [question, answer]", field="history") from error
    given = _text(record, "input", "context")
    question = _text(record, "instruction", "question") + (f"\n{given}" if given else "")
    return _turns(_text(record, "system", "system_prompt"), *history, question)


def _messages(record: Record) -> Record:
    name = "messages" if record.get("messages") is not None else "conversations"
    messages, system = _chat(record[name], name), _text(record, "system")
    return {"messages": _led(_turns(system), messages)}


def _led(lead: list[dict[str, Any]], messages: Any) -> Any:
    """`messages` behind those of `lead`, unless they begin with them; what is no list stays as it
    is."""
    return lead + messages if isinstance(messages, list) and messages[:1] != lead else messages


def _alpaca(record: Record) -> Record:
    return {"messages": _asked(record) + _answer(_text(record, "output", "response", "answer"))}


def _prompt_completion(record: Record) -> Record:
    if "label" in record:
        problem = "completions that are labelled good or bad (KTO) are not trained"
        raise InvalidInput(f"{problem}; keep the good ones and leave out the column", field="label")
    name = "completion" if record.get("completion") is not None else "response"
    return {"prompt": _chat(record["prompt"], "prompt"), "completion": _chat(record[name], name)}


def _tokens(record: Record) -> Record:
    if "token_ids" in record:
        return {
            name: record[name]
            for name in ("token_ids", "trainable", "weights", "targets")
            if name in record
        }
    ids, labels = record["input_ids"], record["labels"]
    if not isinstance(ids, list) or not isinstance(labels, list) or len(ids) != len(labels):
        raise InvalidInput("must be a list with a label for each of input_ids", field="labels")
    for i, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (-100, token):
            raise InvalidInput(
                f"{label} is neither -100 nor the token {token} itself", field=f"labels.{i}"
            )
    return {
        "token_ids": ids,
        "trainable": [i > 0 and label != -100 for i, label in enumerate(labels)],
    }


def _preference(record: Record) -> Record:
    """`prompt` as a text beside chosen and rejected as messages is the user's message before them,
    or repeats it."""
    chosen, rejected = (
        _chat(record[name], name) for name in _CHOSEN_REJECTED[record.get("chosen") is None]
    )
    prompt: Any = _chat(record.get("prompt"), "prompt")
    lead = _turns(_text(record, "system", "system_prompt"))
    if record.get("conversations") is not None:
        prompt = _chat(record["conversations"], "conversations")
    elif isinstance(record.get("input"), dict):
        prompt = _chat(record["input"].get("messages"), "input.messages")
    elif record.get("instruction") is not None or record.get("question") is not None:
        prompt = _asked(record)
    elif isinstance(prompt, str) and (lead or isinstance(chosen, list)):
        prompt = _turns("", prompt)
    if prompt is None:
        chosen, rejected = _led(lead, chosen), _led(lead, rejected)
    prompt = _led(lead, prompt)
    if isinstance(prompt, list):
        chosen, rejected = (
            _answer(half) if isinstance(half, str) else half for half in (chosen, rejected)
        )
        if isinstance(chosen, list) and len(chosen) > 1 and prompt[-1:] and prompt[-1] in chosen:
            # Both repeat the prompt, or its end.
            repeated = len(chosen) - chosen[::-1].index(prompt[-1])
            missing = prompt[:-repeated] if prompt[-repeated:] == chosen[:repeated] else []
            prompt, chosen, rejected = None, _led(missing, chosen), _led(missing, rejected)
    return {"chosen": chosen, "rejected": rejected} | ({} if prompt is None else {"prompt": prompt})


_CHOSEN_REJECTED = ("chosen", "rejected"), ("preferred_output", "non_preferred_output")
# Format -> its kind, its conversion, the columns of which a record has all of one set, and other
# ones that are used.
FORMATS: dict[str, tuple[Kind, Callable[[Record], Record], tuple[set[str], ...], set[str]]] = {
    "messages": ("sft", _messages, ({"messages"},), {"system", "tools"}),
    "sharegpt": ("sft", _messages, ({"conversations"},), {"system", "tools"}),
    "alpaca": (
        "sft",
        _alpaca,
        ({"instruction", "output"}, {"instruction", "response"}, {"question", "answer"}),
        {"input", "context", "history", "system", "system_prompt", "tools"},
    ),
    "prompt-completion": (
        "sft",
        _prompt_completion,
        ({"prompt", "completion"}, {"prompt", "response"}),
        {"tools", "label"},
    ),
    "text": ("sft", lambda record: {"text": record["text"]}, ({"text"},), set()),
    "tokens": (
        "sft",
        _tokens,
        ({"token_ids"}, {"input_ids", "labels"}),
        {"trainable", "weights", "targets"},
    ),
    "preference": (
        "dpo",
        _preference,
        tuple(map(set, _CHOSEN_REJECTED)),
        {
            "prompt",
            "conversations",
            "input",
            "instruction",
            "question",
            "context",
            "history",
            "system",
            "system_prompt",
            "tools",
        },
    ),
}


class Examples:
    """The records of a file, or of a directory of the package datasets, as examples (`kind` "sft")
    or pairs ("dpo").

    `format`: one of `FORMATS`, or auto for the one that the first record has. `examples[i]` is a
    record's place and the record in the shape of `SFTExample` or `PreferencePair`, without columns
    that its format does not know (`ignored`). InvalidInput names file, place and field of what is
    wrong.
    """

    def __init__(
        self,
        path: str | Path,
        format: str = "auto",  # noqa: A002
        kind: Kind | None = None,
    ) -> None:
        self.name, self._records = Path(path).name, open_records(Path(path))
        self._kind_asked = kind
        self.format = self._detect() if format == "auto" else format
        if self.format not in FORMATS:
            raise InvalidInput(
                f"{format!r} is no format; use auto or one of {', '.join(FORMATS)}",
                field="--format",
            )
        self.kind: Kind = FORMATS[self.format][0]
        if kind not in (None, self.kind):
            wanted = ", ".join(name for name, (of, *_) in FORMATS.items() if of == kind)
            raise InvalidInput(
                f"{self.format} is not for this command; it takes {wanted}", field="--format"
            )
        self.ignored: set[str] = set()

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> tuple[str, dict[str, Any]]:
        place, record = self._records[index]
        try:
            return place, self._convert(record)
        except InvalidInput as error:
            raise _at(place, error) from error

    def parse(self, index: int) -> tuple[str, SFTExample | PreferencePair]:
        """A record's place, and the record checked as the controller checks it."""
        place, record = self[index]
        model: type[SFTExample | PreferencePair] = (
            SFTExample if self.kind == "sft" else PreferencePair
        )
        try:
            return place, model.model_validate(record)
        except ValidationError as error:
            raise _at(place, from_validation_error(error)) from error

    def _convert(self, record: Any) -> dict[str, Any]:
        _, convert, columns, more = FORMATS[self.format]
        if not isinstance(record, dict):
            raise InvalidInput(f"a record must be an object, not {type(record).__name__}")
        given = {name: value for name, value in record.items() if value is not None}
        if not any(needed <= given.keys() for needed in columns):
            others = _fitting(given, self._kind_asked)
            found = (
                f"it is {others[0]}, and a file has one format"
                if others
                else f"it has {_listed(record)}"
            )
            problem = (
                f"the file's format is {self.format}, so this record needs {_needs(columns)}, but"
                f" {found}"
            )
            raise InvalidInput(
                f"{problem}; correct it or leave it out", field=sorted(columns[0])[0]
            )
        used = more.union(*columns, {"weight"} if self.kind == "sft" else ())
        self.ignored |= given.keys() - used
        given = {name: value for name, value in given.items() if name in used}
        tools = given.get("tools") or (
            given["input"].get("tools") if isinstance(given.get("input"), dict) else None
        )
        converted = {
            **convert(given),
            **{name: given[name] for name in ("weight",) if name in given},
        }
        if tools:
            tools = _json(tools, "tools")
            converted["tools"] = (
                [_json(tool, "tools") for tool in tools] if isinstance(tools, list) else tools
            )
        return converted

    def _detect(self) -> str:
        if not len(self._records):
            raise InvalidInput("there is no record in it", field="FILE")
        place, record = self._records[0]
        fitting = _fitting(record, self._kind_asked) if isinstance(record, dict) else []
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise InvalidInput(
                f"fits the formats {' and '.join(fitting)}; name one with --format", field=place
            )
        asked = [item for item in FORMATS.items() if self._kind_asked in (None, item[1][0])]
        needs = "; ".join(f"{name}: {_needs(columns)}" for name, (_, _, columns, _) in asked)
        raise InvalidInput(
            f"{_listed(record)} fits no format. A record needs: {needs}", field=place
        )


def _needs(columns: tuple[set[str], ...]) -> str:
    return " or ".join(" and ".join(sorted(names)) for names in columns)


def _fitting(record: Record, kind: Kind | None) -> list[str]:
    """The formats of which a record has all columns. One with chosen and rejected is a pair,
    whatever else it has."""
    given = {name for name, value in record.items() if value is not None}
    fitting = [
        name
        for name, (of, _, columns, _) in FORMATS.items()
        if kind in (None, of) and any(needed <= given for needed in columns)
    ]
    return ["preference"] if "preference" in fitting else fitting


def _listed(record: Any) -> str:
    return (
        ", ".join(map(repr, record)) or "nothing"
        if isinstance(record, dict)
        else type(record).__name__
    )


def _at(place: str, error: InvalidInput) -> InvalidInput:
    return InvalidInput(error.message, field=f"{place}: {error.field}" if error.field else place)
