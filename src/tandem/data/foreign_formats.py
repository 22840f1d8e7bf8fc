"""Recognises formats of other tools that Tandem does not read, and says how to convert them. The
module imports no numpy and no torch."""

from collections.abc import Mapping
from typing import Any

_SAMPLES = "`tandem rl` samples answers and rewards them"
_JOIN = "join the right steps, and give prompt and completion"
_EXACT = "give token_ids and trainable, or prompt and completion"
_GOOD_OR_BAD = "of KTO", "keep the good ones and leave out the column"
_PICTURES = (
    "with pictures or sound",
    "Tandem trains texts: leave out the record, or the column and its placeholders",
)
_PROMPTS = "write it as instruction (with all that the prompt says) and output"
type _Formats = list[tuple[set[str], str, str]]
# For each format: columns that a record of the format has, the format's name, and how to convert
# the format. Without `_MISREAD`, records of foreign formats would be read as one of Tandem's
# formats.
_MISREAD: _Formats = [
    ({"kto_tag"}, *_GOOD_OR_BAD),
    ({"prompt", "completions", "labels"}, "TRL's stepwise supervision", _JOIN),
    ({"article", "question"}, "Axolotl's context_qa", _PROMPTS),
    ({"instruction", "output", "reflection"}, "Axolotl's reflection", _PROMPTS),
    *(
        ({"messages", column}, "ms-swift's for embedding models", "Tandem trains no such models")
        for column in ("positive_messages", "negative_messages")
    ),
    *(({column}, *_PICTURES) for column in ("images", "image", "videos", "audios", "objects")),
]
_UNREAD: _Formats = [
    ({"segments"}, "Axolotl's template-free input_output", _EXACT),
    ({"prompt", "generation"}, "Axolotl's metharme", "rename generation to completion"),
    ({"message_1", "message_2"}, "Axolotl's load_camel_ai", "give messages"),
    ({"question", "choices", "solution"}, "Axolotl's explainchoice", _PROMPTS),
    ({"article", "summary"}, "Axolotl's summarizetldr", _PROMPTS),
    ({"article", "unanswerable_question"}, "Axolotl's context_qa", _PROMPTS),
    ({"instruction", "revision"}, "Axolotl's creative_acr", _PROMPTS),
    ({"instruction", "critiques"}, "Axolotl's creative_acr", _PROMPTS),
    (
        {"data_source", "prompt", "reward_model"},
        "verl's for RL",
        f"{_SAMPLES}; for SFT write the answer as a column response",
    ),
    (
        {"prompt", "answer"},
        "that of GRPO's prompts",
        f"{_SAMPLES}; to train the answer, rename its column to completion",
    ),
    ({"prompt"}, "TRL's prompt-only", f"it has no answer to train; {_SAMPLES}"),
]


def other_format(given: Mapping[str, Any], *, fits: bool) -> tuple[str, str] | None:
    """The column that identifies the foreign format, and the refusal's message; None if the record
    has no foreign format. `given`: the record's columns that have a value; `fits`: whether the
    record has the columns of a format that Tandem reads."""
    if isinstance(given.get("label"), int):  # an integer label is KTO's; a text label is a topic
        return "label", _said(*_GOOD_OR_BAD)
    for columns, name, remedy in _MISREAD if fits else [*_MISREAD, *_UNREAD]:
        if columns <= given.keys():
            return sorted(columns)[-1], _said(name, remedy)
    return None


def _said(name: str, remedy: str) -> str:
    return f"the record's format is {name}; {remedy}"
