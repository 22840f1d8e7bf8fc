"""Examples and pairs as people look at them: rendered texts, with the weight of each part in the loss."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tandem.data.examples import PreferencePair, Rendering, SFTExample
from tandem.data.packed_format import Float32, Int32
from tandem.data.render import render_each, render_pairs_each
from tandem.errors import InvalidInput


def previews(tokenizer: Any, examples: Sequence[SFTExample], pairs: Sequence[PreferencePair]) -> list[Rendering]:
    """How each example, and then each pair, is trained, or why it is refused."""
    found: list[Rendering] = []
    for rendered in render_each(tokenizer, examples, [f"examples.{i}" for i in range(len(examples))]):
        if isinstance(rendered, InvalidInput):
            found.append(_refused(rendered))
            continue
        weighted = []
        for one in rendered:
            weights = np.zeros(len(one.tokens), np.float32)
            weights[one.trained] = 1 if one.weights is None else one.weights
            weighted.append((one.tokens, weights))
        found.append(_rendering(tokenizer, weighted))
    for split in render_pairs_each(tokenizer, pairs, [f"pairs.{i}" for i in range(len(pairs))]):
        if isinstance(split, InvalidInput):
            found.append(_refused(split))
            continue
        prompt, *halves = split
        weighted = [
            (np.concatenate([prompt, half]), np.repeat(np.array([0, 1], np.float32), [len(prompt), len(half)]))
            for half in halves
        ]
        found.append(_rendering(tokenizer, weighted))
    return found


def _refused(error: InvalidInput) -> Rendering:
    return Rendering(error=error.message, field=error.field)


def _rendering(tokenizer: Any, sequences: list[tuple[Int32, Float32]]) -> Rendering:
    lengths = [len(tokens) for tokens, _ in sequences]
    trained = sum(int(np.count_nonzero(weights)) for _, weights in sequences)
    return Rendering(parts=[_parts(tokenizer, *one) for one in sequences], lengths=lengths, trained=trained)


def _parts(tokenizer: Any, tokens: Int32, weights: Float32) -> list[tuple[str, float]]:
    borders = [0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), len(tokens)]
    return [(tokenizer.decode(tokens[a:b], clean_up_tokenization_spaces=False), float(weights[a]))
            for a, b in pairwise(borders)]  # fmt: skip
