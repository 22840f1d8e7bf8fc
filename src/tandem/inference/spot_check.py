"""Computes the expected values of one random row of every changed matrix, without torch. The rows
in vLLM must equal the expected values, bit for bit. A comparison of log-probs tests only the
function that the weights compute, while a comparison of rows tests the weights themselves. Matching
rows prove that each matrix was written from the base model with the right adapter and scale, or
from the right model.
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

from tandem.errors import CheckpointDamaged, InvalidInput
from tandem.families.adapter import lora_modules, peft_keys
from tandem.families.model_config import model_directory
from tandem.families.registry import read_arch, weight_rules
from tandem.inference.tensor_files import (
    TensorFile,
    adapter_file,
    merge_arrays,
    model_files,
    rounded,
    widened,
)
from tandem.spool.schema import LoraShape


@dataclass
class ExpectedRows:
    """`rows`: the index of one row of each tensor; `expected`: the values that vLLM must have in
    this row, in the served dtype."""

    rows: dict[str, int]
    expected: dict[str, NDArray[Any]]

    def wrong(self, found: Sequence[Mapping[str, Any]]) -> str:
        """The first difference between the expected rows and the rows that vLLM's workers have;
        empty if there is no difference. `found`: for each part of a row the tensor's `name`, the
        part's columns from `begin` to `end`, and the `sha256` of the part's bytes.
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
    """Random rows of each tensor that changes, with the values that vLLM must have, computed
    without vLLM's code."""

    def __init__(self, base_model: str, dtype: str) -> None:
        """`base_model`: a directory or a hub name in the cache; `dtype`: the served dtype,
        `float32` or `bfloat16`."""
        self._model, self._dtype = base_model, "F32" if dtype == "float32" else "BF16"

    @cached_property
    def _base(self) -> dict[str, TensorFile]:
        return model_files(model_directory(self._model, cached=True))

    def adapter_rows(self, adapter: Path, lora: LoraShape) -> ExpectedRows:
        """A random row of each tensor that the adapter in the directory `adapter` changes, with the
        values after the merge. Raises CheckpointDamaged if the files are not an adapter of shape
        `lora`."""
        arch = read_arch(self._model)
        factors, rows, expected = adapter_file(adapter, arch, lora, self._model), {}, {}
        for module, (_, count) in lora_modules(arch, lora).items():
            name, row, (a, b) = f"{module}.weight", random.randrange(count), peft_keys(module)
            base = self._served(self._base[name], name, row)
            rows[name], expected[name] = (
                row,
                merge_arrays(widened(base), factors[a], factors[b][row], lora, self._dtype),
            )
        return ExpectedRows(rows, expected)

    def model_rows(self, directory: Path) -> ExpectedRows:
        """A random row of each matrix of the model in `directory`. Raises CheckpointDamaged if the
        model's files can't be read. If the model ties its output layer to the embedding, an output
        layer in the files is left out, because vLLM does not load it."""
        names = {name for rule in weight_rules(read_arch(self._model)) for name in rule.sources}
        try:
            files = {name: of for name, of in model_files(directory).items() if name in names}
            shapes = {name: file.entries[name].shape for name, file in files.items()}
            rows = {
                name: random.randrange(shape[0])
                for name, shape in shapes.items()
                if len(shape) == 2
            }
            return ExpectedRows(
                rows, {name: self._served(files[name], name, row) for name, row in rows.items()}
            )
        except InvalidInput as error:
            raise CheckpointDamaged(error.message) from error
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointDamaged(f"the model in {directory} can't be read: {error}") from error

    def _served(self, file: TensorFile, name: str, row: int) -> NDArray[Any]:
        """A row of a file's tensor, in the served dtype, as vLLM loads it."""
        return rounded(widened(file[name][row]), self._dtype)
