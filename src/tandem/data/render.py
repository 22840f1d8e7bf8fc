"""Turns examples and pairs into tokens, and marks the trained tokens by the rules in
`tandem.data.chat_template`."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from itertools import batched, pairwise
from typing import Any

import numpy as np

from tandem.data.chat_template import SequenceText, renderer
from tandem.data.examples import PreferencePair, Rendering, SFTExample
from tandem.data.packed_format import Int32
from tandem.data.packing import LinearSequence, common_prefix, slots_of
from tandem.data.template_variables import options, prints_date
from tandem.errors import InvalidInput

_CHUNK = 256  # examples that are tokenised together

# If a prompt ends with an open `<think>`, the tag is within the prompt's last 24 characters.
_OPENED = 24
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>")
_FORMS = ("token_ids", "messages", "completion", "text")
type Item = SFTExample | PreferencePair


def render(
    tokenizer: Any, items: Sequence[Item], fields: Sequence[str], day: date | None = None
) -> list[list[LinearSequence]]:
    """The sequences of each item, in the order of `items`. A pair has two sequences, chosen and
    rejected: each is the common prompt and a trained answer. `tokenizer` may be None if all items
    have `token_ids`.

    Raises InvalidInput for an item that the template refuses, and for an item whose trained tokens
    are ambiguous. The error's field begins with the item's entry in `fields`.

    Args:
        day: today's date for chat templates; None: the date of the clock.
    """
    found = []
    for chunk in batched(zip(items, fields, strict=True), _CHUNK):
        chunk_sources = [_texts(tokenizer, item, field, day) for item, field in chunk]
        texts = [source.text for sources in chunk_sources for source in sources]
        tokens = iter(renderer(tokenizer).encoder.encode_all(texts) if texts else ())
        for (item, field), sources in zip(chunk, chunk_sources, strict=True):
            found.append(
                _finish(tokenizer, item, field, [(source, next(tokens)) for source in sources])
            )
    return found


def check_ids(ids: Int32, vocab_size: int, field: str) -> None:
    """Raises InvalidInput for a token id outside the model's vocabulary.

    Args:
        ids: int32 [tokens], at least one.
        vocab_size: the model's vocabulary size.
        field: the error's field.
    """
    index = int(ids.argmax())
    if ids[index] >= vocab_size:
        problem = (
            f"token id {ids[index]} at index {index} is outside the model's vocabulary of"
            f" {vocab_size}"
        )
        raise InvalidInput(f"{problem}; was it sampled from another model?", field=field)


def check_vocabulary(
    item: Item, sequences: Sequence[LinearSequence], vocab_size: int, field: str
) -> None:
    """Applies `check_ids` to the sequences of one item.

    Args:
        item: the example or pair.
        sequences: the sequences that `render` made of the item.
        vocab_size: the model's vocabulary size.
        field: the item's name in errors.
    """
    tokens_field = targets_field = field
    if isinstance(item, SFTExample):
        form = next(form for form in _FORMS if getattr(item, form) is not None)
        tokens_field, targets_field = f"{field}.{form}", f"{field}.targets"
    for one in sequences:
        check_ids(one.tokens, vocab_size, tokens_field)
        check_ids(one.targets, vocab_size, targets_field)


def check_ends(
    tokenizer: Any, items: Sequence[Item], rendered: Sequence[Sequence[LinearSequence]], field: str
) -> None:
    """Refuses conversations if none of their trained turns ends with a token at which vLLM stops,
    and the chat template does not end an answer without calls with such a token either. Raises
    InvalidInput.

    Args:
        tokenizer: may be None if no item is a conversation.
        rendered: the sequences of each item, as `render` returns them.
        field: the error's field.
    """
    chats = (
        one for item, ones in zip(items, rendered, strict=True) if _is_chat(item) for one in ones
    )
    last = None
    for one in chats:
        ends = renderer(tokenizer).stops.endings([one])
        if None in ends:
            return
        last = ends[-1]
    if last is not None and not renderer(tokenizer).ends_answers():
        raise InvalidInput(renderer(tokenizer).stops.problem(last), field=field)


def preview(
    tokenizer: Any,
    examples: Sequence[SFTExample],
    pairs: Sequence[PreferencePair],
    vocab_size: int | None = None,
) -> list[Rendering]:
    """A preview of each example, then of each pair. Fields of errors begin with
    `examples.<i>` or `pairs.<i>`.

    Args:
        vocab_size: the model's vocabulary size, if it is known.
    """
    fields = [f"examples.{i}" for i in range(len(examples))] + [
        f"pairs.{i}" for i in range(len(pairs))
    ]
    today = datetime.now(UTC).date()
    return _previewed(tokenizer, [*examples, *pairs], fields, vocab_size, today)


def _previewed(
    tokenizer: Any, items: Sequence[Item], fields: Sequence[str], vocab_size: int | None, day: date
) -> list[Rendering]:
    try:
        rendered = render(tokenizer, items, fields, day)
        for item, sequences, field in zip(items, rendered, fields, strict=True):
            if vocab_size is not None:
                check_vocabulary(item, sequences, vocab_size, field)
        return [
            _rendering(tokenizer, item, sequences, day)
            for item, sequences in zip(items, rendered, strict=True)
        ]
    except InvalidInput as error:
        if len(items) == 1:
            return [Rendering(error=error.message, field=error.field)]
    halves = slice(len(items) // 2), slice(len(items) // 2, None)
    return [
        one
        for half in halves
        for one in _previewed(tokenizer, items[half], fields[half], vocab_size, day)
    ]


def _rendering(tokenizer: Any, item: Item, sequences: list[LinearSequence], day: date) -> Rendering:
    parts = []
    for one in sequences:
        weights = np.zeros(len(one.tokens), np.float32)
        weights[one.trained] = one.weights
        runs = pairwise([0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), len(weights)])
        parts.append([(tokenizer.decode(one.tokens[a:b]), float(weights[a])) for a, b in runs])
    lengths, trained = (
        [len(one.tokens) for one in sequences],
        sum(len(one.trained) for one in sequences),
    )
    both = isinstance(item, PreferencePair)
    more: dict[str, Any] = {}
    if _is_chat(item):
        stops = renderer(tokenizer).stops
        ends = stops.endings(sequences)
        endless = [last for last in ends if last is not None]
        more = {
            "trained_turns": len(ends),
            "endless_turns": len(endless),
            "endless": stops.problem(endless[-1]) if endless else None,
            "empty_thoughts": sum(map(_empty_thoughts, parts)),
            "control_tokens": _control_tokens(tokenizer, item),
            "date": (
                str(day) if prints_date(tokenizer.get_chat_template(tools=item.tools)) else None
            ),
        }
    slots = slots_of(sequences) if both else max(lengths)
    return Rendering(
        parts=parts,
        lengths=lengths,
        slots=slots,
        trained=trained,
        left_out=_left_out(tokenizer, item),
        **more,
    )


def _is_chat(item: Item) -> bool:
    """Whether a chat template renders the item."""
    if isinstance(item, PreferencePair):
        return isinstance(item.chosen, list)
    return item.messages is not None or isinstance(item.completion, list)


def _empty_thoughts(parts: list[tuple[str, float]]) -> int:
    """The number of trained turns with an empty thought. The thought may begin in the prompt."""
    found = 0
    for (context, _), (text, weight) in pairwise([("", 0.0), *parts]):
        context = context[-_OPENED:]
        thought = _EMPTY_THOUGHT.search(context + text) if weight else None
        found += thought is not None and thought.end() > len(context)
    return found


def _control_tokens(tokenizer: Any, item: Item) -> dict[str, int]:
    """The value of `Rendering.control_tokens` for an item."""
    halves = (
        [message for pair in item.conversations() for part in pair for message in part]
        if isinstance(item, PreferencePair)
        else [*(item.messages or item.prompt or ()), *(item.completion or ())]
    )
    said = Counter[str]()
    for message in halves:
        for text in (message.content, message.reasoning_content):
            said.update(renderer(tokenizer).marks.findall(text or ""))
    return dict(said)


def _left_out(tokenizer: Any, item: Item) -> list[str]:
    """The value of `Rendering.left_out` for an item. A field that the chat template leaves out is
    no error, because vLLM's prompts lack the field too."""
    if isinstance(item, PreferencePair):
        trained = (
            []
            if isinstance(item.chosen, str)
            else [message for _, answer in item.conversations() for message in answer]
        )
    else:
        given = item.completion if isinstance(item.completion, list) else item.messages or ()
        trained = list(given)
    trained = [message for message in trained if message.trained]
    reasoning = [text for message in trained if (text := (message.reasoning_content or "").strip())]
    tools = item.tools is not None and not renderer(tokenizer).shows_tools
    if not (reasoning or tools):
        return []
    texts = [source.text for source in _texts(tokenizer, item, "")]
    found = (
        ["reasoning"] if not all(any(one in text for text in texts) for one in reasoning) else []
    )
    if tools:
        try:
            without = [
                source.text
                for source in _texts(tokenizer, item.model_copy(update={"tools": None}), "")
            ]
        except InvalidInput:  # the template can't render without tools
            without = []
        renderer(tokenizer).shows_tools = texts != without
        found += ["tools"] if texts == without else []
    return found


