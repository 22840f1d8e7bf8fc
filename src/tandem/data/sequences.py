"""Linear token sequences: what turns become, and how they are made to fit a row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from tandem.data.packed import Float32, Int32
from tandem.data.trajectories import PackingSettings


@dataclass(frozen=True)
class LinearSequence:
    """`tokens` [n] int32, the last of which is trained; `targets` [k] int32: indices in `tokens` of the trained ones,
    rising, the first >= 1, k >= 1; `logprobs` [k] float32: the sampler's, nats; NaN where nothing was sampled."""

    tokens: Int32
    targets: Int32
    logprobs: Float32


def linear_sequence(tokens: list[int], targets: list[int], logprobs: list[float]) -> LinearSequence:
    """Cuts off what follows the last trained token: nothing that is trained attends to it."""
    return LinearSequence(
        np.array(tokens[: targets[-1] + 1], np.int32), np.array(targets, np.int32), np.array(logprobs, np.float32)
    )


def link_turns(turns: Iterable[tuple[list[int], list[int], list[float]]]) -> list[LinearSequence]:
    """Turns (prompt, sampled tokens, log-probs) to sequences: a turn whose prompt starts with everything of the turn
    before it (prompt and sampled tokens) continues that turn's sequence, what lies between them being context; any
    other turn starts a new one."""
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


@dataclass(frozen=True)
class Fitted:
    """`sequences` is empty when the trajectory is dropped."""

    sequences: list[LinearSequence]
    truncated: bool


def fit_to_row(sequences: list[LinearSequence], packing: PackingSettings) -> Fitted:
    """Applies `packing.too_long` ("drop" or "truncate") to one trajectory. Truncation keeps the first
    `sequence_length` tokens of a sequence, and leaves a sequence out that has no trained token there."""
    length = packing.sequence_length
    if all(len(sequence.tokens) <= length for sequence in sequences):
        return Fitted(sequences, truncated=False)
    if packing.too_long == "drop":
        return Fitted([], truncated=False)
    kept = []
    for sequence in sequences:
        if len(sequence.tokens) > length:
            count = int(np.searchsorted(sequence.targets, length))
            if count == 0:
                continue
            end = int(sequence.targets[count - 1]) + 1
            sequence = replace(
                sequence,
                tokens=sequence.tokens[:end],
                targets=sequence.targets[:count],
                logprobs=sequence.logprobs[:count],
            )
        kept.append(sequence)
    return Fitted(kept, truncated=bool(kept))
