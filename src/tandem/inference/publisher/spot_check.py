"""Reads or recomputes weights without vLLM's code: one random row of every tensor that changes, bit by bit.

Log-probs prove what the weights compute. These rows prove what they are: each tensor was written, from the base model
with this adapter and this scale, or from this model.
"""

import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.families.adapter import WEIGHTS_FILE, lora_modules, peft_keys
from tandem.families.registry import read_arch
from tandem.inference.tensor_file import TensorFile, bfloat16, weight_files, widened
from tandem.spool.schema import LoraShape


class SpotCheck:
    def __init__(self, base_model: str, dtype: str) -> None:
        """`base_model`: see `weight_files`; `dtype`: in which vLLM serves."""
        self._model, self._dtype = base_model, dtype

    @cached_property
    def _base(self) -> dict[str, TensorFile]:
        return _files(self._model)

    def adapter_rows(self, adapter: Path, lora: LoraShape) -> "AdapterRows":
        """Of each tensor that the adapter in this directory touches, merged into the base model."""
        modules = lora_modules(read_arch(self._model), lora)
        rows = {f"{module}.weight": random.randrange(rows) for module, (_, rows) in modules.items()}
        return AdapterRows(rows, self._dtype, self._base, TensorFile(adapter / WEIGHTS_FILE), lora.alpha / lora.rank)

    def model_rows(self, directory: Path) -> "ModelRows":
        """Of each matrix of the model in this directory."""
        files = _files(str(directory))
        shapes = {name: file.shape(name) for name, file in files.items()}
        rows = {name: random.randrange(shape[0]) for name, shape in shapes.items() if len(shape) == 2}
        return ModelRows(rows, self._dtype, files)


class ModelRows:
    """`rows`: the row of each tensor, by name."""

    def __init__(self, rows: dict[str, int], dtype: str, files: Mapping[str, TensorFile]) -> None:
        self.rows, self._dtype, self._files = rows, dtype, files

    def wrong(self, found: Sequence[Mapping[str, Any]]) -> str:
        """Why the rows that vLLM's workers have are other ones, or empty.

        `found`: for each part of a row its `name`, the columns from `begin` to `end` and the `sha256` of its bytes.
        """
        expected = {name: self.row(name, row) for name, row in self.rows.items()}
        missing = {name: np.ones(row.shape, bool) for name, row in expected.items()}
        for part in found:
            name, begin, end = part["name"], part["begin"], part["end"]
            if sha256(expected[name][begin:end].tobytes()).hexdigest() != part["sha256"]:
                return f"row {self.rows[name]} of {name} is another one"
            missing[name][begin:end] = False
        short = [name for name, columns in missing.items() if columns.any()]
        return f"no worker has all of row {self.rows[short[0]]} of {short[0]}" if short else ""

    def row(self, name: str, row: int) -> NDArray[Any]:
        """In the served dtype."""
        values = self._values(name, row)
        return values if self._dtype == "float32" else bfloat16(values)

    def _values(self, name: str, row: int) -> NDArray[np.float32]:
        return _floats(self._files[name][name][row], self._files[name].dtype(name), self._dtype)


class AdapterRows(ModelRows):
    def __init__(
        self, rows: dict[str, int], dtype: str, base: Mapping[str, TensorFile], adapter: TensorFile, scale: float
    ) -> None:
        super().__init__(rows, dtype, base)
        self._adapter, self._scale = adapter, scale

    def _values(self, name: str, row: int) -> NDArray[np.float32]:
        """base + scale B A, in float64, rounded to float32."""
        key_a, key_b = peft_keys(name.removesuffix(".weight"))
        delta = self._adapter[key_b][row].astype(np.float64) @ self._adapter[key_a].astype(np.float64)
        merged: NDArray[np.float32] = (super()._values(name, row) + self._scale * delta).astype(np.float32)
        return merged


def _files(model: str) -> dict[str, TensorFile]:
    """Each tensor's file."""
    return {name: file for file in map(TensorFile, weight_files(model)) for name in file}


def _floats(values: NDArray[Any], dtype: str, served: str) -> NDArray[np.float32]:
    """The weights as vLLM has them, in float32."""
    if dtype == "BF16":
        return widened(values)
    floats = values.astype(np.float32)
    return floats if served == "float32" else widened(bfloat16(floats))