def _texts(tokenizer: Any, item: Item, field: str, day: date | None = None) -> list[SequenceText]:
    """The texts to tokenise. An item with `token_ids` has no text. A pair has the texts of both
    answers."""
    if isinstance(item, PreferencePair):
        return _pair_texts(tokenizer, item, field, day)
    if item.token_ids is not None:
        return []
    if item.text is not None or isinstance(item.completion, str):
        return [
            renderer(tokenizer).text(
                str(item.prompt or ""), str(item.text or item.completion), field
            )
        ]
    parts: dict[str, Any] = {
        name: getattr(item, name) for name in ("prompt", "messages", "completion")
    }
    named = [(part, i, message) for part in parts for i, message in enumerate(parts[part] or ())]
    chosen = {
        at for at, (part, _, message) in enumerate(named) if part != "prompt" and message.trained
    }
    names = [f"{field}.{part}.{i}" for part, i, _ in named]
    messages = [message for _, _, message in named]
    return renderer(tokenizer).chat(
        messages, names, chosen, item.tools, _options(tokenizer, item, field, day)
    )


def _options(tokenizer: Any, item: Item, field: str, day: date | None) -> dict[str, Any]:
    """The chat template's variables. Returns an empty dict if the tokenizer has no chat
    template."""
    if not tokenizer.chat_template:
        return {}
    template = tokenizer.get_chat_template(tools=item.tools)
    return options(template, item.chat_template_kwargs, day, field)


