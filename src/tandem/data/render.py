"""Turns examples and pairs into tokens, and says which of them are trained (`tandem.data.chat_template` says how)."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import batched, chain
from typing import Any

import numpy as np

from tandem.data.chat_template import Plan, Rendered, renderer
from tandem.data.examples import PreferencePair, SFTExample
from tandem.data.packed_format import Int32
from tandem.data.prefix_tree import common_prefix
from tandem.errors import InvalidInput

# The template renders one chunk while another thread tokenises the chunk before it, which leaves Python to others.
CHUNK = 256
type _Planned = list[Plan] | Rendered | InvalidInput
type PairTokens = tuple[Int32, Int32, Int32]


def render(tokenizer: Any, examples: Sequence[SFTExample], fields: Sequence[str]) -> list[list[Rendered]]:
    """The sequences of each example. `tokenizer` may be None where all examples are `token_ids`.

    InvalidInput (below the example's of `fields`) for the first example that the template refuses or whose mask is
    ambiguous.
    """
    return [_raised(rendered) for rendered in render_each(tokenizer, examples, fields)]


def render_each(
    tokenizer: Any, examples: Sequence[SFTExample], fields: Sequence[str]
) -> list[list[Rendered] | InvalidInput]:
    """As `render`, with the error of each example that is refused in its place."""
    return _finished(tokenizer, (_plan(tokenizer, *both) for both in zip(examples, fields, strict=True)))


def render_pairs(tokenizer: Any, pairs: Sequence[PreferencePair], fields: Sequence[str]) -> list[PairTokens]:
    """(prompt, chosen, rejected) of each pair, as token ids, none of them empty. Raises as `render` does."""
    return [_raised(rendered) for rendered in render_pairs_each(tokenizer, pairs, fields)]


def render_pairs_each(
    tokenizer: Any, pairs: Sequence[PreferencePair], fields: Sequence[str]
) -> list[PairTokens | InvalidInput]:
    """As `render_pairs`, with the error of each pair that is refused in its place."""
    both = list(zip(pairs, fields, strict=True))
    halves = _finished(tokenizer, (half for pair, field in both for half in _plan_pair(tokenizer, pair, field)))
    return [_split(*both[i], halves[2 * i], halves[2 * i + 1]) for i in range(len(both))]


def _raised[T](rendered: T | InvalidInput) -> T:
    if isinstance(rendered, InvalidInput):
        raise rendered
    return rendered


def _plan(tokenizer: Any, example: SFTExample, field: str) -> _Planned:
    if example.token_ids is not None:
        flags = np.array(example.trainable if example.trainable is not None else example.weights)
        trained = np.flatnonzero(flags).astype(np.int32)
        weights = None if example.weights is None else flags[trained].astype(np.float32)
        targets = None if example.targets is None else np.array(example.targets, np.int32)[trained]
        return Rendered(np.array(example.token_ids, np.int32)[: trained[-1] + 1], trained, weights, targets)
    if example.text is not None or isinstance(example.completion, str):
        return [renderer(tokenizer).text(str(example.prompt or ""), str(example.text or example.completion), field)]
    parts: dict[str, Any] = {
        "prompt": example.prompt or [],
        "messages": example.messages,
        "completion": example.completion,
    }
    named = [(part, i, message) for part in parts for i, message in enumerate(parts[part] or ())]
    chosen = {at for at, (part, _, message) in enumerate(named) if part != "prompt" and message.trained}
    names = [f"{field}.{part}.{i}" for part, i, _ in named]
    return renderer(tokenizer).chat([message for _, _, message in named], names, chosen, example.tools)


def _plan_pair(tokenizer: Any, pair: PreferencePair, field: str) -> list[_Planned]:
    if isinstance(pair.chosen, str):
        halves = {"chosen": pair.chosen, "rejected": str(pair.rejected)}
        prompt = str(pair.prompt or "")
        return [[renderer(tokenizer).text(prompt, half, f"{field}.{name}")] for name, half in halves.items()]
    return [
        renderer(tokenizer).chat(
            [*context, *half], [f"{field}.{name}"] * (len(context) + 1), {len(context)}, pair.tools
        )
        for name, (context, half) in zip(("chosen", "rejected"), pair.conversations(), strict=True)
    ]  # fmt: skip


def _finished(tokenizer: Any, planned: Iterable[_Planned]) -> list[list[Rendered] | InvalidInput]:
    """The sequences of what is planned."""
    found: list[list[Rendered] | InvalidInput] = []
    with ThreadPoolExecutor(1) as beside:
        waiting: tuple[Any, Any] = (), None
        for chunk in chain(batched(planned, CHUNK), [()]):
            texts = [plan.text for plans in chunk if isinstance(plans, list) for plan in plans]
            encoded = beside.submit(renderer(tokenizer).encode_all, texts) if texts else None
            encodings = iter(waiting[1].result() if waiting[1] else ())
            for plans in waiting[0]:
                found.append(_sequences(tokenizer, plans, encodings))
            waiting = chunk, encoded
    return found


def _sequences(tokenizer: Any, plans: _Planned, encodings: Any) -> list[Rendered] | InvalidInput:
    if isinstance(plans, Rendered):
        return [plans]
    if isinstance(plans, InvalidInput):
        return plans
    own = [next(encodings) for _ in plans]  # all of them, also where the first is refused
    try:
        return [
            one for plan, encoding in zip(plans, own, strict=True) for one in renderer(tokenizer).finish(plan, encoding)
        ]
    except InvalidInput as error:
        return error


def _split(pair: PreferencePair, field: str, chosen: Any, rejected: Any) -> PairTokens | InvalidInput:
    for half in (chosen, rejected):
        if isinstance(half, InvalidInput):
            return half
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
