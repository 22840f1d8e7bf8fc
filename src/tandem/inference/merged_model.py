"""Weights of a model with an adapter merged into them, without torch: the whole model as Hugging
Face files, or one random row of every tensor, which vLLM must have to the bit.

A merged weight is `W + alpha / rank * B A`, summed in float64, rounded to float32 and then to its
dtype (`model/transfer/merge.py` rounds alike). Log-probs prove what weights compute. Rows prove
what they are: each tensor was written, from the base model with this adapter and this scale, or
from this model.
"""

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.errors import CheckpointDamaged, InvalidInput
from tandem.families.adapter import WEIGHTS_FILE, adapter_shapes, lora_modules, peft_keys
from tandem.families.arch import Arch
from tandem.families.model_config import model_directory, other_files, weight_files
from tandem.families.registry import read_arch, weight_rules
from tandem.spool.schema import LoraShape
from tandem.system.plain_files import open_plain

_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


class TensorFile:
    """A safetensors file: name -> memory-mapped array; bfloat16 is uint16. OSError or ValueError
    for a file that is none."""

    def __init__(self, path: Path) -> None:
        with open_plain(path, links="any") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > os.fstat(file.fileno()).st_size:
                raise ValueError(f"{path} is not a safetensors file")
            self._header = json.loads(file.read(size))
            self.begin = 8 + size
            """Where the data begins, in bytes."""
            self._data = np.memmap(file, np.uint8, "r", offset=self.begin)

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


def write_merged_model(directory: Path, base_model: Path, adapter: Path, lora: LoraShape) -> int:
    """Write `base_model`, with the adapter in the directory `adapter` merged, into the new
    `directory`; return its bytes.

    The files are the base model's, by name and by dtype, so what loads the base model loads these.
    Tensors that are not adapted keep their bytes.

    Raises:
        InvalidInput (field `base_model`): the base model lacks an adapted weight, or has it in
        another shape or dtype
            than its config.json and the formula need.
        CheckpointDamaged: the adapter is not of shape `lora` for this base model, or a merged
        weight is not finite.
    """
    arch = read_arch(str(base_model))
    factors = _adapter_file(adapter, arch, lora, str(base_model))
    base = {path: TensorFile(path) for path in weight_files(base_model)}
    of = {name: path for path, file in base.items() for name in file}
    modules = lora_modules(arch, lora)
    for module, (columns, rows) in modules.items():
        if (name := f"{module}.weight") not in of:
            raise InvalidInput(f"{base_model} has no tensor {name}", field="base_model")
        dtype, shape = base[of[name]].dtype(name), base[of[name]].shape(name)
        if dtype not in _DTYPES or shape != (rows, columns):
            problem = (
                f"{name} is {list(shape)} in {dtype}, not {[rows, columns]} in"
                f" {' or '.join(_DTYPES)}"
            )
            raise InvalidInput(f"{of[name]}: {problem}", field="base_model")
    directory.mkdir()
    for path in (*base, *base_model.glob("model.safetensors.index.json"), *other_files(base_model)):
        shutil.copyfile(path, directory / path.name)
    for module in modules:
        name, (a, b) = f"{module}.weight", peft_keys(module)
        file = base[of[name]]
        merged = _merged(_widened(file[name]), factors[a], factors[b], lora, file.dtype(name))
        if not np.isfinite(_widened(merged)).all():
            raise CheckpointDamaged(
                f"{name} merged with {adapter / WEIGHTS_FILE} is not finite in {file.dtype(name)}"
            )
        with (directory / of[name].name).open("r+b") as out:
            out.seek(file.begin + file.offsets(name)[0])
            out.write(merged.tobytes())
    return sum(path.stat().st_size for path in directory.iterdir())


@dataclass
class Rows:
    """`rows`: which row of each tensor, by name; `expected`: what vLLM must have there, in the
    served dtype."""

    rows: dict[str, int]
    expected: dict[str, NDArray[Any]]

    def wrong(self, found: Sequence[Mapping[str, Any]]) -> str:
        """Why the rows that vLLM's workers have are other ones, or empty.

        `found`: for each part of a row its `name`, the columns from `begin` to `end` and the
        `sha256` of its bytes.
        """
        missing = {name: np.ones(row.shape, bool) for name, row in self.expected.items()}
        for part in found:
            name, begin, end = part["name"], part["begin"], part["end"]
            if sha256(self.expected[name][begin:end].tobytes()).hexdigest() != part["sha256"]:
                return f"row {self.rows[name]} of {name} is another one"
            missing[name][begin:end] = False
        short = [name for name, columns in missing.items() if columns.any()]
        return f"no worker has all of row {self.rows[short[0]]} of {short[0]}" if short else ""


