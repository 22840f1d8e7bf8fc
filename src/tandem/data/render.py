"""Turns examples and pairs into tokens, and says which of them are trained (`tandem.data.chat_template` says how)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.data.chat_template import Plan, Planned, Rendered, renderer
from tandem.data.examples import Message, PreferencePair, SFTExample
from tandem.data.packed_format import Int32
from tandem.data.prefix_tree import common_prefix
from tandem.errors import InvalidInput


def render(tokenizer: Any, examples: Sequence[SFTExample], fields: Sequence[str]) -> list[list[Rendered]]:
    """The sequences of each example. `tokenizer` may be None where all examples are `token_ids`.

    InvalidInput (below the example's of `fields`) for the first example that the template refuses or whose mask is
    ambiguous.
    """
    found = []
    for rendered in render_each(tokenizer, examples, fields):
        if isinstance(rendered, InvalidInput):
            raise rendered
        found.append(rendered)
    return found


def render_each(
    tokenizer: Any, examples: Sequence[SFTExample], fields: Sequence[str]
) -> list[list[Rendered] | InvalidInput]:
    """As `render`, with the error of each example that is refused in its place."""
    planned: list[Planned] = []
    for example, field in zip(examples, fields, strict=True):
        if example.token_ids is not None:
            planned.append([_given(example, example.token_ids)])
        elif isinstance(example.prompt, str) or example.text is not None:
            text = example.text if example.text is not None else example.completion
            planned.append([renderer(tokenizer).text(str(example.prompt or ""), str(text), field)])
        else:
            planned.append(_conversation(tokenizer, example, field))
    return _finished(tokenizer, planned)


def render_pairs(
    tokenizer: Any, pairs: Sequence[PreferencePair], fields: Sequence[str]
) -> list[tuple[Int32, Int32, Int32]]:
    """(prompt, chosen, rejected) of each pair, as token ids, none of them empty. Raises as `render` does."""
    found = []
    for split in render_pairs_each(tokenizer, pairs, fields):
        if isinstance(split, InvalidInput):
            raise split
        found.append(split)
    return found


def render_pairs_each(
    tokenizer: Any, pairs: Sequence[PreferencePair], fields: Sequence[str]
) -> list[tuple[Int32, Int32, Int32] | InvalidInput]:
    """As `render_pairs`, with the error of each pair that is refused in its place."""
    planned: list[Planned] = []
    for pair, field in zip(pairs, fields, strict=True):
        for name in ("chosen", "rejected"):
            half = getattr(pair, name)
            if isinstance(half, str):
                planned.append([renderer(tokenizer).text(str(pair.prompt or ""), half, f"{field}.{name}")])
                continue
            context, completion = pair.conversations()[name == "rejected"]
            names = [f"{field}.{name}"] * (len(context) + 1)
            planned.append(renderer(tokenizer).chat([*context, *completion], names, {len(context)}, pair.tools))
    halves = _finished(tokenizer, planned)
    return [
        _split(pair, field, *both)
        for pair, field, both in zip(pairs, fields, zip(halves[::2], halves[1::2], strict=True), strict=True)
    ]


def _split(
    pair: PreferencePair, field: str, chosen: "list[Rendered] | InvalidInput", rejected: "list[Rendered] | InvalidInput"
) -> tuple[Int32, Int32, Int32] | InvalidInput:
    for half in (chosen, rejected):
        if isinstance(half, InvalidInput):
            return half
    assert isinstance(chosen, list)
    assert isinstance(rejected, list)
    (one,), (other,) = chosen, rejected
    first = int(one.trained[0])
    if isinstance(pair.chosen, str) and not pair.prompt:
        first = min(common_prefix(one.tokens, other.tokens), len(one.tokens) - 1, len(other.tokens) - 1)
        if first == 0:
            return InvalidInput("chosen and rejected have no common beginning; give a prompt", field=field)
    elif first != other.trained[0] or not np.array_equal(one.tokens[:first], other.tokens[:first]):
        problem = "the chat template renders the prompt differently for chosen and rejected"
        return InvalidInput(f"{problem}; leave this pair out", field=field)
    return one.tokens[:first], one.tokens[first:], other.tokens[first:]


def _given(example: SFTExample, ids: list[int]) -> Rendered:
    flags = np.array(example.trainable if example.trainable is not None else example.weights)
    trained = np.flatnonzero(flags).astype(np.int32)
    weights = None if example.weights is None else flags[trained].astype(np.float32)
    targets = None if example.targets is None else np.array(example.targets, np.int32)[trained]
    return Rendered(np.array(ids, np.int32)[: trained[-1] + 1], trained, weights, targets)


def _conversation(tokenizer: Any, example: SFTExample, field: str) -> Planned:
    parts = {"messages": example.messages, "prompt": example.prompt, "completion": example.completion}
    messages: list[Message] = []
    names: list[str] = []
    trained: set[int] = set()
    for part, content in parts.items():
        for i, message in enumerate(content or ()):
            assert isinstance(message, Message)
            if part != "prompt" and message.trained:
                trained.add(len(messages))
            messages.append(message)
            names.append(f"{field}.{part}.{i}")
    return renderer(tokenizer).chat(messages, names, trained, example.tools)


def _finished(tokenizer: Any, planned: Sequence[Planned]) -> list[list[Rendered] | InvalidInput]:
    """The plans' sequences, tokenised in one call."""
    texts = [part.text for plans in planned if isinstance(plans, list) for part in plans if isinstance(part, Plan)]
    encoded = iter(renderer(tokenizer).encode_all(texts) if texts else ())
    found: list[list[Rendered] | InvalidInput] = []
    for plans in planned:
        if isinstance(plans, InvalidInput):
            found.append(plans)
            continue
        # All of an example's encodings are taken, also where one of them is refused.
        parts = [(part, None if isinstance(part, Rendered) else next(encoded)) for part in plans]
        try:
            found.append([
                sequence for part, encoding in parts
                for sequence in ([part] if isinstance(part, Rendered) else renderer(tokenizer).finish(part, encoding))
            ])  # fmt: skip
        except InvalidInput as error:
            found.append(error)
    return found
