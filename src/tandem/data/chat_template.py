"""Tokenises chat examples with the model's own chat template.

Each assistant message is trained in the context in which it would be sampled. Its prompt is the rendering of the
messages before it with the generation prompt; the trained text is the rest of the rendering that ends with the message.
So the trained tokens are also exact for templates that render old messages differently (Qwen3 leaves out old
reasoning): such a message becomes a sequence of its own, as an RL turn does, and shares its prefix in the row.

A message is trained up to and including its end-of-turn token. White space after that token is not trained, since
sampling stops before it.
"""

import threading
from typing import Any

from tandem.data.inputs import Message
from tandem.errors import InvalidInput

_loading = threading.Lock()
_INSTEAD = "give token_ids and trainable instead of messages"


def load_tokenizer(path: str) -> Any:
    """transformers' tokenizer of a directory or hub name; needs no torch. Raises InvalidInput (field: base_model)."""
    try:
        # transformers imports its parts as they are first used, which fails in two threads at once.
        with _loading:
            # Imported here, because it takes seconds and RL doesn't need it.
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise InvalidInput(f"can't load a tokenizer from {path}: {exc}", field="base_model") from exc


def chat_turns(tokenizer: Any, messages: list[Message], where: str) -> list[tuple[list[int], list[int]]]:
    """(prompt token ids, trained token ids) of each assistant message, in order.

    InvalidInput (field below `where`) if the template fails, or if the message can't be told from its prompt.
    """
    if not tokenizer.chat_template:
        raise InvalidInput(f"the base model's tokenizer has no chat template; {_INSTEAD}", field=f"{where}.messages")
    plain = [message.model_dump() for message in messages]
    turns = []
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        field = f"{where}.messages.{index}"
        prompt = _render(tokenizer, plain[:index], field, generation=True)
        whole = _render(tokenizer, plain[: index + 1], field, generation=False)
        if not whole.startswith(prompt):
            problem = "the chat template renders the messages before this one differently once this message is there"
            raise InvalidInput(f"{problem}; {_INSTEAD}", field=field)
        turns.append(_tokens(tokenizer, prompt, whole, field))
    return turns


def _render(tokenizer: Any, messages: list[dict[str, Any]], field: str, *, generation: bool) -> str:
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
    except Exception as exc:  # a template is a program and may raise anything
        raise InvalidInput(f"the chat template refuses the conversation: {exc}", field=field) from exc
    assert isinstance(rendered, str)
    return rendered


def _tokens(tokenizer: Any, prompt: str, whole: str, field: str) -> tuple[list[int], list[int]]:
    # The template's text has all special tokens already.
    prompt_ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False)
    whole_ids: list[int] = tokenizer.encode(whole, add_special_tokens=False)
    trained = whole_ids[len(prompt_ids) :]
    if whole_ids[: len(prompt_ids)] != prompt_ids:
        # A token spans the border. Sampling starts after the prompt's own tokens, so the message is tokenised alone.
        completion = whole[len(prompt) :]
        trained = tokenizer.encode(completion, add_special_tokens=False)
        if tokenizer.decode(trained, clean_up_tokenization_spaces=False) != completion:
            problem = "a token spans the border to the message, which the tokenizer can't tokenise alone"
            raise InvalidInput(f"{problem}; {_INSTEAD}", field=field)
    if not prompt_ids:
        raise InvalidInput("the chat template renders nothing before this message", field=field)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = [at for at, number in enumerate(trained) if number in special]
    if ends and not tokenizer.decode(trained[ends[-1] + 1 :]).strip():
        trained = trained[: ends[-1] + 1]
    if not trained:
        raise InvalidInput("the chat template renders nothing for this message", field=field)
    return prompt_ids, trained
