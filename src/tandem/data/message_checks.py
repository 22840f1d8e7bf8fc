"""Refuses trained messages that are blank. Refuses a trained message if the chat template leaves
out one of its calls. Refuses a trained message that has only reasoning if the chat template leaves
out the reasoning."""

from typing import Any

from tandem.data.examples import Message
from tandem.errors import InvalidInput

INSTEAD = "give token_ids and trainable instead of messages"


def check_blank(messages: list[Message], names: list[str], trained: set[int]) -> None:
    """Refuses trained messages without content: they would train only the end of a turn. Raises
    InvalidInput.

    Args:
        names: the messages' names in errors.
        trained: indices of the trained messages.
    """
    for index in sorted(trained):
        message = messages[index]
        if (
            not message.tool_calls
            and not f"{message.content or ''}{message.reasoning_content or ''}".strip()
        ):
            problem = (
                "the answer is blank, so there is nothing to train; leave it out, or set train:"
                " false"
            )
            raise InvalidInput(problem, field=names[index])


def check_calls(text: str, messages: list[Any], name: str) -> None:
    """Refuses a message with calls if the trained text lacks a call. Also refuses a message that
    has nothing but reasoning if the trained text lacks the reasoning. Raises InvalidInput.

    Args:
        text: the trained text.
        messages: the trained messages, in the form that a chat template reads.
        name: the error's field.
    """
    for message in messages:
        said = [call["function"]["name"] for call in message.get("tool_calls", ())]
        if not (said or message["content"]) and message.get("reasoning_content"):
            said = [message["reasoning_content"].strip()]
        if lost := [part for part in said if part not in text]:
            raise InvalidInput(
                f"the chat template leaves out {lost[0][:60]!r} of this message; {INSTEAD}",
                field=name,
            )
