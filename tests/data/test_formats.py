"""Records of each format become examples or pairs. Files of each kind allow access to any record by
its number."""

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tandem.data.examples import PreferencePair, SFTExample
from tandem.data.formats import FORMATS, Examples
from tandem.errors import InvalidInput

SYSTEM, ASK, ANSWER = (
    {"role": r, "content": c} for r, c in (("system", "s"), ("user", "q"), ("assistant", "a"))
)
WORSE, AGAIN = ANSWER | {"content": "b"}, ASK | {"content": "again?"}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
CALL = {"name": "f", "arguments": {"x": 1}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
PAIR = {"prompt": [ASK], "chosen": [ANSWER], "rejected": [WORSE]}

# Each case has the format's name, a record, and the example or pair that the record becomes.
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("messages", {"messages": [ASK, ANSWER], "id": 7}, {"messages": [ASK, ANSWER]}),
    (
        "messages",
        {"messages": [ASK, ANSWER], "tools": json.dumps(TOOLS), "weight": 0.5},
        {"messages": [ASK, ANSWER], "tools": TOOLS, "weight": 0.5},
    ),
    (
        "messages",
        {"messages": [ASK, ANSWER], "tools": [json.dumps(TOOLS[0])]},
        {"messages": [ASK, ANSWER], "tools": TOOLS},
    ),
    (
        "sharegpt",
        {"conversations": [HUMAN, GPT], "system": "s"},
        {"messages": [SYSTEM, ASK, ANSWER]},
    ),
    ("sharegpt", {"conversations": [ASK, ANSWER]}, {"messages": [ASK, ANSWER]}),
    (
        "sharegpt",
        {
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "1"},
                GPT | {"weight": 0},
            ]
        },
        {
            "messages": [
                ASK,
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "1"},
                ANSWER | {"weight": 0},
            ]
        },
    ),
    ("alpaca", {"instruction": "q", "input": "", "output": "a"}, {"messages": [ASK, ANSWER]}),
    (
        "alpaca",
        {"instruction": "q", "input": "i", "output": "a", "system": "s", "history": [["x", "y"]]},
        {
            "messages": [
                SYSTEM,
                ASK | {"content": "x"},
                ANSWER | {"content": "y"},
                ASK | {"content": "q\ni"},
                ANSWER,
            ]
        },
    ),
    (
        "alpaca",
        {"instruction": "q", "context": "i", "response": "a", "category": "qa"},
        {"messages": [ASK | {"content": "q\ni"}, ANSWER]},
    ),
    ("alpaca", {"question": "q", "answer": "a"}, {"messages": [ASK, ANSWER]}),
    ("prompt-completion", {"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "a"}),
    ("prompt-completion", {"prompt": "q", "response": "a"}, {"prompt": "q", "completion": "a"}),
    (
        "prompt-completion",
        {"prompt": [ASK], "completion": [ANSWER]},
        {"prompt": [ASK], "completion": [ANSWER]},
    ),
    ("text", {"text": "t", "meta": {"source": "x"}}, {"text": "t"}),
    (
        "tokens",
        {"token_ids": [1, 2], "weights": [0, -1.5], "targets": [0, 3]},
        {"token_ids": [1, 2], "weights": [0, -1.5], "targets": [0, 3]},
    ),
    (
        "tokens",
        {"input_ids": [1, 2, 3], "labels": [1, -100, 3], "attention_mask": [1, 1, 1]},
        {"token_ids": [1, 2, 3], "trainable": [False, False, True]},
    ),
    (
        "preference",
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
    ),
    ("preference", PAIR, PAIR),
    (
        "preference",
        {
            "prompt": "q",
            "chosen": [ASK, ANSWER],
            "rejected": [ASK, WORSE],
            "messages": [ASK, ANSWER],
        },
        {"chosen": [ASK, ANSWER], "rejected": [ASK, WORSE]},
    ),
    ("preference", {"prompt": "q", "chosen": [ANSWER], "rejected": [WORSE]}, PAIR),
    (
        "preference",
        {"conversations": [HUMAN], "chosen": GPT, "rejected": GPT | {"value": "b"}},
        PAIR,
    ),
    (
        "preference",
        {
            "input": {"messages": [ASK], "tools": TOOLS},
            "preferred_output": [ANSWER],
            "non_preferred_output": [WORSE],
        },
        PAIR | {"tools": TOOLS},
    ),
    ("preference", {"instruction": "q", "chosen": "a", "rejected": "b"}, PAIR),
    (
        "preference",
        {"system": "s", "question": "q", "chosen": "a", "rejected": "b"},
        PAIR | {"prompt": [SYSTEM, ASK]},
    ),
    (
        "preference",
        {"system": "s", "conversations": [HUMAN], "chosen": GPT, "rejected": GPT | {"value": "b"}},
        PAIR | {"prompt": [SYSTEM, ASK]},
    ),
    (
        "preference",
        {"system": "s", "prompt": [ASK], "chosen": [ANSWER], "rejected": [WORSE]},
        PAIR | {"prompt": [SYSTEM, ASK]},
    ),
    *(
        (
            "preference",
            {"system": "s", **asked, "chosen": [ASK, ANSWER], "rejected": [ASK, WORSE]},
            {"chosen": [SYSTEM, ASK, ANSWER], "rejected": [SYSTEM, ASK, WORSE]},
        )
        for asked in ({}, {"prompt": "q"})
    ),
    (
        "preference",
        {
            "prompt": [SYSTEM, ASK, ANSWER, AGAIN],
            "chosen": [AGAIN, ANSWER],
            "rejected": [AGAIN, WORSE],
        },
        {
            "chosen": [SYSTEM, ASK, ANSWER, AGAIN, ANSWER],
            "rejected": [SYSTEM, ASK, ANSWER, AGAIN, WORSE],
        },
    ),
    (
        "messages",
        {"messages": [SYSTEM, ASK, ANSWER], "system": "s"},
        {"messages": [SYSTEM, ASK, ANSWER]},
    ),
]


@pytest.mark.parametrize(("name", "record", "expected"), CASES)
def test_formats(
    tmp_path: Path, name: str, record: dict[str, Any], expected: dict[str, Any]
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(record) + "\n")
    examples = Examples(path)
    assert (examples.format, examples.kind) == (name, FORMATS[name][0])
    assert examples[0] == ("data.jsonl line 1", expected)
    assert examples.ignored - {"messages"} == record.keys() & {
        "id",
        "category",
        "meta",
        "attention_mask",
    }
    _, parsed = examples.parse(0)
    model = SFTExample if examples.kind == "sft" else PreferencePair
    assert parsed == model.model_validate(expected)
    named = Examples(path, format=name, kind=examples.kind)
    assert named[0][1] == expected


MESSAGES: list[Any] = [
    [{"role": "user"}],
    [{"from": "gpt", "value": None}],
    [{"from": ["a"]}],
    {"from": []},
    [None],
]
JUNK = [
    3,
    1.5,
    True,
    "",
    "x",
    "[1]",
    "{",
    [],
    [3],
    [[]],
    [["a"]],
    ["a"],
    {},
    {"messages": 3},
    {"tools": 3},
    *MESSAGES,
]


def test_any_value_in_any_column_is_read_or_refused(tmp_path: Path) -> None:
    refusals = []
    for name, record, _ in CASES:
        path = tmp_path / "data.jsonl"
        records = [
            record | {column: junk} for column in (*record, *FORMATS[name][3]) for junk in JUNK
        ]
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
        examples = Examples(path, format=name)
        for i in range(len(records)):
            try:
                examples.parse(i)
            except InvalidInput as error:
                refusals.append((i, str(error.field)))
    assert {name for name, _, _ in CASES} == FORMATS.keys()
    assert all(field.startswith(f"data.jsonl line {i + 1}") for i, field in refusals)
    assert len(refusals) > 1000


RECORDS = [{"messages": [ASK, ANSWER | {"content": f"a{i} é"}]} for i in range(1100)]


def write_parquet(path: Path, records: list[dict[str, Any]], **options: Any) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(records), path, **options)