def _pair_texts(
    tokenizer: Any, pair: PreferencePair, field: str, day: date | None
) -> list[SequenceText]:
    if isinstance(pair.chosen, str):
        halves = {"chosen": pair.chosen, "rejected": str(pair.rejected)}
        return [
            renderer(tokenizer).text(str(pair.prompt or ""), half, f"{field}.{name}")
            for name, half in halves.items()
        ]
    sources = []
    more = _options(tokenizer, pair, field, day)
    for name, (prompt, answer) in zip(("chosen", "rejected"), pair.conversations(), strict=True):
        names = [f"{field}.{name}"] * (len(prompt) + len(answer))
        said = {i for i, one in enumerate(answer, len(prompt)) if one.role == "assistant"}
        sources += renderer(tokenizer).chat([*prompt, *answer], names, said, pair.tools, more)
    return sources


def _finish(
    tokenizer: Any, item: Item, field: str, tokenised: list[tuple[SequenceText, Int32]]
) -> list[LinearSequence]:
    if isinstance(item, SFTExample) and item.token_ids is not None:
        flags = np.array(item.weights if item.trainable is None else item.trainable)
        trained = np.flatnonzero(flags).astype(np.int32)
        weights = flags[trained].astype(np.float32)
        targets = None if item.targets is None else np.array(item.targets, np.int32)[trained]
        return [
            LinearSequence.of(
                np.array(item.token_ids, np.int32), trained, targets=targets, weights=weights
            )
        ]
    sequences = [
        (source, renderer(tokenizer).finish(source, tokens)) for source, tokens in tokenised
    ]
    if not isinstance(item, PreferencePair):
        return [one for _, ones in sequences for one in ones]
    halves = [
        [one for source, ones in sequences for one in ones if source.spans[0][2] == half]
        for half in (f"{field}.chosen", f"{field}.rejected")
    ]
    chosen, rejected = _paired(item, field, *halves)
    return [*chosen, *(replace(one, rejected=True) for one in rejected)]


def _paired(
    pair: PreferencePair, field: str, chosen: list[LinearSequence], rejected: list[LinearSequence]
) -> list[list[LinearSequence]]:
    """The sequences of a pair's two answers. In each answer, everything after the common prompt is
    trained. An answer of several turns may become several sequences; all of them begin with the
    prompt."""
    halves = [chosen, rejected]
    tokens = [half[0].tokens for half in halves]
    if len(chosen) == len(rejected) and all(
        np.array_equal(a.tokens, b.tokens) for a, b in zip(chosen, rejected, strict=True)
    ):
        problem = "chosen and rejected are the same tokens, so there is nothing to prefer"
        raise InvalidInput(f"{problem}; leave this pair out", field=field)
    first = int(chosen[0].trained[0])
    if isinstance(pair.chosen, str) and not pair.prompt:
        first = min(common_prefix(*tokens), *(len(one) - 1 for one in tokens))
        if first == 0:
            raise InvalidInput(
                "chosen and rejected have no common beginning; give a prompt", field=field
            )
    elif first != rejected[0].trained[0] or not np.array_equal(
        tokens[0][:first], tokens[1][:first]
    ):
        problem = "the chat template renders the prompt differently for chosen and rejected"
        raise InvalidInput(f"{problem}; leave this pair out", field=field)
    if isinstance(pair.chosen, list):
        return halves
    return [[LinearSequence.of(one, np.arange(first, len(one), dtype=np.int32))] for one in tokens]
