"""Broken data files are refused with a message that names the place and the field and says what to
do."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.data.formats import Examples
from tandem.errors import InvalidInput

ASK, ANSWER = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
GOOD = {"messages": [ASK, ANSWER]}
HUMAN, GPT = {"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}


def call(**function: Any) -> dict[str, Any]:
    return {"messages": [ASK, {"role": "assistant", "tool_calls": [{"function": function}]}]}


# Each case has the file's name, the file's content (bytes, a text, or records that become lines), a
# part of the place that the error names, and a pattern of the error's text.
CASES: list[tuple[str, Any, str, str]] = [
    ("empty.jsonl", "", "FILE", "no record"),
    ("blank.jsonl", "\n \n", "FILE", "no record"),
    ("empty.json", "[]", "FILE", "no record"),
    ("data.jsonl.gz", b"\x1f\x8b\x08\x00", "FILE", "gzip.*unpack"),
    ("data.zip", b"PK\x03\x04", "FILE", "zip.*unpack"),
    ("data.csv", "prompt,completion\na,b\n", "FILE", "is a table; save it as JSON lines"),
    ("data.parquet", b"PAR1 and no more", "FILE", "can't read data.parquet"),
    ("comma.jsonl", '{"text": "a"}\n{"text": "b",}\n', "line 2", "not JSON: .*column"),
    ("blank.jsonl", '{"text": "a"}\n\n\n{"text": \n', "line 4", "not JSON"),
    ("quotes.jsonl", "{'text': 'a'}\n", "line 1", "not JSON"),
    ("array.json", '[{"text": "a"}, {"text": ', "array.json", "not JSON"),
    ("nan.jsonl", '{"token_ids": [1, 2], "weights": [0, NaN]}\n', "line 1", "NaN is not a number"),
    ("deep.jsonl", '{"text": "a"}\n' + '{"text": ' + "[" * 200_000, "line 2", "not JSON"),
    (
        "utf16.jsonl",
        '{"text": "a"}\n'.encode("utf-16"),
        "line 1",
        "not UTF-8.*save the file as UTF-8",
    ),
    ("latin.jsonl", '{"text": "a"}\n{"text": "café"}\n'.encode("latin-1"), "line 2", "not UTF-8"),
    ("numbers.json", "[1, 2]", "[0]", "int fits no format"),
    ("text.jsonl", '{"text": "a"}\n"b"\n', "line 2", "must be an object, not str"),
    (
        "unknown.jsonl",
        [{"mesages": [ASK, ANSWER]}],
        "line 1",
        "'mesages' fits no format. .*messages: messages",
    ),
    ("two.jsonl", [GOOD | {"text": "a"}], "line 1", "messages and text; name one with --format"),
    (
        "mixed.jsonl",
        [GOOD, {"text": "a"}],
        "line 2: messages",
        "format is messages, .* it is text.*leave it out",
    ),
    ("fewer.jsonl", [GOOD, {"id": 3}], "line 2: messages", "it has 'id'"),
    (
        "null.jsonl",
        [{"instruction": "a", "output": "b"}, {"instruction": "a", "output": None}],
        "line 2: instruction",
        "needs instruction and output",
    ),
    (
        "role.jsonl",
        [{"messages": [ASK | {"role": 3}, ANSWER]}],
        "messages.0.role",
        "valid string .got 3",
    ),
    ("no-role.jsonl", [{"messages": [{"content": "a"}, ANSWER]}], "messages.0.role", "is missing"),
    ("message.jsonl", [{"messages": ["hi", ANSWER]}], "messages.0", "valid dictionary"),
    ("key.jsonl", [{"messages": [ASK | {"lang": "en"}, ANSWER]}], "messages.0.lang", "no such key"),
    (
        "image.jsonl",
        [{"messages": [IMAGE, ANSWER]}],
        "messages.0.content",
        "'image_url'; only .* leave it out",
    ),
    (
        "content.jsonl",
        [{"messages": [ASK, {"role": "assistant"}]}],
        "messages.1.content",
        "required",
    ),
    (
        "null.jsonl",
        [{"messages": [ASK, {"role": "assistant", "content": None}]}],
        "messages.1.content",
        "required",
    ),
    ("none.jsonl", [{"messages": []}], "line 1: messages", "at least 1"),
    ("heavy.jsonl", [GOOD | {"weight": 0.0}], "line 1: weight", "greater than or equal"),
    ("light.jsonl", [GOOD | {"weight": 1e-50}], "line 1: weight", "greater than or equal"),
    ("infinity.jsonl", '{"text": "a", "weight": 1e999}', "line 1: weight", "finite"),
    ("user.jsonl", [{"messages": [ASK]}], "line 1: messages", "no assistant message"),
    (
        "weights.jsonl",
        [{"messages": [ASK, ANSWER | {"weight": 0}]}],
        "messages",
        "all have weight 0",
    ),
    ("weight.jsonl", [{"messages": [ASK, ANSWER | {"weight": 2}]}], "messages.1.weight", "0 or 1"),
    (
        "trained.jsonl",
        [{"messages": [ASK | {"train": True}, ANSWER]}],
        "messages.0.train",
        "leave it out",
    ),
    (
        "calls.jsonl",
        [{"messages": [ASK | {"tool_calls": [{"name": "f"}]}, ANSWER]}],
        "messages.0.tool_calls",
        "role",
    ),
    (
        "arguments.jsonl",
        [call(name="f", arguments="{x")],
        "function.arguments",
        "neither a JSON object nor the text",
    ),
    ("argument.jsonl", [call(name="f", arguments="[1]")], "function.arguments", "valid dictionary"),
    ("function.jsonl", [call(arguments={})], "messages.1.tool_calls.0.function.name", "is missing"),
    ("tools.jsonl", [GOOD | {"tools": "[{"}], "line 1: tools", "not JSON"),
    ("tool.jsonl", [GOOD | {"tools": [3]}], "line 1: tools.0", "valid dictionary"),
    (
        "human.jsonl",
        [{"conversations": [HUMAN | {"from": "alice"}, GPT]}],
        "conversations.0.from",
        "use one of human",
    ),
    (
        "value.jsonl",
        [{"conversations": [HUMAN, GPT | {"value": 3}]}],
        "conversations.1.value",
        "must be a text",
    ),
    (
        "called.jsonl",
        [{"conversations": [HUMAN, GPT | {"from": "function_call"}]}],
        "1.value",
        "not JSON",
    ),
    (
        "alpaca.jsonl",
        [{"instruction": ["a"], "output": "b"}],
        "line 1: instruction",
        "must be a text",
    ),
    (
        "half.jsonl",
        [{"prompt": "a", "completion": [ANSWER]}],
        "line 1",
        "both be texts, or both be lists",
    ),
    (
        "nothing.jsonl",
        [{"prompt": "a", "completion": ""}],
        "line 1: completion",
        "nothing to train",
    ),
    (
        "kto.jsonl",
        [{"prompt": "a", "completion": "b", "label": False}],
        "line 1: label",
        "keep the good ones",
    ),
    ("empty-text.jsonl", [{"text": "a"}, {"text": ""}], "line 2: text", "at least 1"),
    ("surrogate.jsonl", '{"text": "\\ud800"}\n', "line 1: text", "half of a pair"),
    (
        "flags.jsonl",
        [{"token_ids": [1, 2], "trainable": [False]}],
        "line 1: trainable",
        "one for each",
    ),
    (
        "integers.jsonl",
        [{"token_ids": [1, 2], "trainable": [0, 1]}],
        "line 1: trainable.0",
        "valid boolean",
    ),
    ("one.jsonl", [{"token_ids": [1], "trainable": [False]}], "line 1: token_ids", "at least 2"),
    ("unmasked.jsonl", [{"token_ids": [1, 2]}], "line 1", "either messages"),
    (
        "first.jsonl",
        [{"token_ids": [1, 2], "trainable": [True, True]}],
        "line 1: trainable",
        "first token",
    ),
    (
        "negative.jsonl",
        [{"token_ids": [1, -2], "trainable": [False, True]}],
        "token_ids",
        "-2 at index 1",
    ),
    ("infinite.jsonl", '{"token_ids": [1, 2], "weights": [0, 1e999]}', "weights.1", "finite"),
    (
        "tiny.jsonl",
        [{"token_ids": [1, 2], "weights": [0, 1e-9]}],
        "weights",
        "out of range; give 0, or from",
    ),
    (
        "targets.jsonl",
        [{"token_ids": [1, 2], "trainable": [False, True], "targets": [1, 2]}],
        "line 1",
        "give weights",
    ),
    (
        "labels.jsonl",
        [{"input_ids": [1, 2], "labels": [-100, 3]}],
        "line 1: labels.1",
        "neither -100 nor the token 2",
    ),
    (
        "ignored.jsonl",
        [{"input_ids": [1, 2], "labels": [-100, -100]}],
        "line 1: trainable",
        "no token is trainable",
    ),
    (
        "same.jsonl",
        [{"prompt": "a", "chosen": "b", "rejected": "b"}],
        "line 1",
        "nothing to prefer",
    ),
    (
        "turns.jsonl",
        [{"chosen": [ASK, ANSWER, ASK, ANSWER], "rejected": [ASK, ANSWER | {"content": "x"}]}],
        "line 1",
        "chosen must be the assistant's messages, with tools' answers",
    ),
    (
        "types.jsonl",
        [{"prompt": "a", "chosen": "b", "rejected": [ANSWER]}],
        "line 1",
        "all be texts",
    ),
    (
        "seen.jsonl",
        [{"chosen": [IMAGE, ANSWER], "rejected": [IMAGE, ASK]}],
        "chosen.0.content",
        "leave it out",
    ),
]


def write(path: Path, content: Any) -> Path:
    if isinstance(content, list):
        content = "".join(json.dumps(record) + "\n" for record in content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read_all(path: Path) -> None:
    examples = Examples(path)
    for i in range(len(examples)):
        examples.parse(i)


@pytest.mark.parametrize(
    ("name", "content", "where", "problem"), CASES, ids=lambda value: str(value)[:12]
)
def test_refused_with_place_field_and_remedy(
    tmp_path: Path, name: str, content: Any, where: str, problem: str
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(InvalidInput, match=problem) as refused:
        read_all(path)
    assert where in str(refused.value.field)
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("name", "options", "field", "problem"),
    [
        ("missing.jsonl", {}, "FILE", "can't read .*No such file"),
        ("nothing", {}, "FILE", "neither a saved dataset nor Parquet"),
        (
            "text.jsonl",
            {"format": "chatml"},
            "--format",
            "'chatml' is not a format; use auto or one of messages",
        ),
        (
            "text.jsonl",
            {"kind": "dpo"},
            "line 1",
            "'text' fits no format. A record needs: preference: chosen and",
        ),
        (
            "text.jsonl",
            {"kind": "dpo", "format": "text"},
            "--format",
            "not for this command; it takes preference",
        ),
    ],
)
def test_what_does_not_fit_the_command(
    tmp_path: Path, name: str, options: dict[str, Any], field: str, problem: str
) -> None:
    (tmp_path / "nothing").mkdir()
    write(tmp_path / "text.jsonl", [{"text": "a"}])
    with pytest.raises(InvalidInput, match=problem) as refused:
        Examples(tmp_path / name, **options)
    assert field in str(refused.value.field)
