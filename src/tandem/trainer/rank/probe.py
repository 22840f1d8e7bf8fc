"""The probe: fixed token sequences and their log-probs, with which the publisher verifies vLLM's
weights."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch.nn.functional import pad

from tandem.data.packed_format import PackedBatch
from tandem.model.device import memory
from tandem.model.policy import Policy
from tandem.model.rows import RowTensors
from tandem.spool.schema import LongProbe, Probe
from tandem.training.optimizer import NonFinite

MAX_SEQUENCES = 4
MAX_TOKENS = 64
# Number of tokens before the first trained token, if the probe takes a part of a longer sequence.
CONTEXT = 24
LONG_TOKENS = 8192
# The largest number of logits of the long sequence. To score a prompt, vLLM computes all of its
# logits, and 2**28 logits take 1 GiB in fp32.
LONG_LOGITS = 2**28
SLOTS = 64  # rows are padded to a multiple of this number of slots, for efficient matrix products


@dataclass(frozen=True)
class JobProbe:
    """The probe of one job, computed on the job's own device, in rows of the job's length."""

    sequences: list[list[int]]
    long: list[int]
    row_length: int
    device: torch.device

    @classmethod
    def choose(cls, batch: PackedBatch, vocab_size: int, device: torch.device) -> Self:
        """Chooses the probe's sequences from a job's rows. The same batch always gives the same
        probe.

        Args:
            vocab_size: the number of tokens in the vocabulary, which limits the length of the long
                sequence.
            device: the rank's device.
        """
        long = choose_long(batch, vocab_size)
        return cls(choose_sequences(batch), long, batch.sequence_length, device)

    def rehearse(self, policy: Policy) -> None:
        """Load the kernels that `logprobs` and the job's own passes use; see `Policy.rehearse`."""
        rehearse(self.sequences, self.row_length, self.device, policy)

    def logprobs(self, policy: Policy) -> list[list[float]]:
        """The log-probs of `sequences`."""
        return logprobs(policy, self.sequences, self.row_length, self.device)

    def score(self, policy: Policy, previous: list[list[float]]) -> Probe:
        """The probe's log-probs under the trained policy, as a record for the manifest. `previous`:
        the log-probs before the training."""
        now, base = self.logprobs(policy), previous
        if policy.lora is not None:
            with policy.adapter_disabled():
                base = self.logprobs(policy)
        long = score_long(policy, self.long, self.row_length, self.device)
        return Probe(tokens=self.sequences, logprobs=now, previous=previous, base=base, long=long)


def choose_sequences(batch: PackedBatch) -> list[list[int]]:
    """At most 4 distinct token sequences from the job's data. Each sequence has 2 to 64 tokens, and
    at most the length of a row.

    Each chosen sequence is part of a trained sequence. A trained sequence that is not longer than
    the limit is taken from its beginning. The chosen part of a longer sequence begins CONTEXT
    tokens before the first trained token, because the log-probs of trained tokens change most. The
    chosen part begins earlier if too few tokens follow. The same batch always gives the same
    sequences.
    """
    limit = min(MAX_TOKENS, batch.sequence_length)
    chosen: list[list[int]] = []
    for index in range(len(batch)):
        row = batch.row(index)
        for start in np.flatnonzero(np.diff(row.item_sequence, prepend=-1)):
            in_sequence = row.item_sequence == row.item_sequence[start]
            last = int(row.item_target[in_sequence][-1])
            path = np.flatnonzero(row.subtree_end[: last + 1] > last)
            first_trained = int(row.positions[row.item_target[start]])
            begin = max(0, min(first_trained - CONTEXT, len(path) - limit))
            if (tokens := row.tokens[path[begin : begin + limit]].tolist()) not in chosen:
                chosen.append(tokens)
            if len(chosen) == MAX_SEQUENCES:
                return chosen
    return chosen


