"""Recomputes merged weights without vLLM's code: one random row of every adapted tensor, bit by bit.

Log-probs prove what the weights compute. These rows prove what they are: each tensor was written, from the base model,
with this adapter and this scale.
"""

import random
from collections.abc import Mapping
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
        return {name: file for file in map(TensorFile, weight_files(self._model)) for name in file}

    def rows(self, lora: LoraShape) -> dict[str, int]:
        """A random row of each tensor that adapters of this shape touch."""
        modules = lora_modules(read_arch(self._model), lora)
        return {f"{module}.weight": random.randrange(rows) for module, (_, rows) in modules.items()}

    def wrong(self, found: list[Mapping[str, Any]], rows: Mapping[str, int], adapter: Path, scale: float) -> str:
        """Why the rows that vLLM's workers have are not those of the merged weights, or empty.

        `found`: for each part of a row its `name`, the columns from `begin` to `end` and the `sha256` of its bytes.
        """
        weights = TensorFile(adapter / WEIGHTS_FILE)
        expected = {name: self._row(weights, name, row, scale) for name, row in rows.items()}
        missing = {name: np.ones(row.shape, bool) for name, row in expected.items()}
        for part in found:
            name, begin, end = part["name"], part["begin"], part["end"]
            if sha256(expected[name][begin:end].tobytes()).hexdigest() != part["sha256"]:
                return f"row {rows[name]} of {name} is another one"
            missing[name][begin:end] = False
        short = [name for name, columns in missing.items() if columns.any()]
        return f"no worker has all of row {rows[short[0]]} of {short[0]}" if short else ""

    def _row(self, adapter: TensorFile, name: str, row: int, scale: float) -> NDArray[Any]:
        """base + scale B A of one row, in float64, rounded to float32 and then to the served dtype."""
        key_a, key_b = peft_keys(name.removesuffix(".weight"))
        base = _floats(self._base[name][name][row], self._base[name].dtype(name), self._dtype).astype(np.float64)
        delta = adapter[key_b][row].astype(np.float64) @ adapter[key_a].astype(np.float64)
        merged = (base + scale * delta).astype(np.float32)
        return merged if self._dtype == "float32" else bfloat16(merged)


def _floats(values: NDArray[Any], dtype: str, served: str) -> NDArray[np.float32]:
    """The base weights as vLLM has them, in float32."""
    if dtype == "BF16":
        return widened(values)
    floats = values.astype(np.float32)
    return floats if served == "float32" else widened(bfloat16(floats))
