"""The variables that a chat template reads besides the conversation: today's date, and the
variables that vLLM and TRL call `chat_template_kwargs`."""

from collections.abc import Mapping
from datetime import date
from functools import lru_cache
from typing import Any

from tandem.errors import InvalidInput

# Variables that Tandem or transformers sets.
_OURS = {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"}


@lru_cache(maxsize=8)
def variables_read(template: str) -> frozenset[str]:
    """The variables that the template reads, without functions and without the variables in
    `_OURS`."""
    from jinja2 import TemplateError, meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        environment = _compile_jinja_template(template).environment
        found = meta.find_undeclared_variables(environment.parse(template))
    except TemplateError:  # a later rendering reports the template's error
        return frozenset()
    return frozenset(found - _OURS - environment.globals.keys())


def prints_date(template: str) -> bool:
    return "strftime_now" in template


def options(
    template: str, given: Mapping[str, Any] | None, day: date | None, field: str
) -> dict[str, Any]:
    """The template's variables: the given variables, and the function `strftime_now` for today's
    date.

    Raises InvalidInput for a variable that the template does not read, because vLLM would ignore it
    silently.

    Args:
        template: the chat template's text.
        given: `chat_template_kwargs` of an example, or None if it has none.
        day: today's date for the template; None: the template gets the clock's date.
        field: the example's name in errors.
    """
    given = given or {}
    if unknown := sorted(given.keys() - variables_read(template)):
        read = ", ".join(sorted(variables_read(template) - {"bos_token", "eos_token"}))
        known = f"; it reads {read}" if read else ""
        raise InvalidInput(
            f"the chat template reads no such variable{known}; correct or remove it",
            field=f"{field}.chat_template_kwargs.{unknown[0]}",
        )
    return {**given, **({} if day is None else {"strftime_now": day.strftime})}
