"""Safetensors files without torch: where each tensor is, and its values by memory map."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.errors import CheckpointDamaged
from tandem.families.adapter import WEIGHTS_FILE, adapter_shapes
from tandem.families.arch import Arch
from tandem.spool.schema import LoraShape

_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


class TensorFile:
    """name -> array; bfloat16 is uint16. OSError or ValueError for a file that is none."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError(f"{path} is not a safetensors file")
            self._header = json.loads(file.read(size))
        self.begin = 8 + size
        """Where the data begins, in bytes."""
        self._data = np.memmap(path, np.uint8, "r", offset=self.begin)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._header if name != "__metadata__")

    def __getitem__(self, name: str) -> NDArray[Any]:
        begin, end = self.offsets(name)
        values: NDArray[Any] = self._data[begin:end].view(_DTYPES[self.dtype(name)])
        return values.reshape(self.shape(name))

    def dtype(self, name: str) -> str:
        return str(self._header[name]["dtype"])

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header[name]["shape"])

    def offsets(self, name: str) -> tuple[int, int]:
        """First byte and end, from `begin`."""
        first, end = self._header[name]["data_offsets"]
        return first, end


def adapter_file(directory: Path, arch: Arch, lora: LoraShape, model: str) -> TensorFile:
    """The weights of the adapter in `directory`. CheckpointDamaged where they are not those of an adapter of shape
    `lora` for `arch`. `model`: whose architecture that is, for the message."""
    path = directory / WEIGHTS_FILE
    try:
        file = TensorFile(path)
        shapes = {name: file.shape(name) for name in file}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(f"{path} can't be read: {error}") from error
    if shapes != adapter_shapes(arch, lora):
        raise CheckpointDamaged(f"{path} is no adapter of rank {lora.rank} for {model}")
    return file


def widened(values: NDArray[Any]) -> NDArray[np.float32]:
    """A tensor of a file as float32."""
    if values.dtype != np.uint16:
        return values.astype(np.float32, copy=False)
    return (values.astype(np.uint32) << 16).view(np.float32)


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """To nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