def test_files_of_each_kind(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    lines = [json.dumps(record, ensure_ascii=False) for record in RECORDS]
    files = {
        "lines.jsonl": "\n".join(lines),
        "blank.jsonl": "\ufeff" + "\r\n\n".join(lines),
        "array.json": "[" + ",\n".join(lines) + "]",
        "pretty.json": json.dumps(RECORDS, indent=1),
        "wrapped.json": json.dumps({"data": RECORDS}),
        "indented.json": json.dumps({"examples": RECORDS}, indent=1),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    write_parquet(tmp_path / "rows.parquet", RECORDS, row_group_size=100)
    for name, part in (
        ("train-0", RECORDS[:1000]),
        ("train-1", RECORDS[1000:]),
        ("test-0", RECORDS[:5]),
    ):
        (tmp_path / "hub" / "data").mkdir(parents=True, exist_ok=True)
        write_parquet(tmp_path / "hub" / "data" / f"{name}.parquet", part)
    Dataset.from_list(RECORDS).save_to_disk(tmp_path / "saved", num_shards=3)
    DatasetDict(
        {"train": Dataset.from_list(RECORDS), "test": Dataset.from_list(RECORDS[:1])}
    ).save_to_disk(tmp_path / "splits")
    order = random.Random(0).sample(range(len(RECORDS)), 50)
    places = set()
    for name in (*files, "rows.parquet", "hub", "saved", "splits", "splits/train"):
        examples = Examples(tmp_path / name)
        assert len(examples) == len(RECORDS), name
        assert [examples[i][1] for i in order] == [RECORDS[i] for i in order], name
        places.add(examples[4][0])
    assert places == {
        "lines.jsonl line 5",
        "blank.jsonl line 9",
        "array.json [4]",
        "pretty.json [4]",
        "wrapped.json [4]",
        "indented.json [4]",
        "rows.parquet row 4",
        "hub row 4",
        "saved row 4",
        "train row 4",
    }


def test_what_arrow_adds_is_left_out(tmp_path: Path) -> None:
    """Arrow gives each message the keys of all messages. It also gives each call's arguments the
    keys of all calls' arguments. Tandem leaves out the keys that Arrow has added."""
    functions = [{"name": "f", "arguments": arguments} for arguments in ({"x": 1}, {"y": "2"})]
    calls = [
        {"role": "assistant", "tool_calls": [{"type": "function", "function": one}]}
        for one in functions
    ]
    records = [{"messages": [ASK, call, ANSWER]} for call in calls]
    write_parquet(tmp_path / "rows.parquet", records)
    examples = Examples(tmp_path / "rows.parquet")
    assert [examples[i][1] for i in range(2)] == records
    examples.parse(1)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "rows.parquet", RECORDS[:1])
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(Exception, match=r"pip install 'tandem-rl\[data\]'"):
        Examples(tmp_path / "rows.parquet")


def test_lines_take_little_memory(tmp_path: Path) -> None:
    """The reader of a file of lines keeps 16 bytes per record in memory."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "some text that is not held in memory"}\n' * 200_000)
    tracemalloc.start()
    examples = Examples(path)
    assert examples[199_999] == (
        "data.jsonl line 200000",
        {"text": "some text that is not held in memory"},
    )
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 4.5e6
    assert peak < 9e6
