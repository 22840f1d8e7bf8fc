"""Reads or recomputes weights without vLLM's code: one random row of every tensor that changes, bit by bit.

Log-probs prove what the weights compute. These rows prove what they are: each tensor was written, from the base model
with this adapter and this scale, or from this model.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.errors import CheckpointDamaged
from tandem.families.adapter import lora_modules, peft_keys
from tandem.families.model_config import model_directory, weight_files
from tandem.families.registry import read_arch
from tandem.inference.tensor_file import TensorFile, adapter_file, bfloat16, widened
from tandem.spool.schema import LoraShape


@dataclass
class Rows:
    """`rows`: which row of each tensor, by name; `expected`: what vLLM must have there, in the served dtype."""

    rows: dict[str, int]
    expected: dict[str, NDArray[Any]]

    def wrong(self, found: Sequence[Mapping[str, Any]]) -> str:
        """Why the rows that vLLM's workers have are other ones, or empty.

        `found`: for each part of a row its `name`, the columns from `begin` to `end` and the `sha256` of its bytes.
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
    def __init__(self, base_model: str, dtype: str) -> None:
        """`base_model`: a directory or the name of a hub repository that is in the cache; `dtype`: in which vLLM
        serves."""
        self._model, self._dtype = base_model, dtype

    @cached_property
    def _base(self) -> dict[str, TensorFile]:
        return _files(model_directory(self._model, cached=True))

    def adapter_rows(self, adapter: Path, lora: LoraShape) -> Rows:
        """Of each tensor that the adapter in this directory touches, merged into the base model. CheckpointDamaged
        where it is no adapter of this shape."""
        arch = read_arch(self._model)
        rows = {f"{module}.weight": random.randrange(rows) for module, (_, rows) in lora_modules(arch, lora).items()}
        base, factors, scale = self._base, adapter_file(adapter, arch, lora, self._model), lora.alpha / lora.rank

        def merged(name: str, row: int) -> NDArray[Any]:
            """base + scale B A, in float64, rounded to float32 and then to the served dtype."""
            key_a, key_b = peft_keys(name.removesuffix(".weight"))
            delta = factors[key_b][row].astype(np.float64) @ factors[key_a].astype(np.float64)
            return self._rounded((self._floats(base[name], name, row) + scale * delta).astype(np.float32))

        return Rows(rows, {name: merged(name, row) for name, row in rows.items()})

    def model_rows(self, directory: Path) -> Rows:
        """Of each matrix of the model in this directory. CheckpointDamaged where its files can't be read."""
        try:
            files = _files(directory)
            shapes = {name: file.shape(name) for name, file in files.items()}
            rows = {name: random.randrange(shape[0]) for name, shape in shapes.items() if len(shape) == 2}
            return Rows(rows, {n: self._rounded(self._floats(files[n], n, row)) for n, row in rows.items()})
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise CheckpointDamaged(f"the model in {directory} can't be read: {error}") from error

    def _floats(self, file: TensorFile, name: str, row: int) -> NDArray[np.float32]:
        """A row of the weights as vLLM loads them, in float32."""
        values = file[name][row]
        if file.dtype(name) == "BF16":
            return widened(values)
        floats = values.astype(np.float32)
        return floats if self._dtype == "float32" else widened(bfloat16(floats))

    def _rounded(self, values: NDArray[np.float32]) -> NDArray[Any]:
        """In the served dtype; bfloat16 is uint16."""
        return values if self._dtype == "float32" else bfloat16(values)


def _files(directory: Path) -> dict[str, TensorFile]:
    """Each tensor's file."""
    return {name: file for file in map(TensorFile, weight_files(directory)) for name in file}
