"""Random conversations give the same tokens in every format and every kind of file."""

import csv
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.chat_tokenizer import TEMPLATES, chat_tokenizer
from data.test_formats import write_parquet
from tandem.data.examples import PreferencePair, SFTExample
from tandem.data.formats import Examples
from tandem.data.render import render
from tandem.errors import InvalidInput

type Record = dict[str, Any]
WORDS = ["yes", "No.", "是的", "🙂", "a\nb", "{}", "x = 1", "I'd", " café", "<b>", "\\n", '"', "1"]
NAMES = ["look", "get_weather"]
_SHARED = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}


def text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randrange(1, 5))) + "."


def conversation(rng: random.Random) -> Record:
    """A random conversation in OpenAI's format. Each call of a tool gets a text as its answer."""
    messages: list[Record] = [{"role": "system", "content": text(rng)}] * rng.randrange(2)
    tools = rng.random() < 0.5
    for _ in range(rng.randrange(1, 4)):
        messages.append({"role": "user", "content": text(rng)})
        if tools and rng.random() < 0.6:
            values: list[Any] = [1, True, "é", [1, "x"], {"y": 2}, 0.5]
            functions = [
                {"name": rng.choice(NAMES), "arguments": {"x": rng.choice(values)}}
                for _ in range(rng.choice([1, 1, 2]))
            ]
            calls = [{"type": "function", "function": function} for function in functions]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages += [{"role": "tool", "content": text(rng)} for _ in calls]
        messages.append({"role": "assistant", "content": text(rng)})
    described = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in NAMES
    ]
    return {"messages": messages, **({"tools": described} if tools else {})}


def functions_of(message: Record) -> list[Record]:
    return [call["function"] for call in message.get("tool_calls", ())]


def as_messages(record: Record) -> Record:
    return record


def as_sdk(record: Record) -> Record:
    """The conversation as OpenAI's SDK dumps it. The arguments of calls are JSON text, and some
    keys have the value null."""
    nulls = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    messages = []
    for message in record["messages"]:
        calls = [
            {
                "index": i,
                "type": "function",
                "function": function | {"arguments": json.dumps(function["arguments"])},
            }
            for i, function in enumerate(functions_of(message))
        ]
        messages.append(nulls | message | {"tool_calls": calls or None})
    return record | {"messages": messages}


def as_text(record: Record) -> Record:
    """The record with each of its columns as JSON text, as in CSV."""
    return {name: json.dumps(value) for name, value in record.items()}


def as_sharegpt(record: Record) -> Record:
    """The conversation in LLaMA-Factory's sharegpt format."""
    said = []
    for message in record["messages"]:
        functions = functions_of(message)
        one = functions[0] if len(functions) == 1 else functions
        value = json.dumps(one) if functions else message["content"]
        source = "function_call" if functions else _SHARED[message["role"]]
        said.append({"from": source, "value": value})
    return {
        "conversations": said,
        **({"tools": json.dumps(record["tools"])} if "tools" in record else {}),
    }


def as_hermes(record: Record) -> Record:
    """The conversation in the sharegpt format with other names of roles. Calls are in the texts of
    messages, as in Hermes' data."""
    names = {"system": "SYSTEM", "user": "User", "assistant": "GPT", "tool": "tool"}
    said = []
    for message in record["messages"]:
        value = message["content"]
        if functions := functions_of(message):
            calls = (f"<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in functions)
            value = "\n".join(calls)
        elif message["role"] == "tool":
            value = f"<tool_response>\n{value}\n</tool_response>"
        said.append({"from": names[message["role"]], "value": value})
    return {name: value for name, value in record.items() if name == "tools"} | {
        "conversations": said
    }


def as_swift(record: Record) -> Record:
    messages: list[Record] = []
    for message in record["messages"]:
        functions = functions_of(message)
        messages += [{"role": "tool_call", "content": json.dumps(one)} for one in functions]
        role = {"tool": "tool_response"}.get(message["role"], message["role"])
        messages += [] if functions else [message | {"role": role}]
    return {
        "messages": messages,
        **({"tools": json.dumps(record["tools"])} if "tools" in record else {}),
    }


def as_anthropic(record: Record) -> Record:
    messages: list[Record] = []
    for message in record["messages"]:
        parts: list[Record] = [
            {"type": "tool_use", "name": one["name"], "input": one["arguments"]}
            for one in functions_of(message)
        ]
        role = message["role"]
        if role == "tool":
            role, parts = "user", [{"type": "tool_result", "content": message["content"]}]
        messages.append({"role": role, "content": parts or message["content"]})
    tools = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
        for tool in record.get("tools", ())
    ]
    return {"messages": messages, "tools": tools}


def as_alpaca(record: Record) -> Record | None:
    messages = list(record["messages"])
    if "tools" in record:
        return None
    system = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
    texts = [message["content"] for message in messages]
    history = [[texts[i], texts[i + 1]] for i in range(0, len(texts) - 2, 2)]
    return {"instruction": texts[-2], "output": texts[-1], "history": history, "system": system}


FORMATS: list[Callable[[Record], Record | None]] = [
    as_messages,
    as_sdk,
    as_text,
    as_sharegpt,
    as_hermes,
    as_swift,
    as_anthropic,
    as_alpaca,
]
SEED = int(os.environ.get("TANDEM_SEED", random.randrange(10**6)))


