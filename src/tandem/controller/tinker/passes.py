"""Reads the body of a `forward_backward` request. The body is protobuf, optionally compressed by
zstd, and becomes arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from tandem.controller.tinker.protobuf import (
    DTYPE_FLOAT32,
    DTYPE_INT64,
    ForwardBackwardRequest,
)
from tandem.data.datums import Datum
from tandem.data.packed_format import Int32
from tandem.errors import InvalidInput, RequestTooLarge

PROTOBUF = "application/x-protobuf"
MOST_DATA = 2**14
_DTYPES: dict[int, Any] = {DTYPE_FLOAT32: np.dtype("<f4"), DTYPE_INT64: np.dtype("<i8")}
_MEDIA = {"image": "an image", "dmel": "audio"}
# The largest window that the zstd command-line programs allow.
_WINDOW_BYTES = 2**27


@dataclass(frozen=True)
class Pass:
    """One forward pass, with or without a backward pass. The field `config` has the settings of the
    loss, which are numbers or texts."""

    model_id: str
    seq: int
    forward_only: bool
    loss: str
    config: Mapping[str, float | str]
    message: Any

    def data(self, names: tuple[str, ...], needed: bool) -> list[Datum]:
        """The pass's data. The argument `names` lists the arrays that each datum contains in
        addition to the targets. The first array in `names` contains one factor for each item's
        loss. If `needed` is true, a missing array is an error. Raises InvalidInput that names the
        wrong field, such as `data.3.loss_fn_inputs.weights`."""
        if len(self.message.data) > MOST_DATA:
            problem = f"{len(self.message.data)} are more than {MOST_DATA} in one request"
            raise InvalidInput(f"{problem}; send several", field="data")
        return [_datum(one, f"data.{i}", names, needed) for i, one in enumerate(self.message.data)]


def read_pass(content_type: str, encoding: str, body: bytes, most: int) -> Pass:
    """The pass that the body of a request contains. Raises InvalidInput if the body is not a pass,
    and RequestTooLarge if the message has more than `most` bytes.

    Args:
        encoding: the header Content-Encoding.
        most: the maximum size of the message in bytes.
    """
    if content_type.partition(";")[0].strip().lower() != PROTOBUF:
        problem = f"the body must be {PROTOBUF}, which tinker sends from 0.25 on"
        raise InvalidInput(f"{problem}; install a newer tinker", field="Content-Type")
    match encoding.strip().lower():
        case "" | "identity":
            pass
        case "zstd":
            body = _decompressed(body, most)
        case _:
            problem = f"{encoding[:40]!r} is not read here; send zstd, or no encoding"
            raise InvalidInput(problem, field="Content-Encoding")
    try:
        message = ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise InvalidInput(
            f"the body is not a ForwardBackwardRequest: {error}", field="body"
        ) from error
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.HasField("text") else value.number
    return Pass(
        message.model_id, message.seq_id, message.forward_only, message.loss_fn, config, message
    )


def _decompressed(body: bytes, most: int) -> bytes:
    try:
        with zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(
            body
        ) as reader:
            # The size in the header of a zstd frame may be wrong, so this code does not use the
            # size.
            content = reader.read(most + 1)
    except zstandard.ZstdError as error:
        raise InvalidInput(f"the body is not zstd: {error}", field="body") from error
    if len(content) > most:
        remedy = "send fewer data at once, or raise TANDEM_MAX_REQUEST_BYTES"
        problem = f"the body has more than {most} bytes without its compression"
        raise RequestTooLarge(f"{problem}; {remedy}", field="body")
    return content


def _datum(message: Any, field: str, names: tuple[str, ...], needed: bool) -> Datum:
    tokens = _tokens(message.model_input, f"{field}.model_input")
    inputs, known = message.loss_fn_inputs, ("target_tokens", *names)
    for name in inputs:
        if name not in known:
            problem = f"the loss does not read it; it reads {', '.join(known)}"
            raise InvalidInput(problem, field=f"{field}.loss_fn_inputs.{name[:64]}")
    found = dict[str, NDArray[Any]]()
    for name in known:
        at = f"{field}.loss_fn_inputs.{name}"
        if name in inputs:
            found[name] = _tensor(inputs[name], len(tokens), at)
        elif needed or name == "target_tokens":
            raise InvalidInput("is missing; add it", field=at)
    targets = found.pop("target_tokens")
    if targets.dtype.kind != "i" or targets.min() < 0 or targets.max() >= 2**31:
        problem = "has other values than token ids, which are int64 and not negative"
        raise InvalidInput(problem, field=f"{field}.loss_fn_inputs.target_tokens")
    for name, column in found.items():
        if not np.isfinite(column).all():
            raise InvalidInput("a value is not finite", field=f"{field}.loss_fn_inputs.{name}")
    factors, *more = [found[name].astype(np.float32) if name in found else None for name in names]
    if factors is None:
        factors = np.ones(len(tokens), np.float32)
    return Datum(tokens, targets.astype(np.int32), factors, *more)


def _tokens(chunks: Any, field: str) -> Int32:
    parts = []
    for i, chunk in enumerate(chunks):
        for kind, what in _MEDIA.items():
            if chunk.HasField(kind):
                raise InvalidInput(f"{what}; only text is trained here", field=f"{field}.{i}")
        content = chunk.encoded_text.tokens
        if not chunk.HasField("encoded_text") or len(content) % 4:
            raise InvalidInput("has no int32 tokens", field=f"{field}.{i}")
        parts.append(np.frombuffer(content, "<i4"))
    tokens = np.concatenate(parts) if parts else np.empty(0, "<i4")
    if not len(tokens):
        raise InvalidInput("there is no token", field=field)
    if tokens.min() < 0:
        raise InvalidInput(f"{tokens.min()} is not a token id", field=field)
    return tokens.astype(np.int32)


def _tensor(message: Any, length: int, field: str) -> NDArray[Any]:
    """A tensor's values, one for each token: [length]."""
    if message.HasField("sparse_csr"):
        raise InvalidInput("sparse tensors are not read here; send a dense one", field=field)
    if (dtype := _DTYPES.get(message.dtype)) is None:
        raise InvalidInput("is of another type than float32 or int64", field=field)
    shape = list(message.shape)
    if len(shape) > 1:
        problem = f"its shape is {shape}; several targets per position are not served"
        raise InvalidInput(f"{problem}: send one value per position", field=field)
    if len(message.dense) % dtype.itemsize:
        raise InvalidInput("its bytes are not a whole number of values", field=field)
    values = np.frombuffer(message.dense, dtype)
    if len(values) != length or (shape and shape[0] != length):
        problem = f"{len(values)} values for {length} tokens of model_input"
        raise InvalidInput(f"{problem}; there must be one for each", field=field)
    return values
