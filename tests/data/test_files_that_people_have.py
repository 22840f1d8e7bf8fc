"""Records as tools and clients write them. Each record is read as the intended messages, or is
refused with an error that names the record's format and the remedy."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.data.examples import Message, PreferencePair, SFTExample
from tandem.data.formats import Examples
from tandem.errors import InvalidInput

ASK, ANSWER, WORSE = (
    {"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "a"), ("assistant", "b"))
)
SYSTEM = {"role": "system", "content": "s"}
CHAT = {"messages": [ASK, ANSWER]}
PAIR = {"prompt": [ASK], "chosen": [ANSWER], "rejected": [WORSE]}
FUNCTION = {"name": "f", "arguments": {"x": 1}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [{"function": FUNCTION}]}
TOOL = {"role": "tool", "content": "1"}
AGENT = {"messages": [ASK, CALLING, TOOL, ANSWER]}
THOUGHT = {"messages": [ASK, ANSWER | {"reasoning_content": "hm"}]}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
TEXT = json.dumps(FUNCTION)
SDK = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": []}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def called(**changes: Any) -> dict[str, Any]:
    return {"messages": [ASK, CALLING | changes, TOOL, ANSWER]}


def calls(*given: Any) -> dict[str, Any]:
    return called(tool_calls=list(given))


def shared(*given: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in given], **more}


def anthropic(*parts: dict[str, Any], answer: Any = "1") -> dict[str, Any]:
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": answer}
    return {
        "messages": [
            ASK,
            {"role": "assistant", "content": [*parts, use]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
        ]
    }


WITH_ID = {
    "messages": [
        ASK,
        CALLING | {"tool_calls": [{"id": "t1", "type": "function", "function": FUNCTION}]},
        TOOL | {"tool_call_id": "t1"},
        ANSWER,
    ]
}
TWO_CALLS = {
    "messages": [
        ASK,
        CALLING | {"tool_calls": [{"function": FUNCTION}] * 2},
        TOOL,
        TOOL,
        ANSWER,
    ]
}
THINKING = CHAT | {"chat_template_kwargs": {"enable_thinking": False}}

# Each case has the program that writes the record, the record, and a record of Tandem with the same
# meaning.
READ: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("OpenAI's SDK: nulls", {"messages": [ASK | SDK, ANSWER | SDK]}, CHAT),
    ("OpenAI's SDK: empty texts", {"messages": [ASK, ANSWER | {"refusal": "", "name": ""}]}, CHAT),
    ("OpenAI's SDK: numbered calls", calls({"index": 0, "function": FUNCTION}), AGENT),
    ("OpenAI's SDK: null id", calls({"id": None, "function": FUNCTION}), AGENT),
    (
        "vLLM: both names of reasoning",
        {"messages": [ASK, ANSWER | {"reasoning": "hm", "reasoning_content": "hm"}]},
        THOUGHT,
    ),
    (
        "vLLM: one of them null",
        {"messages": [ASK, ANSWER | {"reasoning": "hm", "reasoning_content": None}]},
        THOUGHT,
    ),
    ("empty reasoning", {"messages": [ASK, ANSWER | {"reasoning_content": ""}]}, CHAT),
    ("no tools, as JSON text", CHAT | {"tools": "[]"}, CHAT),
    ("no tools", CHAT | {"tools": []}, CHAT),
    (
        "tools encoded twice",
        CHAT | {"tools": json.dumps(json.dumps(TOOLS))},
        CHAT | {"tools": TOOLS},
    ),
    ("each tool as JSON text", CHAT | {"tools": [json.dumps(TOOLS[0])]}, CHAT | {"tools": TOOLS}),
    ("arguments as JSON text", calls({"function": FUNCTION | {"arguments": '{"x": 1}'}}), AGENT),
    (
        "arguments encoded twice",
        calls({"function": FUNCTION | {"arguments": json.dumps('{"x": 1}')}}),
        AGENT,
    ),
    ("calls as JSON text", called(tool_calls=json.dumps([{"function": FUNCTION}])), AGENT),
    ("calls encoded twice", called(tool_calls=json.dumps(json.dumps([FUNCTION]))), AGENT),
    ("each call as JSON text", calls(TEXT), AGENT),
    ("the function as JSON text", calls({"function": TEXT}), AGENT),
    ("one call", called(tool_calls=FUNCTION), AGENT),
    (
        "OpenAI's first tools",
        {
            "messages": [
                ASK,
                {"role": "assistant", "content": None, "function_call": FUNCTION},
                {"role": "function", "content": "1"},
                ANSWER,
            ]
        },
        AGENT,
    ),
    (
        "a tool's content as an object",
        {"messages": [ASK, CALLING, TOOL | {"content": {"t": "é"}}, ANSWER]},
        {"messages": [ASK, CALLING, TOOL | {"content": '{"t": "é"}'}, ANSWER]},
    ),
    (
        "a tool's content as a list",
        {"messages": [ASK, CALLING, TOOL | {"content": [{"t": 1}]}, ANSWER]},
        {"messages": [ASK, CALLING, TOOL | {"content": '[{"t": 1}]'}, ANSWER]},
    ),
    (
        "a tool's content as a number",
        {"messages": [ASK, CALLING, TOOL | {"content": 1}, ANSWER]},
        AGENT,
    ),
    ("messages as JSON text", {"messages": json.dumps(CHAT["messages"])}, CHAT),
    ("sharegpt in capitals", shared(("Human", "q"), ("GPT", "a")), CHAT),
    ("sharegpt's keys in capitals", {"conversations": [{"From": "USER", "Value": "q"}, GPT]}, CHAT),
    (
        "sharegpt of Axolotl's pygmalion",
        {"conversations": [{"role": "Human", "value": "q"}, GPT]},
        CHAT,
    ),
    (
        "sharegpt with Hermes' calls",
        shared(
            ("human", "q"),
            ("gpt", f"<tool_call>\n{TEXT}\n</tool_call>"),
            ("tool", "<tool_response>\n1\n</tool_response>"),
            ("gpt", "a"),
        ),
        AGENT,
    ),
    (
        "sharegpt with Python's calls",
        shared(
            ("human", "q"),
            ("gpt", f"<tool_call>\n{FUNCTION}\n</tool_call>"),
            ("tool", "<tool_response>1</tool_response>"),
            ("gpt", "a"),
        ),
        AGENT,
    ),
    (
        "sharegpt with calls in parallel",
        shared(
            ("human", "q"),
            ("gpt", f"<tool_call>{TEXT}</tool_call>\n<tool_call>{TEXT}</tool_call>"),
            ("tool", "<tool_response>1</tool_response>\n<tool_response>1</tool_response>"),
            ("gpt", "a"),
        ),
        TWO_CALLS,
    ),
    (
        "sharegpt that speaks of tags",
        shared(("human", "q"), ("gpt", "write <tool_call>x</tool_call>")),
        {"messages": [ASK, ANSWER | {"content": "write <tool_call>x</tool_call>"}]},
    ),
    (
        "LLaMA-Factory: sharegpt with tools",
        shared(
            ("human", "q"),
            ("function_call", TEXT),
            ("observation", "1"),
            ("gpt", "a"),
            tools=json.dumps([TOOLS[0]["function"]]),
        ),
        AGENT | {"tools": TOOLS},
    ),
    (
        "LLaMA-Factory: alpaca",
        {"instruction": "q", "input": "", "output": "a", "system": "s"},
        {"messages": [SYSTEM, ASK, ANSWER]},
    ),
    (
        "LLaMA-Factory: preference of alpaca",
        {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
        PAIR,
    ),
    (
        "LLaMA-Factory: preference of sharegpt",
        {"conversations": [HUMAN], "chosen": GPT, "rejected": GPT | {"value": "b"}},
        PAIR,
    ),
    ("LLaMA-Factory: OpenAI", CHAT, CHAT),
    ("LLaMA-Factory: pre-training", {"text": "t"}, {"text": "t"}),
    ("LLaMA-Factory: no pictures", CHAT | {"images": []}, CHAT),
    (
        "ms-swift: messages",
        {"messages": [SYSTEM, ASK, ANSWER]},
        {"messages": [SYSTEM, ASK, ANSWER]},
    ),
    (
        "ms-swift: calls",
        {
            "messages": [
                ASK,
                {"role": "tool_call", "content": TEXT},
                {"role": "tool_response", "content": "1"},
                ANSWER,
            ]
        },
        AGENT,
    ),
    (
        "ms-swift: calls in parallel",
        {
            "messages": [
                ASK,
                *[{"role": "tool_call", "content": TEXT}] * 2,
                *[{"role": "tool_response", "content": "1"}] * 2,
                ANSWER,
            ]
        },
        TWO_CALLS,
    ),
    (
        "ms-swift: loss",
        {"messages": [ASK, WORSE | {"loss": False}, ASK, ANSWER | {"loss": True}]},
        {"messages": [ASK, WORSE | {"train": False}, ASK, ANSWER]},
    ),
    (
        "ms-swift: query",
        {"query": "q", "response": "a", "system": "s", "history": [["x", "y"]]},
        {"messages": [SYSTEM, ASK | {"content": "x"}, ANSWER | {"content": "y"}, ASK, ANSWER]},
    ),
    (
        "ms-swift: conversation",
        {"system": "s", "conversation": [{"human": "q", "assistant": "a"}]},
        {"messages": [SYSTEM, ASK, ANSWER]},
    ),
    ("ms-swift: rejected_response", CHAT | {"rejected_response": "b"}, PAIR),
    ("ms-swift: rejected_messages", CHAT | {"rejected_messages": [ASK, WORSE]}, PAIR),
    ("Axolotl: chat_template", {"messages": [ASK, ANSWER | {"training": True}]}, CHAT),
    (
        "Axolotl: alpaca",
        {"instruction": "q", "input": "i", "output": "a"},
        {"messages": [ASK | {"content": "q\ni"}, ANSWER]},
    ),
    ("Axolotl: gpteacher", {"instruction": "q", "input": "", "response": "a"}, CHAT),
    ("Axolotl: jeopardy", {"question": "q", "category": "c", "answer": "a"}, CHAT),
    ("Axolotl: oasst", {"INSTRUCTION": "q", "RESPONSE": "a"}, CHAT),
    (
        "Axolotl: load_open_orca",
        {"system_prompt": "s", "question": "q", "response": "a"},
        {"messages": [SYSTEM, ASK, ANSWER]},
    ),
    ("Axolotl: completion", {"text": "t"}, {"text": "t"}),
    (
        "Axolotl: tokenized",
        {"input_ids": [1, 2], "attention_mask": [1, 1], "labels": [-100, 2]},
        {"token_ids": [1, 2], "trainable": [False, True]},
    ),
    (
        "Axolotl: chat_template.default",
        {"messages": [ASK], "chosen": ANSWER, "rejected": WORSE},
        PAIR,
    ),
    (
        "Axolotl: chatml.intel",
        {"system": "s", "question": "q", "chosen": "a", "rejected": "b"},
        PAIR | {"prompt": [SYSTEM, ASK]},
    ),
    (
        "Axolotl: chatml.icr",
        {"system": "s", "input": "q", "chosen": "a", "rejected": "b"},
        PAIR | {"prompt": [SYSTEM, ASK]},
    ),
    (
        "Axolotl: chatml.argilla",
        {"system": "s", "instruction": "q", "chosen_response": "a", "rejected_response": "b"},
        PAIR | {"prompt": [SYSTEM, ASK]},
    ),
    (
        "Axolotl: chatml.prompt_pairs",
        {"system": "s", "prompt": "q", "chosen": "a", "rejected": "b"},
        PAIR | {"prompt": [SYSTEM, ASK]},
    ),
    (
        "Axolotl: chatml.ultra",
        {"prompt": "q", "chosen": [ASK, ANSWER], "rejected": [ASK, WORSE]},
        PAIR,
    ),
    ("TRL: text", {"text": "t"}, {"text": "t"}),
    (
        "TRL: prompt-completion",
        {"prompt": [ASK], "completion": [ANSWER]},
        {"prompt": [ASK], "completion": [ANSWER]},
    ),
    ("TRL: preference", PAIR, PAIR),
    ("TRL: implicit preference", {"chosen": [ASK, ANSWER], "rejected": [ASK, WORSE]}, PAIR),
    ("TRL: chat_template_kwargs", THINKING, THINKING),
    (
        "TRL: chat_template_kwargs as JSON text",
        CHAT | {"chat_template_kwargs": '{"enable_thinking": false}'},
        THINKING,
    ),
    ("verl: enable_thinking", CHAT | {"enable_thinking": False}, THINKING),
    ("verl: SFT", {"prompt": "q", "response": "a"}, {"prompt": "q", "completion": "a"}),
    ("Unsloth: ChatML", {"conversations": [ASK, ANSWER]}, CHAT),
    ("Unsloth: sharegpt", {"conversations": [HUMAN, GPT]}, CHAT),
    ("Anthropic: calls", anthropic(), WITH_ID),
    ("Anthropic: a result's parts", anthropic(answer=[{"type": "text", "text": "1"}]), WITH_ID),
    (
        "Anthropic: thinking and text",
        anthropic(
            {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "c"}
        ),
        {
            "messages": [
                ASK,
                WITH_ID["messages"][1] | {"content": "c", "reasoning_content": "hm"},
                *WITH_ID["messages"][2:],
            ]
        },
    ),
    (
        "Anthropic: tools",
        CHAT | {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
        CHAT | {"tools": TOOLS},
    ),
    ("a pair with the prompt's answer", PAIR | {"answer": "x"}, PAIR),
    ("a topic as label", CHAT | {"label": "physics"}, CHAT),
    (
        "agents' pairs",
        {"prompt": [ASK], "chosen": [CALLING, TOOL, ANSWER], "rejected": [CALLING, TOOL, WORSE]},
        {"prompt": [ASK], "chosen": [CALLING, TOOL, ANSWER], "rejected": [CALLING, TOOL, WORSE]},
    ),
]


def parsed(path: Path, record: Any) -> SFTExample | PreferencePair:
    text = record if isinstance(record, str) else json.dumps(record)
    path.write_text(text + "\n", encoding="utf-8")
    return Examples(path).parse(0)[1]


def meant(item: SFTExample | PreferencePair) -> Any:
    """The messages that the chat template gets for an item, with the item's other fields."""

    def messages(given: list[Message]) -> list[dict[str, Any]]:
        return [message.for_template() | {"trained": message.trained} for message in given]

    rest = item.model_dump(
        exclude={"messages", "prompt", "completion", "chosen", "rejected"}, exclude_none=True
    )
    if isinstance(item, PreferencePair):
        if isinstance(item.chosen, str):
            return item
        return [[messages(part) for part in half] for half in item.conversations()], rest
    return rest, [
        messages(part) if isinstance(part, list) else part
        for part in (item.messages, item.prompt, item.completion)
    ]


