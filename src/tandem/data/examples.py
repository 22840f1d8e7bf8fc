"""The input for SFT and preference training: conversations, texts and tokens. `tandem.data.render`
turns the input into tokens. The module imports no numpy and no torch."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tandem.data import dialects
from tandem.data.dialects import REASONING
from tandem.data.inputs import (
    LOWEST_WEIGHT,
    MOST_ITEMS,
    MOST_KEYS,
    Name,
    StrictFloat,
    Text,
    TokenIds,
)
from tandem.spool.schema import Record

LARGEST_WEIGHT = 1e30
StrictBool = Annotated[bool, Field(strict=True)]


def _check_json(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"can't be written as JSON: {exc}") from exc
    return value


def _parsed(value: Any) -> Any:
    found = {} if value in (None, "") else dialects.decoded(value)
    if isinstance(found, str):
        try:
            json.loads(found)
        except (ValueError, RecursionError) as exc:
            raise ValueError(f"neither a JSON object nor the text of one: {exc}") from exc
    return {} if found is None else found


def _joined(content: Any) -> Any:
    """The text of a list of content parts, joined as vLLM joins the parts."""
    if not isinstance(content, list):
        return content
    for i, part in enumerate(content):
        if (
            not isinstance(part, dict)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(
                f"part {i} is {kind!r}; only parts {{type: text, text: ...}} are trained, so leave"
                " it out"
            )
    return "\n".join(part["text"] for part in content)


JsonObject = Annotated[
    dict[Name, JsonValue], Field(max_length=MOST_KEYS), AfterValidator(_check_json)
]


class FunctionCall(Record):
    """A call of a function. `arguments`: a JSON object, or its JSON text as in OpenAI's form."""

    name: Name = Field(min_length=1)
    arguments: Annotated[JsonObject, BeforeValidator(_parsed)] = Field(default_factory=dict)


class ToolCall(Record):
    """A call in OpenAI's form; a plain `{name, arguments}` is accepted too."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, value: Any) -> Any:
        return dialects.call(value)


class Message(Record):
    """A message in OpenAI's form. `content`: text, or a list of text parts; for a tool message any
    JSON. `reasoning_content` may be called `reasoning` or `thinking`, and `tool_calls` may be
    called `function_call`. Keys without a value count as absent. An assistant's message with
    `weight` 0 or `train` false is context only.
    """

    role: Name = Field(min_length=1)
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_KEYS)] | None = None
    tool_call_id: Name | None = None
    name: Name | None = None
    reasoning_content: Text | None = None
    weight: Literal[0, 1] | None = None
    train: StrictBool | None = None
    content: Annotated[Text | None, BeforeValidator(_joined)] = Field(
        default=None, validate_default=True
    )

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, value: Any) -> Any:
        return dialects.message(value)

    @field_validator("tool_calls", "reasoning_content", "weight", "train")
    @classmethod
    def _of_the_assistant(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("role", "assistant") != "assistant":
            raise ValueError("only a message with the role assistant can have this; leave it out")
        return value

    @field_validator("content")
    @classmethod
    def _content(cls, content: str | None, info: ValidationInfo) -> str | None:
        if (
            content is None
            and not info.data.get("tool_calls")
            and not info.data.get("reasoning_content")
        ):
            raise ValueError("required: the message has neither content nor tool_calls")
        return content

    @property
    def trained(self) -> bool:
        return self.role == "assistant" and self.weight != 0 and self.train is not False

    def for_template(self) -> dict[str, Any]:
        """The message in the form in which vLLM passes it to a chat template. The reasoning appears
        under each of the names that templates read."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump(exclude_none=True) for call in self.tool_calls]
        if self.reasoning_content is not None:
            message |= dict.fromkeys(REASONING, self.reasoning_content)
        more = {"tool_call_id": self.tool_call_id, "name": self.name}
        return message | {key: value for key, value in more.items() if value is not None}


# Pydantic's error paths contain the tags of `TextOrMessages`; `errors.from_validation_error`
# removes the tags.
Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)]
TextOrMessages = Annotated[
    Annotated[Text, Tag("as text")] | Annotated[Messages, Tag("as messages")],
    Discriminator(lambda value: "as messages" if isinstance(value, list) else "as text"),
]


