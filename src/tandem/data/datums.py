"""The data of a session, and its losses under the names of Tinker's API. The data are sequences
with a target and a factor at each position, and optionally with the sampler's log-probs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from tandem.data.inputs import MAX_FLOAT32
from tandem.data.packed_format import Float32, Int32, write_packed
from tandem.data.packing import LinearSequence, PackedTrajectory, common_prefix, pack
from tandem.data.render import check_ids
from tandem.errors import InvalidInput
from tandem.spool.schema import PassRequest, RLLoss, SFTLoss

SHORTEST_ROW, USUAL_ROW = 128, 4096
"""Lengths of rows, in slots. All lengths are powers of two, so that few lengths are compiled. An
8 B model computes rows of 2,048 slots a third slower than rows of 4,096 slots."""
MOST_TOKENS = 2**20
# Tandem's losses clamp the ratio at e^20, so a bound of 1e9 has no effect.
_NO_BOUND = 1e9
_Bounds = tuple[float, float]
_BOUNDS: dict[str, _Bounds] = {
    "ppo": (0.8, 1.2),
    "cispo": (0.0, 4.0),
    # arXiv:2507.18071, section 5.1
    "gspo": (1 - 3e-4, 1 + 4e-4),
}
_POLICIES: dict[str, Literal["ppo", "cispo", "gspo_token"]] = {
    "ppo": "ppo",
    "cispo": "cispo",
    "gspo": "gspo_token",
}
_CONFIG = {
    "cross_entropy": (),
    "importance_sampling": (),
    "ppo": ("clip_low_threshold", "clip_high_threshold"),
    "cispo": ("clip_low_threshold", "clip_high_threshold"),
    "gspo": ("clip_low_threshold", "clip_high_threshold"),
    "dro": ("beta",),
}


@dataclass(frozen=True)
class Datum:
    """One sequence of a session. All arrays have the shape [n].

    `tokens`: int32 token ids. `targets`: `targets[i]` is predicted from `tokens[: i + 1]`.
    `factors`: the weights for cross-entropy, the advantages for other losses. `logprobs`: the
    sampler's log-probs in nats; every loss except cross-entropy needs them. `sequence_ratio_mask`:
    nonzero at each position whose log-ratio is part of the sequence's ratio; GSPO needs it."""

    tokens: Int32
    targets: Int32
    factors: Float32
    logprobs: Float32 | None = None
    sequence_ratio_mask: Float32 | None = None


def named_loss(name: str, config: Mapping[str, float]) -> SFTLoss | RLLoss:
    """The settings of the loss that Tinker's API calls `name`. The loss is a sum over all items.
    Raises InvalidInput (fields `loss_fn`, `loss_fn_config...`) for an unknown name, and for a
    setting that the loss does not have.

    - cross_entropy: -sum w lp
    - importance_sampling: -sum r A
    - ppo: -sum min(r A, clip(r, low, high) A)
    - cispo: -sum sg(clip(r, low, high)) A lp
    - gspo: -sum min(s A, clip(s, low, high) A), with s = exp(mean log r) over the datum. Each token
      has its own gradient (`gspo_token` in `tandem.training.losses`).
    - dro: -sum (A lp - beta / 2 (log r)^2)
    """
    if name not in _CONFIG:
        raise InvalidInput(f"{name!r:.60} is none of {', '.join(_CONFIG)}", field="loss_fn")
    for key, value in config.items():
        field = f"loss_fn_config.{key}"
        if key not in _CONFIG[name]:
            known = ", ".join(_CONFIG[name]) or "nothing"
            raise InvalidInput(f"{name} has no such setting; it has {known}", field=field)
        if not 0 <= value <= MAX_FLOAT32:
            raise InvalidInput(f"{value} is negative or not finite", field=field)
    if name == "cross_entropy":
        return SFTLoss(normalisation="sum")
    if name == "dro":
        if "beta" not in config:
            raise InvalidInput("dro needs beta", field="loss_fn_config.beta")
        return RLLoss(policy="dro", dro_beta=config["beta"], normalisation="sum")
    if name == "importance_sampling":
        return RLLoss(policy="ppo", clip_low=1.0, clip_high=_NO_BOUND, normalisation="sum")
    low, high = (
        config.get(key, default) for key, default in zip(_CONFIG[name], _BOUNDS[name], strict=True)
    )
    if low > 1 or high < 1:
        problem = f"[{low}, {high}] does not hold 1, the ratio of a policy that has not moved"
        raise InvalidInput(problem, field="loss_fn_config")
    return RLLoss(
        policy=_POLICIES[name],
        clip_low=1.0 - low,
        clip_high=high - 1.0,
        normalisation="sum",
    )


