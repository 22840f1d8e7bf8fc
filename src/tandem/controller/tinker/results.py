"""Writes results in protobuf, as the package `tinker` reads them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.controller.tinker.protobuf import (
    DTYPE_FLOAT32,
    STOP_REASON_LENGTH,
    STOP_REASON_STOP,
    ForwardBackwardOutput,
    SampleResponse,
)
from tandem.data.packed_format import Float32, Int32

_TYPE = "ArrayRecord"
ABSENT = -99999.0
"""The log-prob that marks an empty entry of `Top` for the package."""


@dataclass(frozen=True)
class Top:
    """The most probable tokens at each position: two arrays of shape [positions, k]. An empty entry
    has token 0 and log-prob `ABSENT`."""

    tokens: Int32
    logprobs: Float32


@dataclass(frozen=True)
class Sampled:
    """One sampled sequence. `stopped` is True if a stop token or stop text ended the sequence, and
    False if the length limit ended it."""

    tokens: Int32
    logprobs: Float32
    stopped: bool
    top: Top | None = None


@dataclass(frozen=True)
class SampleResult:
    """The result of a sampling request. The field `prompt` has the log-prob of each token of the
    prompt, float32, in nats; an unknown log-prob is NaN."""

    sequences: Sequence[Sampled]
    prompt: Float32 | None = None
    top: Top | None = None
    cached_tokens: int = 0


def encode_pass(logprobs: Sequence[bytes], metrics: Mapping[str, float]) -> bytes:
    """The result of a forward or backward pass as protobuf. The argument `logprobs` has one entry
    for each datum: the datum's log-probs as the bytes of a little-endian float32 array."""
    message = ForwardBackwardOutput(loss_fn_output_type=_TYPE, metrics=metrics)
    record = message.loss_fn_outputs.add(type_tag=_TYPE, num_datums=len(logprobs))
    offsets = np.cumsum([0, *map(len, logprobs)], dtype="<i8")
    field = record.fields["logprobs"]
    field.data, field.offsets = b"".join(logprobs), offsets.tobytes()
    field.dtype = DTYPE_FLOAT32
    return bytes(message.SerializeToString())


def encode_sample(result: SampleResult) -> bytes:
    message = SampleResponse(prompt_cache_hit_tokens=result.cached_tokens)
    for one in result.sequences:
        sequence = message.sequences.add(
            stop_reason=STOP_REASON_STOP if one.stopped else STOP_REASON_LENGTH,
            tokens=one.tokens.astype("<i4").tobytes(),
            logprobs=one.logprobs.astype("<f4").tobytes(),
        )
        if one.top is not None:
            _write_top(sequence.topk_sampled_logprobs, one.top)
    if result.prompt is not None:
        message.prompt_logprobs = result.prompt.astype("<f4").tobytes()
    if result.top is not None:
        _write_top(message.topk_prompt_logprobs, result.top)
    return bytes(message.SerializeToString())


def _write_top(message: object, top: Top) -> None:
    length, k = top.tokens.shape
    values = {"length": length, "k": k}
    values |= {"token_ids": top.tokens.astype("<i4").tobytes()}
    values |= {"logprobs": top.logprobs.astype("<f4").tobytes()}
    for name, value in values.items():
        setattr(message, name, value)
