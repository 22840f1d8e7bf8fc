"""Turns records of files into the forms that `tandem.data.examples` defines. The module imports no
numpy and no torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from tandem.data.columns import Record, answer, asked, json_value, led, text, turns
from tandem.data.conversations import chat
from tandem.data.examples import PreferencePair, SFTExample
from tandem.data.foreign_formats import other_format
from tandem.data.records import open_records
from tandem.errors import InvalidInput, from_validation_error

Kind = Literal["sft", "dpo"]


def _messages(record: Record) -> Record:
    name = next(name for name in ("messages", "conversations", "conversation") if name in record)
    messages, system = chat(record[name], name), text(record, "system")
    return {"messages": led(turns(system), messages)}


def _alpaca(record: Record) -> Record:
    return {"messages": asked(record) + answer(text(record, "output", "response", "answer"))}


def _prompt_completion(record: Record) -> Record:
    name = "completion" if record.get("completion") is not None else "response"
    return {"prompt": chat(record["prompt"], "prompt"), "completion": chat(record[name], name)}


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
    """The record of a pair, with the fields of PreferencePair. If `prompt` is a text, but `chosen`
    and `rejected` are lists of messages, the prompt becomes the user's message before both lists.
    If the lists repeat the prompt, the prompt is not added."""
    if "rejected_response" in record or "rejected_messages" in record:
        record = _swift(record)
    names = next(names for names in _CHOSEN_REJECTED if record.keys() >= set(names))
    chosen, rejected = (chat(record[name], name) for name in names)
    prompt: Any = chat(record.get("prompt"), "prompt")
    lead = turns(text(record, "system", "system_prompt"))
    before = chat(record.get("messages"), "messages")
    if record.get("conversations") is not None:
        prompt = chat(record["conversations"], "conversations")
    elif prompt is None and isinstance(before, list) and not _is_answered(before):
        prompt = before
    elif isinstance(record.get("input"), dict):
        prompt = chat(record["input"].get("messages"), "input.messages")
    elif any(record.get(name) is not None for name in ("instruction", "question", "input")):
        prompt = asked(record)
    elif isinstance(prompt, str) and (lead or isinstance(chosen, list)):
        prompt = turns("", prompt)
    if prompt is None:
        chosen, rejected = led(lead, chosen), led(lead, rejected)
    prompt = led(lead, prompt)
    if isinstance(prompt, list):
        chosen, rejected = (
            answer(half) if isinstance(half, str) else half for half in (chosen, rejected)
        )
        if isinstance(chosen, list) and len(chosen) > 1 and prompt[-1:] and prompt[-1] in chosen:
            # `chosen` and `rejected` repeat the prompt, or the prompt's last messages.
            repeated = len(chosen) - chosen[::-1].index(prompt[-1])
            missing = prompt[:-repeated] if prompt[-repeated:] == chosen[:repeated] else []
            prompt, chosen, rejected = None, led(missing, chosen), led(missing, rejected)
    return {"chosen": chosen, "rejected": rejected} | ({} if prompt is None else {"prompt": prompt})


def _is_answered(messages: list[Any]) -> bool:
    last = messages[-1] if messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def _swift(record: Record) -> Record:
    """The pair of an ms-swift record. The record's conversation ends with the chosen answer.
    Another column has the rejected answer, as messages or as a text. Argilla's column names
    `chosen_response` and `rejected_response` are accepted too."""
    if "chosen_response" in record:
        both = {"chosen": record["chosen_response"], "rejected": record["rejected_response"]}
        return {**record, **both}
    messages = chat(record["messages"], "messages")
    if not isinstance(messages, list) or not _is_answered(messages):
        raise InvalidInput("must end with the assistant's answer", field="messages")
    rejected = record.get("rejected_messages", record.get("rejected_response"))
    if isinstance(rejected, str):
        rejected = messages[:-1] + answer(rejected)
    return {
        **{name: value for name, value in record.items() if name != "messages"},
        "chosen": messages,
        "rejected": rejected,
    }


_CHOSEN_REJECTED = (
    ("chosen", "rejected"),
    ("preferred_output", "non_preferred_output"),
    ("chosen_response", "rejected_response"),
    ("messages", "rejected_response"),
    ("messages", "rejected_messages"),
)
# An empty list in one of the columns `_LISTS` is an error. An empty list in any other column counts
# as absent.
_LISTS = {"messages", "conversations", "chosen", "rejected", "prompt", "completion"}
_TEMPLATE = {"tools", "chat_template_kwargs", "enable_thinking"}
# Format -> (kind, conversion, sets of required columns, optional columns). A record must have all
# columns of at least one set of required columns.
FORMATS: dict[str, tuple[Kind, Callable[[Record], Record], tuple[set[str], ...], set[str]]] = {
    "messages": ("sft", _messages, ({"messages"},), {"system", *_TEMPLATE}),
    "sharegpt": (
        "sft",
        _messages,
        ({"conversations"}, {"conversation"}),
        {"system", *_TEMPLATE},
    ),
    "alpaca": (
        "sft",
        _alpaca,
        (
            {"instruction", "output"},
            {"instruction", "response"},
            {"question", "answer"},
            {"question", "response"},
            {"query", "response"},
        ),
        {"input", "context", "history", "system", "system_prompt", *_TEMPLATE},
    ),
    "prompt-completion": (
        "sft",
        _prompt_completion,
        ({"prompt", "completion"}, {"prompt", "response"}),
        _TEMPLATE,
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
            "messages",
            "prompt",
            "conversations",
            "input",
            "instruction",
            "question",
            "context",
            "history",
            "system",
            "system_prompt",
            *_TEMPLATE,
        },
    ),
}


class Examples:
    """The records of a file, or of a directory of the package datasets, as examples or pairs.

    `examples[i]` is a tuple: the record's place in the file, and the record with the fields of
    `SFTExample` or `PreferencePair`. Columns that the format does not use are left out, and named
    in `ignored`. Raises InvalidInput that names the file, the place and the field of the mistake.

    Args:
        path: a file, or a directory of the package datasets.
        format: one of `FORMATS`, or `auto` for the format of the first record.
        kind: "sft" for examples, "dpo" for pairs, None for either. Raises InvalidInput (field
            `--format`) if the format is for the other kind.
        template_kwargs: chat template variables for all conversations.
    """

    def __init__(
        self,
        path: str | Path,
        format: str = "auto",  # noqa: A002
        kind: Kind | None = None,
        template_kwargs: Record | None = None,
    ) -> None:
        self._template_kwargs = dict(template_kwargs or {})
        self.name, self._records = Path(path).name, open_records(Path(path))
        self._kind_asked = kind
        self.format = self._detect() if format == "auto" else format
        if self.format not in FORMATS:
            raise InvalidInput(
                f"{format!r} is not a format; use auto or one of {', '.join(FORMATS)}",
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

    @property
    def nulls(self) -> list[str]:
        """The places of rows from which a null was left out although the null may have a meaning.
        Only rows read so far are listed."""
        return list(getattr(self._records, "nulls", ()))

    def __getitem__(self, index: int) -> tuple[str, dict[str, Any]]:
        place, record = self._records[index]
        try:
            return place, self._convert(record)
        except InvalidInput as error:
            raise _at(place, error) from error

    def parse(self, index: int) -> tuple[str, SFTExample | PreferencePair]:
        """A record's place in the file, and the record, checked as the controller checks it."""
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
        given = _given(record)
        fits = any(needed <= given.keys() for needed in columns)
        if refused := other_format(given, fits=fits or bool(_fitting(given, None))):
            raise InvalidInput(refused[1], field=refused[0])
        if not fits:
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
        if more := _template_kwargs(given, self._template_kwargs, converted):
            converted["chat_template_kwargs"] = more
        if tools:
            tools = json_value(tools, "tools")
            converted["tools"] = (
                [json_value(tool, "tools") for tool in tools] if isinstance(tools, list) else tools
            )
            if not converted["tools"]:  # "[]"
                del converted["tools"]
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
        if isinstance(record, dict) and (refused := other_format(_given(record), fits=False)):
            raise InvalidInput(refused[1], field=f"{place}: {refused[0]}")
        asked = [item for item in FORMATS.items() if self._kind_asked in (None, item[1][0])]
        needs = "; ".join(f"{name}: {_needs(columns)}" for name, (_, _, columns, _) in asked)
        raise InvalidInput(
            f"{_listed(record)} fits no format. A record needs: {needs}", field=place
        )