def choose_long(batch: PackedBatch, vocab_size: int) -> list[int]:
    """One sequence as long as a row, but with at most LONG_TOKENS tokens and LONG_LOGITS logits.
    The sequence consists of the rows' tokens one after another. If the job has too few tokens, the
    tokens are repeated. Returns an empty list if the sequence would have fewer than 2 * MAX_TOKENS
    tokens, because the short sequences are nearly as long.
    """
    length = min(batch.sequence_length, LONG_TOKENS, LONG_LOGITS // vocab_size)
    if length < 2 * MAX_TOKENS:
        return []
    tokens: list[int] = []
    for index in range(len(batch)):
        row = batch.row(index)
        tokens += row.tokens[: row.num_tokens].tolist()
        if len(tokens) >= length:
            break
    return [int(token) for token in np.resize(tokens, length)]


@torch.no_grad()
def score_long(
    policy: Policy, tokens: list[int], row_length: int, device: torch.device
) -> LongProbe | None:
    """The log-probs of the last 16 tokens of each quarter of `tokens`. A server that accepts only
    shorter prompts can be compared on the first quarters. Returns None if `tokens` is empty.

    Args:
        tokens: the token ids that `choose_long` chose.
        row_length: number of slots of the job's rows.
        device: the rank's device.
    """
    if not tokens:
        return None
    quarters = (len(tokens) * quarter // 4 for quarter in range(1, 5))
    positions = [position for end in quarters for position in range(end - 16, end)]
    targets = torch.tensor(positions, device=device)
    row = replace(
        probe_row([tokens], row_length, device),
        item_source=targets - 1,
        item_token=torch.tensor([tokens[position] for position in positions], device=device),
    )
    values = _scores(policy, row).tolist()
    return LongProbe(tokens=tokens, positions=positions, logprobs=values)


@torch.no_grad()
def logprobs(
    policy: Policy, sequences: list[list[int]], row_length: int, device: torch.device
) -> list[list[float]]:
    """`out[i][j]` = log p(sequences[i][j + 1] | sequences[i][: j + 1]) in nats at temperature 1.

    Args:
        sequences: token ids.
        row_length: number of slots of the job's rows; the sequences are packed into rows of this
            length.
        device: the rank's device.
    """
    out: list[list[float]] = []
    for together in _rows(sequences, row_length):
        values = _scores(policy, probe_row(together, row_length, device))
        out += [part.tolist() for part in values.split([len(tokens) - 1 for tokens in together])]
    return out


def _scores(policy: Policy, row: RowTensors) -> torch.Tensor:
    """The items' log-probs, fp32, on the CPU of every rank. Raises NonFinite if a log-prob is NaN
    or infinite. A manifest can't contain NaN or infinity, and vLLM must not serve weights that give
    such log-probs."""
    values = policy.stage.from_last(policy(row, temperature=1.0).logprobs.float().cpu())
    if wrong := int((~values.isfinite()).sum()):
        raise NonFinite(
            f"{wrong} of the probe's {len(values)} log-probs are not finite: the weights overflow;"
            " lower the learning rate, or roll the run back"
        )
    return values


def mean_difference(one: list[list[float]], other: list[list[float]]) -> float:
    """Mean absolute difference of two results of `logprobs`, in nats."""
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def rehearse(
    sequences: list[list[int]], row_length: int, device: torch.device, policy: Policy
) -> None:
    """Load the kernels that `logprobs` and the job's own passes use; see `Policy.rehearse`.

    Args:
        sequences: token ids; only the sequences that fit into the first row are used.
        row_length: number of slots of the job's rows.
        device: the rank's device.
    """
    policy.rehearse(probe_row(_rows(sequences, row_length)[0], row_length, device))
    memory.release_workspaces()


def _rows(sequences: list[list[int]], length: int) -> list[list[list[int]]]:
    """The sequences, in their order, distributed to rows of at most `length` tokens."""
    rows: list[list[list[int]]] = []
    for tokens in sequences:
        if not rows or sum(map(len, rows[-1])) + len(tokens) > length:
            rows.append([])
        rows[-1].append(tokens)
    return rows


def probe_row(
    sequences: list[list[int]], row_length: int, device: torch.device, multiple: int = SLOTS
) -> RowTensors:
    """One row of sequences that don't attend to one another. Every token except the first of each
    sequence is an item, whose log-prob is computed.

    The attention's row has the length of the job's own rows, so that the kernels compiled for the
    job's rows are used.

    Args:
        sequences: token ids.
        row_length: number of slots of the job's rows.
        device: the device of the row's tensors.
        multiple: the number of slots in use is rounded up to a multiple of this number.
    """
    sizes = torch.tensor([len(tokens) for tokens in sequences])
    ends = sizes.cumsum(0)
    used = int(ends[-1])
    padding = (0, min(-(-used // multiple) * multiple, row_length) - used)
    positions = torch.arange(used) - (ends - sizes).repeat_interleave(sizes)
    targets = positions.nonzero()[:, 0]
    flat = torch.tensor([token for tokens in sequences for token in tokens])
    return RowTensors(
        tokens=pad(flat, padding).to(device),
        positions=pad(positions, padding).to(device),
        subtree_end=torch.cat([ends.repeat_interleave(sizes), torch.arange(used, row_length) + 1]),
        item_source=(targets - 1).to(device),
        item_token=flat[targets].to(device),
    )