class SpotCheck:
    """Random rows of what vLLM must have in each tensor that changes, computed without vLLM's
    code."""

    def __init__(self, base_model: str, dtype: str) -> None:
        """`base_model`: a directory or the name of a hub repository that is in the cache; `dtype`:
        in which vLLM serves, `float32` or `bfloat16`."""
        self._model, self._dtype = base_model, "F32" if dtype == "float32" else "BF16"

    @cached_property
    def _base(self) -> dict[str, TensorFile]:
        return _files(model_directory(self._model, cached=True))

    def adapter_rows(self, adapter: Path, lora: LoraShape) -> Rows:
        """Of each tensor that the adapter in this directory touches, merged into the base model.
        CheckpointDamaged where it is no adapter of this shape."""
        arch = read_arch(self._model)
        factors, rows, expected = _adapter_file(adapter, arch, lora, self._model), {}, {}
        for module, (_, count) in lora_modules(arch, lora).items():
            name, row, (a, b) = f"{module}.weight", random.randrange(count), peft_keys(module)
            base = self._served(self._base[name], name, row)
            rows[name], expected[name] = (
                row,
                _merged(_widened(base), factors[a], factors[b][row], lora, self._dtype),
            )
        return Rows(rows, expected)

    def model_rows(self, directory: Path) -> Rows:
        """Of each matrix of the model in this directory. CheckpointDamaged where its files can't be
        read. A model that ties its output layer may have one in its files all the same, which vLLM
        does not load."""
        names = {name for rule in weight_rules(read_arch(self._model)) for name in rule.sources}
        try:
            files = _files(directory)
            shapes = {name: file.shape(name) for name, file in files.items() if name in names}
            rows = {
                name: random.randrange(shape[0])
                for name, shape in shapes.items()
                if len(shape) == 2
            }
            return Rows(
                rows, {name: self._served(files[name], name, row) for name, row in rows.items()}
            )
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise CheckpointDamaged(f"the model in {directory} can't be read: {error}") from error

    def _served(self, file: TensorFile, name: str, row: int) -> NDArray[Any]:
        """A row as vLLM loads it, in the served dtype."""
        return _rounded(_widened(file[name][row]), self._dtype)


def _files(directory: Path) -> dict[str, TensorFile]:
    """Each tensor's file."""
    return {name: file for file in map(TensorFile, weight_files(directory)) for name in file}


def _adapter_file(directory: Path, arch: Arch, lora: LoraShape, model: str) -> TensorFile:
    """The weights of the adapter in `directory`. CheckpointDamaged where they are not those of an
    adapter of shape `lora` for `arch`. `model`: whose architecture that is, for the message."""
    path = directory / WEIGHTS_FILE
    try:
        file = TensorFile(path)
        shapes = {name: file.shape(name) for name in file}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(f"{path} can't be read: {error}") from error
    if shapes != adapter_shapes(arch, lora):
        raise CheckpointDamaged(f"{path} is no adapter of rank {lora.rank} for {model}")
    return file


def _merged(
    base: NDArray[np.float32],
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    lora: LoraShape,
    dtype: str,
) -> NDArray[Any]:
    """`base` with an adapter, in a file's `dtype`: a weight with its A and B, or a row with A and
    the row of B."""
    delta = b.astype(np.float64) @ a.astype(np.float64)
    with np.errstate(over="ignore"):
        return _rounded((base + lora.alpha / lora.rank * delta).astype(np.float32), dtype)


def _widened(values: NDArray[Any]) -> NDArray[np.float32]:
    """A tensor of a file as float32."""
    if values.dtype != np.uint16:
        return values.astype(np.float32, copy=False)
    return (values.astype(np.uint32) << 16).view(np.float32)


def _rounded(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """In a file's `dtype`, to nearest, ties to even."""
    if dtype != "BF16":
        return values.astype(_DTYPES[dtype], copy=False)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