def _given(record: Record) -> dict[str, Any]:
    """The columns that have a value. Column names are lower-cased, because the format oasst of
    Axolotl uses capitals. A name stays as it is if another column has the lower-case name. An empty
    list is left out, unless the column is in `_LISTS`."""
    return {
        name if name.lower() in record else name.lower(): value
        for name, value in record.items()
        if value is not None and (value != [] or name in _LISTS)
    }


def _template_kwargs(given: Record, all_of: Record, converted: Record) -> Any:
    """The template variables of a record. The record's `chat_template_kwargs` override verl's
    column `enable_thinking`. The record's variables override `all_of`, the variables of all
    conversations of the file."""
    more = json_value(given.get("chat_template_kwargs"), "chat_template_kwargs") or {}
    if not isinstance(more, dict):
        return more
    thinking = {name: given[name] for name in ("enable_thinking",) if name in given}
    chats = ("messages", "chosen", "completion")
    is_chat = any(isinstance(converted.get(name), list) for name in chats)
    return (dict(all_of) if is_chat else {}) | thinking | more


def _needs(columns: tuple[set[str], ...]) -> str:
    return " or ".join(" and ".join(sorted(names)) for names in columns)


def _fitting(record: Record, kind: Kind | None) -> list[str]:
    """The formats whose required columns the record has. A record with the columns `chosen` and
    `rejected` counts as a pair, even if it also has the columns of other formats."""
    given = _given(record).keys()
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
