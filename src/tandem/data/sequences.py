"""Linear token sequences: made from turns, and made to fit a row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tandem.data.inputs import PackingSettings
from tandem.data.packed_format import Float32, Int32


@dataclass(frozen=True)
class LinearSequence:
    """`tokens` [n] int32, of which the last is trained; `targets` [k] int32: indices in `tokens` of the trained ones,
    rising, the first >= 1, k >= 1; `logprobs` [k] float32: the sampler's, nats; NaN where nothing was sampled."""

    tokens: Int32
    targets: Int32
    logprobs: Float32


def linear_sequence(tokens: list[int], targets: list[int], logprobs: list[float]) -> LinearSequence:
    """Cuts off the tokens after the last trained one: no trained token attends to them."""
    return LinearSequence(
        np.array(tokens[: targets[-1] + 1], np.int32), np.array(targets, np.int32), np.array(logprobs, np.float32)
    )


def link_turns(turns: Iterable[tuple[list[int], list[int], list[float]]]) -> list[LinearSequence]:
    """Joins turns (prompt, sampled tokens, log-probs) to sequences.

    A turn whose prompt starts with all tokens of the turn before it (prompt and sampled) continues that turn's
    sequence; the tokens between them are context. Any other turn starts a new sequence.
    """
    sequences: list[LinearSequence] = []
    tokens: list[int] = []
    targets: list[int] = []
    logprobs: list[float] = []
    for prompt, sampled, sampled_logprobs in turns:
        if tokens and prompt[: len(tokens)] != tokens:
            sequences.append(linear_sequence(tokens, targets, logprobs))
            targets, logprobs = [], []
        tokens = prompt + sampled
        targets.extend(range(len(prompt), len(tokens)))
        logprobs.extend(sampled_logprobs)
    sequences.append(linear_sequence(tokens, targets, logprobs))
    return sequences


def fit_to_row(sequences: list[LinearSequence], packing: PackingSettings) -> list[LinearSequence]:
    """The sequences of one trajectory after `packing.too_long`; empty if the trajectory is dropped.

    "truncate" keeps the first `sequence_length` tokens of a sequence, and leaves out a sequence without a trained token
    among them.
    """
    length = packing.sequence_length
    if all(len(sequence.tokens) <= length for sequence in sequences):
        return sequences
    if packing.too_long == "drop":
        return []
    fitted = []
    for sequence in sequences:
        count = int(np.searchsorted(sequence.targets, length))
        if count:
            end = int(sequence.targets[count - 1]) + 1
            fitted.append(LinearSequence(sequence.tokens[:end], sequence.targets[:count], sequence.logprobs[:count]))
    return fitted
