"""Reads the tensors of a model's and an adapter's files, and merges an adapter into a weight,
without torch.

A merged weight is `W + alpha / rank * B A`. The sum is computed in float64, rounded to float32 and
then to the weight's dtype (`model/transfer/merge.py` rounds in the same way).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.errors import CheckpointDamaged, InvalidInput
from tandem.families.adapter import WEIGHTS_FILE, adapter_shapes
from tandem.families.arch import Arch
from tandem.families.model_config import weight_files
from tandem.spool.schema import LoraShape
from tandem.system.plain_files import open_plain
from tandem.system.safetensors_header import read_header

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
"""The dtypes of weights that an adapter can be merged into: the dtype's name in the file -> NumPy's
dtype for its bytes."""


class TensorFile(Mapping[str, NDArray[Any]]):
    """A safetensors file: a mapping from tensor names to memory-mapped arrays. Values of dtype
    bfloat16 are uint16. Raises KeyError for a tensor whose dtype is not in DTYPES."""

    def __init__(self, path: Path) -> None:
        self.path, self.entries = path, read_header(path)
        with open_plain(path, links="any") as file:
            self._bytes = np.memmap(file, np.uint8, "r")

    def __getitem__(self, name: str) -> NDArray[Any]:
        entry = self.entries[name]
        values: NDArray[Any] = self._bytes[entry.begin : entry.end].view(DTYPES[entry.dtype])
        return values.reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def model_files(directory: Path) -> dict[str, TensorFile]:
    """The file of each tensor of the model in `directory`, by the tensor's name. Raises
    InvalidInput if a file can't be read."""
    return {name: file for file in map(TensorFile, weight_files(directory)) for name in file}


def adapter_file(directory: Path, arch: Arch, lora: LoraShape, model: str) -> TensorFile:
    """The tensors of the adapter in `directory`. Raises CheckpointDamaged if the tensors do not
    form an adapter of shape `lora` for `arch`.

    Args:
        model: the model's name, which the error message contains.
    """
    path = directory / WEIGHTS_FILE
    try:
        file = TensorFile(path)
    except InvalidInput as error:
        raise CheckpointDamaged(error.message) from error
    found = {name: (entry.dtype, entry.shape) for name, entry in file.entries.items()}
    if found != {name: ("F32", shape) for name, shape in adapter_shapes(arch, lora).items()}:
        raise CheckpointDamaged(f"{path} is not an adapter of rank {lora.rank} in F32 for {model}")
    return file


def merge_arrays(
    base: NDArray[np.float32],
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    lora: LoraShape,
    dtype: str,
) -> NDArray[Any]:
    """A weight, or one row of it, merged with an adapter.

    Args:
        base: the weight, [out, in]; or one row of the weight, [in].
        a: the matrix A, [rank, in].
        b: the matrix B, [out, rank]; or B's row for the same row of the weight, [rank].
        lora: the adapter's shape; only `alpha` and `rank` are used.
        dtype: the result's dtype in the file, a key of DTYPES.
    """
    delta = b.astype(np.float64) @ a.astype(np.float64)
    with np.errstate(over="ignore"):
        return rounded((base + lora.alpha / lora.rank * delta).astype(np.float32), dtype)


def widened(values: NDArray[Any]) -> NDArray[np.float32]:
    """A tensor from a file, converted to float32. The shape stays the same. Values of dtype
    bfloat16 are passed as uint16."""
    if values.dtype != np.uint16:
        return values.astype(np.float32, copy=False)
    return (values.astype(np.uint32) << 16).view(np.float32)


def rounded(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Values in a file's `dtype`, rounded to nearest, ties to even. The shape stays the same.
    Values of dtype bfloat16 are returned as uint16."""
    if dtype != "BF16":
        return values.astype(DTYPES[dtype], copy=False)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
