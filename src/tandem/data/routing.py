"""Reads the experts that vLLM's router chose. A turn carries the router's experts for routing
replay: training uses the same experts as sampling (Ma et al., 2025, arXiv:2510.11370)."""

import base64
import io
from typing import NamedTuple

import numpy as np
from numpy.lib import format as npy

from tandem.data.inputs import Turn
from tandem.data.packed_format import Int16
from tandem.errors import InvalidInput


class Mixture(NamedTuple):
    """The sizes of the base model's mixtures of experts."""

    layers: int
    num_experts: int
    per_token: int
    dense: int = 0
    """The first `dense` layers have no experts. vLLM returns zeros for these layers."""


def routed_expert_ids(turn: Turn, mixture: Mixture | None, field: str) -> Int16 | None:
    """The experts of all tokens of prompt and answer except the last token, int16 [tokens - 1,
    layers, experts per token]. Returns None if the turn has no `routed_experts`. Raises
    InvalidInput if the array does not fit the turn or the model.

    Args:
        turn: a turn; its `routed_experts` is base64 of a file in NumPy's format, or None.
        mixture: the base model's mixture; None: the base model is not a mixture of experts.
        field: the error's field.
    """
    if turn.routed_experts is None:
        return None
    if mixture is None:
        raise InvalidInput("the base model is not a mixture of experts; leave it out", field=field)
    try:
        data = io.BytesIO(base64.b64decode(turn.routed_experts, validate=True))
        experts: Int16 = npy.read_array(data, allow_pickle=False)  # type: ignore[no-untyped-call]
    except Exception as error:  # NumPy raises errors of many types
        raise InvalidInput(
            f"not base64 of an array in NumPy's file format: {error}", field=field
        ) from error
    shape = (
        len(turn.prompt_token_ids) + len(turn.token_ids) - 1,
        mixture.layers,
        mixture.per_token,
    )
    if experts.shape != shape or experts.dtype.kind not in "iu":
        expected = f"integers {list(shape)}: all tokens but the last, layers, experts per token"
        raise InvalidInput(
            f"{experts.dtype} {list(experts.shape)}, expected {expected}", field=field
        )
    if experts.min(initial=0) < 0 or experts.max(initial=0) >= mixture.num_experts:
        raise InvalidInput(f"an expert is outside [0, {mixture.num_experts})", field=field)
    chosen = experts[:, mixture.dense :].astype(np.int16)
    twice = (np.diff(np.sort(chosen, axis=-1), axis=-1) == 0).any((1, 2))
    if twice.any():
        problem = (
            f"token {int(twice.argmax())} has an expert twice: the sampler did not record its"
            " router's choice"
        )
        raise InvalidInput(problem, field=field)
    return experts.astype(np.int16)


def joined(known: Int16 | None, more: Int16 | None) -> Int16 | None:
    """The experts of each token of a sequence, including the tokens of the turn that extends the
    sequence. `known`: the experts of the sequence's tokens before this turn. `more`: the experts
    that the turn gives for all of its tokens. Each token keeps the experts of the turn that sampled
    the token. `known` and `more` are int16 [tokens, layers, experts per token], or None if the
    experts are unknown."""
    if known is None or more is None:
        return more if known is None else known
    return np.concatenate([known, more[len(known) :]])
