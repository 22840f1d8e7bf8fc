"""The probe: fixed token sequences and their log-probs, by which the publisher checks what vLLM really serves."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.data.packed import PackedBatch, PackedRow
from tandem.model.policy import Policy, RowTensors, row_tensors

MAX_SEQUENCES = 4
MAX_TOKENS = 64
# Of those, how many come before the first trained token where a sequence is longer: trained tokens are what moves.
CONTEXT = 24
SLOTS = 64  # what is computed is a multiple of, as matrix products like it


def choose(batch: PackedBatch) -> list[list[int]]:
    """Up to 4 distinct token sequences of 2 to 64 tokens (and no more than a row holds) from the job's data.

    Each is a stretch of one trained sequence that begins at its start, or CONTEXT tokens before its first trained token
    if it is longer than a probe. The same batch gives the same probes.
    """
    limit = min(MAX_TOKENS, batch.sequence_length)
    chosen: dict[tuple[int, ...], None] = {}
    for index in range(len(batch)):
        row = batch.row(index)
        for start in np.flatnonzero(np.diff(row.item_sequence, prepend=-1)):
            in_sequence = row.item_sequence == row.item_sequence[start]
            last = int(row.item_target[in_sequence][-1])
            path = np.flatnonzero(row.subtree_end[: last + 1] > last)
            first_trained = int(row.positions[row.item_target[start]])
            begin = max(0, min(first_trained - CONTEXT, len(path) - limit))
            chosen[tuple(row.tokens[path[begin : begin + limit]].tolist())] = None
            if len(chosen) == MAX_SEQUENCES:
                return [list(tokens) for tokens in chosen]
    return [list(tokens) for tokens in chosen]


@torch.no_grad()
def logprobs(policy: Policy, sequences: list[list[int]], row_length: int, device: torch.device) -> list[list[float]]:
    """`out[i][j]` = log p(sequences[i][j + 1] | sequences[i][: j + 1]) in nats at temperature 1.

    As many sequences as fit share a row, which to the attention is as long as the job's own, so that the kernels
    compiled for those serve here too.
    """
    out: list[list[float]] = []
    for together in _rows(sequences, row_length):
        result = policy(_tensors(together, row_length, device), temperature=1.0)
        values = result.logprobs.float().cpu()
        out += [part.tolist() for part in values.split([len(tokens) - 1 for tokens in together])]
    return out


def rehearse(policy: Policy, sequences: list[list[int]], row_length: int, device: torch.device) -> None:
    """Do once what `logprobs` and the job's rows do for the first time; see `Policy.rehearse`."""
    policy.rehearse(_tensors(_rows(sequences, row_length)[0], row_length, device))


def _tensors(sequences: list[list[int]], row_length: int, device: torch.device) -> RowTensors:
    used = sum(map(len, sequences))
    return row_tensors(_as_row(sequences, row_length), device, min(-(-used // SLOTS) * SLOTS, row_length))


def _rows(sequences: list[list[int]], length: int) -> list[list[list[int]]]:
    """The sequences in order, in rows of at most `length` tokens."""
    rows: list[list[list[int]]] = []
    for tokens in sequences:
        if not rows or sum(map(len, rows[-1])) + len(tokens) > length:
            rows.append([])
        rows[-1].append(tokens)
    return rows


def _as_row(sequences: list[list[int]], length: int) -> PackedRow:
    """One row of sequences that don't see one another; every token but each sequence's first is an item."""
    sizes = np.array([len(tokens) for tokens in sequences])
    used, ends = int(sizes.sum()), np.cumsum(sizes)
    first = np.repeat(ends - sizes, sizes)  # of each slot's sequence
    slots = np.arange(used)
    targets = slots[slots > first].astype(np.int32)
    nothing = np.zeros(len(targets), np.int32)

    def padded(values: NDArray[np.int64], padding: NDArray[np.int64]) -> NDArray[np.int32]:
        return np.concatenate([values, padding]).astype(np.int32)

    rest = np.arange(used, length)
    return PackedRow(
        index=0,
        num_tokens=used,
        tokens=padded(np.concatenate([np.array(tokens) for tokens in sequences]), 0 * rest),
        positions=padded(slots - first, 0 * rest),
        subtree_end=padded(np.repeat(ends, sizes), rest + 1),
        item_target=targets,
        item_source=targets - 1,
        item_sequence=nothing,
        item_trajectory=nothing,
        item_logprob=nothing.astype(np.float32),
        item_advantage=nothing.astype(np.float32),
    )
