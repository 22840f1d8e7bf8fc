"""Reads, checks and writes the header of a safetensors file, without torch.

A file consists of three parts: the length of the header as 8 bytes in little-endian order, the
header as JSON, and the bytes of the tensors: https://huggingface.co/docs/safetensors/index#format
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import InvalidInput
from tandem.system.plain_files import open_plain

LONGEST_HEADER = 100 * 10**6
"""Bytes; the same limit as in the reference implementation."""

DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}
"""Dtype in a header -> its name in torch, and the number of bytes of an element."""

_METADATA = "__metadata__"


@dataclass(frozen=True)
class Entry:
    """A tensor in a file. `dtype` is a key of DTYPES."""

    dtype: str
    shape: tuple[int, ...]
    begin: int  # offset of the tensor's first byte in the file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]

    @property
    def end(self) -> int:
        return self.begin + self.nbytes


def read_header(path: Path) -> dict[str, Entry]:
    """The entries of all tensors of a file, by name. The tensors must fill the file: no two
    overlap, none extends past the end of the file, and no byte is left over.

    Raises InvalidInput with the file's path if the file can't be read or is not a complete
    safetensors file. The error's field is `base_model`; callers that read a checkpoint raise
    CheckpointDamaged instead.
    """
    try:
        with open_plain(path, links="any") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise ValueError(f"its header would be {length} bytes, the file is {size}")
            if length > LONGEST_HEADER:
                raise ValueError(f"its header would be {length} bytes, at most {LONGEST_HEADER}")
            listed = _parse(file.read(length))
        return _check(listed, 8 + length, size)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} can't be read: {error}", field="base_model") from error


def lay_out(
    tensors: Mapping[str, tuple[str, Sequence[int]]],
) -> tuple[bytes, dict[str, Entry]]:
    """The header of a new file, and the place of each tensor in the file. `tensors`: name -> dtype
    and shape, in the order of the tensors' bytes after the header."""
    listed: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * DTYPES[dtype][1]
        listed[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    # PEFT's own files have the metadata `format`, and some readers refuse a file without this
    # metadata.
    text = json.dumps({_METADATA: {"format": "pt"}} | listed, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: _entry(name, listed[name], len(header)) for name in listed}


def _parse(text: bytes) -> dict[str, Any]:
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is not JSON: {error}") from error
    if not isinstance(listed, dict):
        raise ValueError("its header is not a JSON object")
    listed.pop(_METADATA, None)
    return listed


def _check(listed: Mapping[str, Any], data: int, size: int) -> dict[str, Entry]:
    """The entries that a header lists, checked for a file of `size` bytes whose data begins at byte
    `data`."""
    entries = {name: _entry(name, entry, data) for name, entry in listed.items()}
    end = data
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise ValueError(
                f"{name} begins at byte {entry.begin}, what is before it ends at {end}"
            )
        end = entry.end
    if end != size:
        raise ValueError(f"its last tensor ends at byte {end}, the file at {size}")
    return entries


def _entry(name: str, listed: Any, data: int) -> Entry:
    match listed:
        case {
            "dtype": str(dtype),
            "shape": list(shape),
            "data_offsets": [begin, end],
        } if all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            pass
        case _:
            raise ValueError(f"{name} has no valid dtype, shape and data_offsets")
    if dtype not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {dtype}")
    entry = Entry(dtype, tuple(shape), data + begin)
    if entry.end != data + end:
        raise ValueError(
            f"{name} of shape {shape} and {dtype} does not fill bytes {begin} to {end}"
        )
    return entry