Tools = Annotated[
    list[Annotated[JsonObject, BeforeValidator(dialects.tool)]],
    Field(max_length=MOST_KEYS),
]
_LONG = Field(fail_fast=True, max_length=MOST_ITEMS)
_FORMS = (
    {"messages"},
    {"prompt", "completion"},
    {"text"},
    {"token_ids", "trainable"},
    {"token_ids", "weights"},
)
_MORE = {"weight", "tools", "chat_template_kwargs", "targets"}


def _check_no_template(item: "SFTExample | PreferencePair") -> None:
    for name in ("tools", "chat_template_kwargs"):
        if getattr(item, name):
            raise ValueError(f"{name} go with messages only; leave them out")


class SFTExample(Record):
    """An example for SFT, in one of the following forms:

    - `messages`, and optionally `tools` and `chat_template_kwargs` (variables for the chat
      template, as in vLLM's requests): the assistant's messages are trained;
    - `prompt` and `completion`, both texts, or both lists of messages with optional `tools`: the
      completion is trained;
    - `text`: everything but its first token is trained;
    - `token_ids` with `trainable`, a flag for each token (the first flag is false, since nothing
      predicts the first token);
    - `token_ids` with `weights`, a factor for each token's loss (the first factor is 0). Factors
      may be negative. The optional `targets` changes the tokens to predict: `targets[i]` is
      predicted in place of `token_ids[i]`.

    `weight` multiplies the loss of each trained token."""

    messages: Messages | None = None
    tools: Annotated[Tools | None, BeforeValidator(dialects.tools)] = None
    chat_template_kwargs: JsonObject | None = None
    prompt: TextOrMessages | None = None
    completion: TextOrMessages | None = None
    text: Text | None = Field(default=None, min_length=1)
    token_ids: TokenIds | None = Field(default=None, min_length=2)
    trainable: Annotated[list[StrictBool], _LONG] | None = None
    weights: Annotated[list[StrictFloat], _LONG] | None = None
    targets: TokenIds | None = None
    weight: StrictFloat = Field(default=1.0, ge=LOWEST_WEIGHT)

    @field_validator("messages", "completion")
    @classmethod
    def _has_assistant(cls, messages: Any) -> Any:
        if isinstance(messages, list) and not any(message.trained for message in messages):
            excluded = any(message.role == "assistant" for message in messages)
            why = (
                ": all have weight 0 or train false"
                if excluded
                else ", so there is nothing to train"
            )
            raise ValueError("there is no assistant message to train" + why)
        if messages == "":
            raise ValueError("empty, so there is nothing to train")
        return messages

    @field_validator("trainable", "weights", "targets")
    @classmethod
    def _per_token(cls, values: list[Any] | None, info: ValidationInfo) -> list[Any] | None:
        ids = info.data.get("token_ids")
        if values is None or ids is None:
            return values
        if len(values) != len(ids):
            what = {"trainable": "flags", "weights": "weights"}.get(
                info.field_name or "", "targets"
            )
            raise ValueError(
                f"{len(values)} {what} for {len(ids)} token ids; there must be one for each"
            )
        if info.field_name == "targets":
            return values
        if not any(values):
            raise ValueError("no token is trainable")
        if values[0]:
            raise ValueError(
                "the first token can't be trained, since no token predicts it; set it to false or 0"
            )
        for i, value in enumerate(values if info.field_name == "weights" else ()):
            if value and not LOWEST_WEIGHT <= abs(value) <= LARGEST_WEIGHT:
                allowed = f"0, or from {LOWEST_WEIGHT:g} to {LARGEST_WEIGHT:g} and of either sign"
                raise ValueError(f"{value} at index {i} is out of range; give {allowed}")
        return values

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        given = {name for name in self.model_fields_set - _MORE if getattr(self, name) is not None}
        if given not in _FORMS:
            tokens = "token_ids and trainable, or token_ids and weights"
            raise ValueError(
                f"give either messages, or prompt and completion, or text, or {tokens}"
            )
        if isinstance(self.prompt, str) != isinstance(self.completion, str):
            raise ValueError(
                "prompt and completion must both be texts, or both be lists of messages"
            )
        if not isinstance(self.prompt, list) and self.messages is None:
            _check_no_template(self)
        if self.targets is not None and self.weights is None:
            raise ValueError("targets go with weights only; give weights")
        return self