@pytest.mark.parametrize(("writer", "record", "expected"), READ, ids=[case[0] for case in READ])
def test_read(writer: str, record: Any, expected: dict[str, Any], tmp_path: Path) -> None:
    model = PreferencePair if "chosen" in expected else SFTExample
    assert meant(parsed(tmp_path / "data.jsonl", record)) == meant(model.model_validate(expected))


HALF = '{"messages": [{"role": "user", "content": "a \\ud83d"}, {"role": "assistant"}]}'
# Each case has the program that writes the record, the record, a part of the place that the error
# names, and a pattern of the error's text.
REFUSED: list[tuple[str, Any, str, str]] = [
    ("half a letter", HALF, "line 1: messages.0.content", "half of a pair.*correct it or leave it"),
    ("half a letter in a column's name", '{"\\ud83d": 1, "text": "a"}', "line 1", "half of a pair"),
    (
        "half a letter in a call",
        HALF.replace('"content": "a \\ud83d"', '"content": "a", "x": [{"y": "\\udc00"}]'),
        "line 1: messages.0.x.0.y",
        "half of a pair",
    ),
    (
        "two reasonings",
        {"messages": [ASK, ANSWER | {"reasoning": "hm", "thinking": "no"}]},
        "messages.1",
        "reasoning and thinking differ; keep one",
    ),
    (
        "LLaMA-Factory: KTO",
        {"instruction": "q", "output": "a", "kto_tag": True},
        "kto_tag",
        "of KTO; keep the good",
    ),
    ("LLaMA-Factory: pictures", CHAT | {"images": ["x.png"]}, "images", "with pictures.*leave out"),
    ("ms-swift: KTO, classes", CHAT | {"label": 1}, "label", "of KTO; keep the good"),
    (
        "ms-swift: embedding",
        CHAT | {"positive_messages": [[ASK]]},
        "positive_messages",
        "ms-swift's",
    ),
    (
        "ms-swift: video",
        {"query": "q", "response": "a", "videos": ["x"]},
        "videos",
        "with pictures",
    ),
    ("TRL: prompt-only", {"prompt": [ASK]}, "prompt", "TRL's prompt-only; .*tandem rl"),
    (
        "TRL: unpaired preference",
        {"prompt": "q", "completion": "a", "label": True},
        "label",
        "of KTO",
    ),
    (
        "TRL: stepwise supervision",
        {"prompt": "q", "completions": ["a"], "labels": [True]},
        "prompt",
        "TRL's stepwise supervision; join",
    ),
    (
        "Axolotl: input_output",
        {"segments": [{"label": True, "text": "a"}]},
        "segments",
        "Axolotl's .*token_ids",
    ),
    (
        "Axolotl: metharme",
        {"prompt": "q", "generation": "a"},
        "prompt",
        "Axolotl's metharme; rename",
    ),
    (
        "Axolotl: load_camel_ai",
        {"message_1": "q", "message_2": "a"},
        "message_2",
        "load_camel_ai; give messages",
    ),
    (
        "Axolotl: explainchoice",
        {"question": "q", "choices": ["a"], "solution": "a"},
        "solution",
        "explainchoice; write",
    ),
    ("Axolotl: summarizetldr", {"article": "q", "summary": "a"}, "summary", "summarizetldr; write"),
    (
        "Axolotl: context_qa",
        {"article": "c", "question": "q", "answer": "a"},
        "question",
        "context_qa; write",
    ),
    (
        "Axolotl: load_404",
        {"article": "c", "unanswerable_question": "q"},
        "unanswerable",
        "context_qa; write",
    ),
    (
        "Axolotl: reflection",
        {"instruction": "q", "output": "a", "reflection": "r", "corrected": "c"},
        "reflection",
        "Axolotl's reflection; write",
    ),
    (
        "Axolotl: creative_acr",
        {"instruction": "q", "revision": "a"},
        "revision",
        "creative_acr; write",
    ),
    (
        "Axolotl: train_detail",
        {"messages": [ASK, ANSWER | {"train_detail": [{"begin_offset": 0}]}]},
        "messages.1.train_detail",
        "no such key; correct or remove it",
    ),
    (
        "Unsloth: GRPO",
        {"prompt": [ASK], "answer": "a"},
        "prompt",
        "GRPO's prompts; .*rename its column",
    ),
    (
        "verl: RL",
        {"data_source": "x", "prompt": [ASK], "reward_model": {"ground_truth": "1"}},
        "reward_model",
        "verl's for RL; .*response",
    ),
    (
        "Anthropic: a call without a name",
        {"messages": [ASK, {"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}]},
        "messages.1.content.0",
        "'tool_use' lacks 'name'; add it",
    ),
]


@pytest.mark.parametrize(
    ("writer", "record", "where", "problem"), REFUSED, ids=[case[0] for case in REFUSED]
)
def test_refused(writer: str, record: Any, where: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=problem) as refused:
        parsed(tmp_path / "data.jsonl", record)
    assert str(refused.value.field).startswith("data.jsonl line 1")
    assert where in str(refused.value.field)
    # The same record is also refused as the second record of a file.
    (tmp_path / "data.jsonl").write_text(
        json.dumps(CHAT) + "\n" + (record if isinstance(record, str) else json.dumps(record)) + "\n"
    )
    with pytest.raises(InvalidInput, match=problem):
        Examples(tmp_path / "data.jsonl", "messages").parse(1)


@pytest.mark.parametrize(
    "text", ["a\x00b", "\ufeffa", "a\u2028b", "a\x85b", "\U0001f642\u200d", "e\u0301", "\ufffe"]
)
def test_odd_letters_are_read(text: str, tmp_path: Path) -> None:
    item = parsed(tmp_path / "data.jsonl", {"messages": [ASK | {"content": text}, ANSWER]})
    assert isinstance(item, SFTExample)
    assert item.messages is not None
    assert item.messages[0].content == text