def tokens(items: list[Any], tokenizer: Any) -> list[Any]:
    return [
        [(one.tokens.tolist(), one.trained.tolist()) for one in found]
        for found in render(tokenizer, items, [f"x.{i}" for i in range(len(items))])
    ]


@pytest.mark.parametrize("template", ["qwen3", "glm4moe", "qwen2_5_training"])
def test_every_format_gives_the_same_tokens(template: str, tmp_path: Path) -> None:
    print(f"TANDEM_SEED={SEED}")
    rng = random.Random(SEED)
    tokenizer = chat_tokenizer((TEMPLATES / f"{template}.jinja").read_text())
    wanted = [conversation(rng) for _ in range(60)]
    expected = tokens([SFTExample.model_validate(one) for one in wanted], tokenizer)
    for written in FORMATS:
        path = tmp_path / f"{written.__name__}.jsonl"
        both = [(i, made) for i, one in enumerate(wanted) if (made := written(one)) is not None]
        path.write_text("".join(json.dumps(made) + "\n" for _, made in both))
        examples = Examples(path)
        found = tokens([examples.parse(i)[1] for i in range(len(examples))], tokenizer)
        for (i, made), one in zip(both, found, strict=True):
            assert one == expected[i], (SEED, written.__name__, made)


def as_trl(pair: Record) -> Record:
    return pair


def as_implicit(pair: Record) -> Record:
    return {half: pair["prompt"] + pair[half] for half in ("chosen", "rejected")}


def as_openai(pair: Record) -> Record:
    return {
        "input": {"messages": pair["prompt"]},
        "preferred_output": pair["chosen"],
        "non_preferred_output": pair["rejected"],
    }


def as_swift_pair(pair: Record) -> Record:
    return {
        "messages": pair["prompt"] + pair["chosen"],
        "rejected_response": pair["rejected"][0]["content"],
    }


def as_sharegpt_pair(pair: Record) -> Record:
    halves = {half: as_sharegpt({"messages": pair[half]})["conversations"][0] for half in pair}
    return (
        halves
        | {"conversations": as_sharegpt({"messages": pair["prompt"]})["conversations"]}
        | {"prompt": None}
    )


def test_every_format_of_pairs_gives_the_same_tokens(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    tokenizer = chat_tokenizer((TEMPLATES / "qwen3.jinja").read_text())
    pairs: list[Record] = []
    while len(pairs) < 60:
        *prompt, answer = conversation(rng)["messages"]
        if all(message["role"] != "tool" for message in prompt):
            worse = answer | {"content": answer["content"] + " Or not."}
            pairs.append({"prompt": prompt, "chosen": [answer], "rejected": [worse]})
    expected = tokens([PreferencePair.model_validate(one) for one in pairs], tokenizer)
    for written in (as_trl, as_implicit, as_openai, as_swift_pair, as_sharegpt_pair):
        path = tmp_path / f"{written.__name__}.jsonl"
        path.write_text("".join(json.dumps(written(one)) + "\n" for one in pairs))
        examples = Examples(path, kind="dpo")
        found = tokens([examples.parse(i)[1] for i in range(len(examples))], tokenizer)
        assert found == expected, (SEED, written.__name__)


def test_the_same_table_in_files_of_every_kind(tmp_path: Path) -> None:
    """The same records give the same tokens in files of every kind, except CSV, which is refused.
    Nulls that Arrow may have added are dropped, and their places are in `nulls`."""
    from datasets import Dataset

    rng = random.Random(SEED)
    tokenizer = chat_tokenizer((TEMPLATES / "qwen3.jinja").read_text())
    wanted = [as_sdk(conversation(rng)) for _ in range(60)]
    for record in wanted:  # A column of a table has one type, so `tools` becomes a text.
        record["tools"] = json.dumps(record["tools"]) if "tools" in record else None
    expected = tokens([SFTExample.model_validate(one) for one in wanted], tokenizer)
    lines = [json.dumps(one) for one in wanted]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "a.json").write_text("[" + ",".join(lines) + "]")
    write_parquet(tmp_path / "a.parquet", wanted)
    Dataset.from_list(wanted).save_to_disk(tmp_path / "saved")
    text = [{name: value and json.dumps(value) for name, value in one.items()} for one in wanted]
    write_parquet(tmp_path / "text.parquet", text)
    for name in ("a.jsonl", "a.json", "a.parquet", "saved", "text.parquet"):
        examples = Examples(tmp_path / name)
        found = tokens([examples.parse(i)[1] for i in range(len(examples))], tokenizer)
        assert found == expected, (SEED, name)
        assert examples.nulls == []
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["messages"], *([line] for line in lines)])
    with pytest.raises(InvalidInput, match="is a table; save it as JSON lines or Parquet"):
        Examples(tmp_path / "a.csv")
    # The first record has a null in the arguments of a call, which are an Arrow struct. Arrow also
    # adds nulls to the struct for keys that only other rows have.
    ask, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    records = [
        {
            "messages": [
                ask,
                {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]},
                answer,
            ]
        }
        for arguments in ({"x": 1, "y": None}, {"x": 2, "y": "z"})
    ]
    write_parquet(tmp_path / "nulls.parquet", records)
    examples = Examples(tmp_path / "nulls.parquet")
    assert next(examples[i][0] for i in range(2)) in examples.nulls
    assert len(examples.nulls) == 1