def pass_request(
    kind: Literal["forward", "forward_backward"],
    data: Sequence[Datum],
    loss_name: str,
    config: Mapping[str, float],
    *,
    vocab_size: int,
    longest: int = MOST_TOKENS,
) -> tuple[PassRequest, Callable[[Path], str]]:
    """The request, and the function that writes the request's packed arrays, as `RequestLog.append`
    takes them. The same arguments give packed arrays with the same bytes. Raises InvalidInput
    (fields `data.<i>...`) for data that can't be computed.

    Args:
        data: at least one datum.
        loss_name, config: the loss and its settings, see `named_loss`.
        vocab_size: the model's vocabulary size.
        longest: a datum may have at most `longest` - 1 tokens, because the last target takes a
            slot.
    """
    loss = named_loss(loss_name, config)
    if not data:
        raise InvalidInput("there is no datum", field="data")
    for i, datum in enumerate(data):
        _check(datum, loss, vocab_size, longest, f"data.{i}")
    sequences = [_sequence(datum) for datum in data]
    trajectories = [
        PackedTrajectory([sequence], group, 1.0, float("nan"), False)
        for sequence, group in zip(sequences, _groups(sequences), strict=True)
    ]
    length = _row_length([len(sequence.tokens) for sequence in sequences])
    arrays = pack(trajectories, length)
    request = PassRequest(
        kind=kind,
        loss=loss,
        loss_name=loss_name,
        lengths=tuple(len(datum.tokens) for datum in data),
        num_rows=len(arrays["row_num_tokens"]),
        sequence_length=length,
        num_tokens=int(arrays["row_num_tokens"].sum()),
    )
    return request, lambda directory: write_packed(directory, arrays, vocab_size=vocab_size)


def _check(datum: Datum, loss: SFTLoss | RLLoss, vocab_size: int, longest: int, field: str) -> None:
    length = len(datum.tokens)
    if not 1 <= length < longest:
        problem = f"{length} tokens; a datum has 1 to {longest - 1} and the last one's target"
        raise InvalidInput(problem, field=field)
    if isinstance(loss, RLLoss) and datum.logprobs is None:
        raise InvalidInput(
            "missing; this loss needs the sampler's log-probs", field=f"{field}.logprobs"
        )
    mask = datum.sequence_ratio_mask
    if (
        isinstance(loss, RLLoss)
        and loss.policy == "gspo_token"
        and (mask is None or not mask.any())
    ):
        problem = "marks no token; this loss needs those whose ratio is the sequence's"
        raise InvalidInput(problem, field=f"{field}.sequence_ratio_mask")
    columns = {
        "targets": datum.targets,
        "factors": datum.factors,
        "logprobs": datum.logprobs,
        "sequence_ratio_mask": mask,
    }
    for name, column in columns.items():
        if column is not None and column.shape != (length,):
            problem = f"shape {column.shape}; give one number for each of {length} tokens"
            raise InvalidInput(problem, field=f"{field}.{name}")
        if column is not None and not np.isfinite(column).all():
            raise InvalidInput("not all are finite", field=f"{field}.{name}")
    for name, ids in (("tokens", datum.tokens), ("targets", datum.targets)):
        if (lowest := int(ids.min())) < 0:
            raise InvalidInput(f"token id {lowest} is negative", field=f"{field}.{name}")
        check_ids(ids, vocab_size, f"{field}.{name}")


def _sequence(datum: Datum) -> LinearSequence:
    """The datum as a sequence that trains the target of every position. The sequence ends with the
    last target, so it has one token more than the datum."""
    logprobs = datum.logprobs
    if logprobs is not None and datum.sequence_ratio_mask is not None:
        logprobs = np.where(datum.sequence_ratio_mask != 0, logprobs, np.nan)
    return LinearSequence.of(
        np.append(datum.tokens, datum.targets[-1:]).astype(np.int32),
        np.arange(1, len(datum.tokens) + 1, dtype=np.int32),
        targets=datum.targets.astype(np.int32),
        weights=datum.factors.astype(np.float32),
        logprobs=None if logprobs is None else logprobs.astype(np.float32),
    )


def _groups(sequences: Sequence[LinearSequence]) -> list[int]:
    """The number of each sequence's group, for the packer. Groups are numbered from 0, in the order
    of their first sequences. Neighbours in lexicographic order form a group if they share at least
    half of the shorter sequence, as samples of one prompt do."""
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tokens.tolist())
    leader = {order[0]: order[0]}
    for before, after in pairwise(order):
        a, b = sequences[before].tokens, sequences[after].tokens
        joins = 2 * common_prefix(a, b) >= min(len(a), len(b))
        leader[after] = leader[before] if joins else after
    numbers: dict[int, int] = {}
    return [numbers.setdefault(leader[i], len(numbers)) for i in range(len(sequences))]


def _row_length(lengths: Sequence[int]) -> int:
    """The number of slots of a row, a power of two. All sequences fit into one row if USUAL_ROW
    slots suffice. A row has more than USUAL_ROW slots only if the longest sequence needs them."""
    wanted = max(SHORTEST_ROW, *lengths, min(sum(lengths), USUAL_ROW))
    return int(1 << (wanted - 1).bit_length())
