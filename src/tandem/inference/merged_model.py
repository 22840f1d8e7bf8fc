"""A model whose weights have an adapter merged into them, as Hugging Face files, without torch."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.errors import CheckpointDamaged, InvalidInput
from tandem.families.adapter import WEIGHTS_FILE, lora_modules, peft_keys
from tandem.families.model_config import other_files, weight_files
from tandem.families.registry import read_arch
from tandem.inference.tensor_file import TensorFile, adapter_file, bfloat16, widened
from tandem.spool.schema import LoraShape

_FLOATS = ("F32", "F16", "BF16")


def write_merged_model(directory: Path, base_model: Path, adapter: Path, lora: LoraShape) -> int:
    """Write `base_model`, with the adapter in the directory `adapter` merged, into the new `directory`; return its
    bytes.

    The files are the base model's, by name and by dtype, so what loads the base model loads these. Each adapted weight
    is `W + alpha / rank * B A`, summed in float64, rounded to float32 and then to its dtype (`model/transfer/merge.py`
    rounds alike). All other tensors keep their bytes.

    Raises:
        InvalidInput (field `base_model`): the base model lacks an adapted weight, or has it in another shape or dtype
            than its config.json and the formula need.
        CheckpointDamaged: the adapter is not of shape `lora` for this base model, or a merged weight is not finite.
    """
    arch = read_arch(str(base_model))
    factors = adapter_file(adapter, arch, lora, str(base_model))
    base = {path: TensorFile(path) for path in weight_files(base_model)}
    of = {name: path for path, file in base.items() for name in file}
    modules = {f"{module}.weight": (module, shape[::-1]) for module, shape in lora_modules(arch, lora).items()}
    for name, (_, shape) in modules.items():
        if name not in of:
            raise InvalidInput(f"{base_model} has no tensor {name}", field="base_model")
        found = base[of[name]].dtype(name), base[of[name]].shape(name)
        if found[0] not in _FLOATS or found[1] != shape:
            expected = f"{list(shape)} in {' or '.join(_FLOATS)}"
            problem = f"{name} is {list(found[1])} in {found[0]}, not {expected}"
            raise InvalidInput(f"{of[name]}: {problem}", field="base_model")
    directory.mkdir()
    for path in (*base, *base_model.glob("model.safetensors.index.json"), *other_files(base_model)):
        shutil.copyfile(path, directory / path.name)
    for name, (module, _) in modules.items():
        file, (a, b) = base[of[name]], peft_keys(module)
        merged = _merged(file[name], factors[a], factors[b], lora.alpha / lora.rank)
        if merged is None:
            raise CheckpointDamaged(f"{name} merged with {adapter / WEIGHTS_FILE} is not finite in {file.dtype(name)}")
        with (directory / of[name].name).open("r+b") as out:
            out.seek(file.begin + file.offsets(name)[0])
            out.write(merged.tobytes())
    return sum(path.stat().st_size for path in directory.iterdir())


def _merged(base: NDArray[Any], a: NDArray[np.float32], b: NDArray[np.float32], scale: float) -> NDArray[Any] | None:
    """`base + scale B A` in the base's dtype; None where it is not finite."""
    with np.errstate(over="ignore"):
        exact = widened(base) + scale * (b.astype(np.float64) @ a.astype(np.float64))
        total = exact.astype(np.float32)
        rounded = bfloat16(total) if base.dtype == np.uint16 else total.astype(base.dtype)
    return rounded if np.isfinite(widened(rounded)).all() else None
