"""Messages that a chat template leaves out are refused."""

import pytest

from data.chat_tokenizer import TEMPLATES, chat_tokenizer, turn
from tandem.data.examples import SFTExample
from tandem.data.render import render
from tandem.errors import InvalidInput


def test_a_template_that_leaves_out_an_answer_or_a_tools_result_is_refused() -> None:
    call = {"role": "assistant", "weight": 0, "tool_calls": [{"function": {"name": "get_weather", "arguments": {}}}]}
    for template, field, messages in (
        ("smolvlm", 0, [turn("user", "What is 2+2?"), turn("assistant", "4")]),  # wants lists of parts
        ("phi3", 2, [turn("user", "Warm?"), call, turn("tool", "18"), turn("assistant", "yes")]),
    ):
        example = SFTExample.model_validate({"messages": messages})
        with pytest.raises(InvalidInput, match="the chat template leaves out messages of the role") as refused:
            render(chat_tokenizer((TEMPLATES / f"{template}.jinja").read_text()), [example], ["x"])
        assert refused.value.field == f"x.messages.{field}"


@pytest.mark.parametrize("role", ["human", "User", "developer"])
def test_messages_of_a_role_that_the_template_passes_over_are_refused(role: str) -> None:
    example = SFTExample.model_validate({"messages": [turn(role, "What is 2+2?"), turn("assistant", "4")]})
    with pytest.raises(InvalidInput, match=f"leaves out messages of the role '{role}'") as refused:
        render(chat_tokenizer((TEMPLATES / "qwen3.jinja").read_text()), [example], ["x"])
    assert refused.value.field == "x.messages.0"
    (shown,) = render(chat_tokenizer((TEMPLATES / "llama3.jinja").read_text()), [example], ["x"])
    assert shown


@pytest.mark.parametrize("first", ["system", "developer"])
def test_a_second_system_message_that_the_template_passes_over_is_refused(first: str) -> None:
    tokenizer = chat_tokenizer((TEMPLATES / "gptoss.jinja").read_text())
    begin = [turn(first, "be brief"), turn("user", "hi")]
    (shown,) = render(tokenizer, [SFTExample.model_validate({"messages": [*begin, turn("assistant", "yes")]})], ["x"])
    assert shown
    for again in ("system", "developer"):
        messages = [*begin, turn("assistant", "yes"), turn(again, "be rude"), turn("assistant", "no")]
        with pytest.raises(InvalidInput, match=f"leaves out messages of the role '{again}' at this place") as refused:
            render(tokenizer, [SFTExample.model_validate({"messages": messages})], ["x"])
        assert refused.value.field == "x.messages.3"
