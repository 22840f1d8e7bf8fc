"""Turns examples and pairs into tokens, and says which of them are trained (`tandem.data.chat_template` says how)."""

from collections.abc import Iterable, Sequence
from itertools import batched, pairwise
from typing import Any

import numpy as np

from tandem.data.chat_template import Plan, Rendered, renderer
from tandem.data.examples import PreferencePair, Rendering, SFTExample
from tandem.data.packed_format import Int32
from tandem.data.prefix_tree import common_prefix
from tandem.errors import InvalidInput

_CHUNK = 256  # examples that are tokenised together
type _Planned = list[Plan] | Rendered | InvalidInput
type PairTokens = tuple[Int32, Int32, Int32]


def render(tokenizer: Any, examples: Sequence[SFTExample], fields: Sequence[str]) -> list[list[Rendered]]:
    """The sequences of each example. `tokenizer` may be None where all examples are `token_ids`.

    InvalidInput (below the example's of `fields`) for the first example that the template refuses or whose mask is
    ambiguous.
    """
    return [_raised(rendered) for rendered in _render(tokenizer, examples, fields)]


def render_pairs(tokenizer: Any, pairs: Sequence[PreferencePair], fields: Sequence[str]) -> list[PairTokens]:
    """(prompt, chosen, rejected) of each pair, as token ids, none of them empty. Raises as `render` does."""
    return [_raised(rendered) for rendered in _render_pairs(tokenizer, pairs, fields)]


def preview(tokenizer: Any, examples: Sequence[SFTExample], pairs: Sequence[PreferencePair]) -> list[Rendering]:
    """How each example, and then each pair, is trained, or why it is refused: below `examples.<i>` or `pairs.<i>`."""
    found: list[Any] = _render(tokenizer, examples, [f"examples.{i}" for i in range(len(examples))])
    for pair in _render_pairs(tokenizer, pairs, [f"pairs.{i}" for i in range(len(pairs))]):
        if isinstance(pair, InvalidInput):
            found.append(pair)
        else:
            wholes = [np.concatenate([pair[0], half]) for half in pair[1:]]
            found.append([Rendered(one, np.arange(len(pair[0]), len(one), dtype=np.int32)) for one in wholes])
    return [
        Rendering(error=one.message, field=one.field) if isinstance(one, InvalidInput) else _rendering(tokenizer, one)
        for one in found
    ]


def _rendering(tokenizer: Any, sequences: list[Rendered]) -> Rendering:
    parts = []
    for one in sequences:
        weights = np.zeros(len(one.tokens), np.float32)
        weights[one.trained] = 1 if one.weights is None else one.weights
        runs = pairwise([0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), len(weights)])
        parts.append([(tokenizer.decode(one.tokens[a:b]), float(weights[a])) for a, b in runs])
    lengths, trained = [len(one.tokens) for one in sequences], sum(len(one.trained) for one in sequences)
    return Rendering(parts=parts, lengths=lengths, trained=trained)


def _raised[T](rendered: T | InvalidInput) -> T:
    if isinstance(rendered, InvalidInput):
        raise rendered
    return rendered


def _render(
    tokenizer: Any, examples: Sequence[SFTExample], fields: Sequence[str]
) -> list[list[Rendered] | InvalidInput]:
    return _finished(tokenizer, (_plan(tokenizer, *both) for both in zip(examples, fields, strict=True)))


def _plan(tokenizer: Any, example: SFTExample, field: str) -> _Planned:
    if example.token_ids is not None:
        flags = np.array(example.trainable if example.trainable is not None else example.weights)
        trained = np.flatnonzero(flags).astype(np.int32)
        weights = None if example.weights is None else flags[trained].astype(np.float32)
        targets = None if example.targets is None else np.array(example.targets, np.int32)[trained]
        return Rendered(np.array(example.token_ids, np.int32)[: trained[-1] + 1], trained, weights, targets)
    if example.text is not None or isinstance(example.completion, str):
        return [renderer(tokenizer).text(str(example.prompt or ""), str(example.text or example.completion), field)]
    parts: dict[str, Any] = {name: getattr(example, name) for name in ("prompt", "messages", "completion")}
    named = [(part, i, message) for part in parts for i, message in enumerate(parts[part] or ())]
    chosen = {at for at, (part, _, message) in enumerate(named) if part != "prompt" and message.trained}
    names = [f"{field}.{part}.{i}" for part, i, _ in named]
    return renderer(tokenizer).chat([message for _, _, message in named], names, chosen, example.tools)


def _render_pairs(
    tokenizer: Any, pairs: Sequence[PreferencePair], fields: Sequence[str]
) -> list[PairTokens | InvalidInput]:
    def planned() -> Iterable[_Planned]:
        for pair, field in zip(pairs, fields, strict=True):
            for i, name in enumerate(("chosen", "rejected")):
                half, name = getattr(pair, name), f"{field}.{name}"
                if isinstance(half, str):
                    yield [renderer(tokenizer).text(str(pair.prompt or ""), half, name)]
                else:
                    context, half = pair.conversations()[i]
                    names = [name] * (len(context) + 1)
                    yield renderer(tokenizer).chat([*context, *half], names, {len(context)}, pair.tools)

    halves = iter(_finished(tokenizer, planned()))
    return [_split(pair, field, next(halves), next(halves)) for pair, field in zip(pairs, fields, strict=True)]


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


def _finished(tokenizer: Any, planned: Iterable[_Planned]) -> list[list[Rendered] | InvalidInput]:
    """The sequences of what is planned."""
    found: list[list[Rendered] | InvalidInput] = []
    for chunk in batched(planned, _CHUNK):
        texts = [plan.text for plans in chunk if isinstance(plans, list) for plan in plans]
        encodings = iter(renderer(tokenizer).encoder.encode_all(texts) if texts else ())
        found += [_sequences(tokenizer, plans, encodings) for plans in chunk]
    return found


def _sequences(tokenizer: Any, plans: _Planned, encodings: Any) -> list[Rendered] | InvalidInput:
    if not isinstance(plans, list):
        return [plans] if isinstance(plans, Rendered) else plans
    own = [next(encodings) for _ in plans]  # all of them, also where the first is refused
    try:
        done = [renderer(tokenizer).finish(plan, encoded) for plan, encoded in zip(plans, own, strict=True)]
        return [sequence for sequences in done for sequence in sequences]
    except InvalidInput as error:
        return error
