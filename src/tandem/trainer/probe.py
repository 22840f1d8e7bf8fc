"""The probe: fixed token sequences and their log-probs, by which the publisher checks what vLLM really serves."""

from __future__ import annotations

import numpy as np
import torch

from tandem.data.packed import PackedBatch, PackedRow
from tandem.model.policy import Policy, row_tensors

MAX_SEQUENCES = 4
MAX_TOKENS = 64
# Of those, how many come before the first trained token where a sequence is longer: trained tokens are what moves.
CONTEXT = 24


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

    Sequences are run one per row, padded to the job's row length so that kernels compiled for it are used again.
    """
    out = []
    for tokens in sequences:
        result = policy(row_tensors(_as_row(tokens, row_length), device), temperature=1.0)
        out.append(result.logprobs.float().cpu().tolist())
    return out


def _as_row(tokens: list[int], length: int) -> PackedRow:
    n = len(tokens)
    padding = np.arange(1, length + 1, dtype=np.int32)
    targets = np.arange(1, n, dtype=np.int32)
    return PackedRow(
        index=0,
        num_tokens=n,
        tokens=np.pad(np.array(tokens, np.int32), (0, length - n)),
        positions=np.pad(np.arange(n, dtype=np.int32), (0, length - n)),
        subtree_end=np.where(np.arange(length) < n, n, padding).astype(np.int32),
        item_target=targets,
        item_source=targets - 1,
        item_sequence=np.zeros(n - 1, np.int32),
        item_trajectory=np.zeros(n - 1, np.int32),
        item_logprob=np.zeros(n - 1, np.float32),
        item_advantage=np.zeros(n - 1, np.float32),
    )