class PreferencePair(Record):
    """Two completions of a prompt: `chosen` is better than `rejected`. `prompt`, `chosen` and
    `rejected` are all texts, or all lists of messages. Without `prompt`, the common beginning of
    `chosen` and `rejected` is the prompt. A completion that is a list of messages begins and ends
    with an assistant's message. Tools' answers inside a completion are context.
    """

    prompt: TextOrMessages | None = None
    chosen: TextOrMessages
    rejected: TextOrMessages
    tools: Annotated[Tools | None, BeforeValidator(dialects.tools)] = None
    chat_template_kwargs: JsonObject | None = None

    @model_validator(mode="after")
    def _like_each_other(self) -> Self:
        parts = [part for part in (self.prompt, self.chosen, self.rejected) if part is not None]
        if len({isinstance(part, str) for part in parts}) == 2:
            raise ValueError(
                "prompt, chosen and rejected must all be texts, or all be lists of messages"
            )
        if self.chosen == self.rejected:
            raise ValueError("chosen and rejected are the same, so there is nothing to prefer")
        if "" in (self.chosen, self.rejected):
            raise ValueError("chosen or rejected is empty")
        if isinstance(self.chosen, str):
            _check_no_template(self)
        if isinstance(self.chosen, list):
            for name, (_, completion) in zip(
                ("chosen", "rejected"), self.conversations(), strict=True
            ):
                roles = [message.role for message in completion]
                ends = {*roles[:1], *roles[-1:]}
                if ends != {"assistant"} or not {"assistant", "tool"}.issuperset(roles):
                    raise ValueError(
                        f"{name} must be the assistant's messages, with tools' answers between"
                        f" them, after what the two have in common, but is {roles}"
                    )
        return self

    def conversations(self) -> list[tuple[list[Message], list[Message]]]:
        """`chosen` and `rejected`, each as a tuple (the prompt's messages, the completion's
        messages)."""
        chosen, rejected = list(self.chosen), list(self.rejected)
        prompt = list(self.prompt or [])
        while self.prompt is None and chosen and rejected and chosen[0] == rejected[0]:
            prompt.append(chosen.pop(0))
            rejected.pop(0)
        return [(prompt, chosen), (prompt, rejected)]  # type: ignore[list-item]


class Rendering(Record):
    """A preview of an example or a pair: how it is trained, or why it is refused.

    Attributes:
        `parts`: for each sequence, tuples (text, the text's weight in the loss). Context has the
            weight 0. A pair has two sequences.
        `lengths`: the number of tokens of each sequence.
        `slots`: the slots that a row needs for the longest sequence. A pair needs the slots of both
            sequences, and their common beginning counts once.
        `trained`: the number of trained tokens.
        `left_out`: the parts that the chat template does not render: "reasoning" of a trained
            message, or "tools".
        `trained_turns`: the number of trained turns of a conversation.
        `endless_turns`: the number of trained turns that do not end with a token at which vLLM
            stops.
        `empty_thoughts`: the number of trained turns with an empty `<think>` block.
        `control_tokens`: for each special token, how often messages contain the token's text. The
            tokenizer turns a special token's text into the special token.
        `endless`: a message that says what to do about `endless_turns`.
        `date`: today's date, if the template prints it.
        `error`: why the example is refused; `field` names the wrong value.
    """

    parts: list[list[tuple[str, float]]] = Field(default_factory=list)
    lengths: list[int] = Field(default_factory=list)
    slots: int = 0
    trained: int = 0
    left_out: list[str] = Field(default_factory=list)
    trained_turns: int = 0
    endless_turns: int = 0
    empty_thoughts: int = 0
    control_tokens: dict[str, int] = Field(default_factory=dict)
    endless: str | None = None
    date: str | None = None
    error: str | None = None
    field: str | None = None
