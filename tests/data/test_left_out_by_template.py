"""Examples are refused if the chat template leaves out a message. If the template leaves out
reasoning or tools, the preview names them."""

import pytest

from data.chat_tokenizer import TEMPLATES, chat_tokenizer, turn
from tandem.data.examples import PreferencePair, SFTExample
from tandem.data.render import preview, render
from tandem.errors import InvalidInput


def test_a_template_that_leaves_out_an_answer_or_a_tools_result_is_refused() -> None:
    call = {
        "role": "assistant",
        "weight": 0,
        "tool_calls": [{"function": {"name": "get_weather", "arguments": {}}}],
    }
    for template, field, messages in (
        # This template requires lists of parts as content.
        ("smolvlm", 0, [turn("user", "What is 2+2?"), turn("assistant", "4")]),
        ("phi3", 2, [turn("user", "Warm?"), call, turn("tool", "18"), turn("assistant", "yes")]),
    ):
        example = SFTExample.model_validate({"messages": messages})
        with pytest.raises(
            InvalidInput, match="the chat template leaves out messages of the role"
        ) as refused:
            render(chat_tokenizer((TEMPLATES / f"{template}.jinja").read_text()), [example], ["x"])
        assert refused.value.field == f"x.messages.{field}"


@pytest.mark.parametrize("role", ["human", "User", "developer"])
def test_messages_of_a_role_that_the_template_passes_over_are_refused(role: str) -> None:
    example = SFTExample.model_validate(
        {"messages": [turn(role, "What is 2+2?"), turn("assistant", "4")]}
    )
    with pytest.raises(InvalidInput, match=f"leaves out messages of the role '{role}'") as refused:
        render(chat_tokenizer((TEMPLATES / "qwen3.jinja").read_text()), [example], ["x"])
    assert refused.value.field == "x.messages.0"
    (shown,) = render(chat_tokenizer((TEMPLATES / "llama3.jinja").read_text()), [example], ["x"])
    assert shown


@pytest.mark.parametrize("first", ["system", "developer"])
def test_a_second_system_message_that_the_template_passes_over_is_refused(first: str) -> None:
    tokenizer = chat_tokenizer((TEMPLATES / "gptoss.jinja").read_text())
    begin = [turn(first, "be brief"), turn("user", "hi")]
    (shown,) = render(
        tokenizer,
        [SFTExample.model_validate({"messages": [*begin, turn("assistant", "yes")]})],
        ["x"],
    )
    assert shown
    for again in ("system", "developer"):
        messages = [
            *begin,
            turn("assistant", "yes"),
            turn(again, "be rude"),
            turn("assistant", "no"),
        ]
        with pytest.raises(
            InvalidInput, match=f"leaves out messages of the role '{again}' at this place"
        ) as refused:
            render(tokenizer, [SFTExample.model_validate({"messages": messages})], ["x"])
        assert refused.value.field == "x.messages.3"


TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize(
    ("template", "left_out"),
    [
        ("qwen3", []),
        ("qwen2_5", ["reasoning"]),
        ("phi3", ["reasoning", "tools"]),
        ("llama3_training", ["reasoning", "tools"]),
    ],
)
def test_reasoning_and_tools_that_the_template_leaves_out_are_named(
    template: str, left_out: list[str]
) -> None:
    tokenizer = chat_tokenizer((TEMPLATES / f"{template}.jinja").read_text())
    ask, answer = turn("user", "hi"), turn("assistant", "yes", reasoning_content="I should think")
    both = {
        "messages": [
            ask,
            answer,
            turn("user", "again"),
            turn("assistant", "no", reasoning_content="Hmm"),
        ]
    }
    examples = [
        both | {"tools": [TOOL]},
        both,
        {"messages": [ask, answer | {"train": False}, ask, turn("assistant", "no")]},
    ]
    pair = {
        "prompt": [ask],
        "chosen": [answer],
        "rejected": [turn("assistant", "no")],
        "tools": [TOOL],
    }
    for _ in range(2):  # The second pass uses the cached facts about the template.
        found = preview(
            tokenizer,
            [SFTExample.model_validate(one) for one in [*examples, {"text": "hi"}]],
            [
                PreferencePair.model_validate(pair),
                PreferencePair(prompt="Is it", chosen=" sunny", rejected=" not"),
            ],
        )
        assert [one.error for one in found] == [None] * 6
        only_reasoning = [one for one in left_out if one == "reasoning"]
        assert [one.left_out for one in found] == [left_out, only_reasoning, [], [], left_out, []]
