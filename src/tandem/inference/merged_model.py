"""Writes a model with an adapter merged into it as Hugging Face files, without torch."""

import shutil
from pathlib import Path

import numpy as np

from tandem.errors import CheckpointDamaged, InvalidInput
from tandem.families.adapter import WEIGHTS_FILE, lora_modules, peft_keys
from tandem.families.model_config import other_files, weight_files
from tandem.families.registry import read_arch
from tandem.inference.tensor_files import DTYPES, adapter_file, merge_arrays, model_files, widened
from tandem.spool.schema import LoraShape


def write_merged_model(directory: Path, base_model: Path, adapter: Path, lora: LoraShape) -> int:
    """Write the base model, merged with an adapter, into a new directory. Return the size of all
    files in bytes. The files have the base model's names and dtypes. Every program that can load
    the base model can load the merged model. The adapter leaves some tensors unchanged, and these
    tensors keep their bytes.

    Args:
        directory: the new directory; its parent must exist.
        base_model: the base model's directory.
        adapter: the adapter's directory.
        lora: the adapter's shape.

    Raises:
        InvalidInput (field `base_model`): the base model can't be read, or lacks an adapted weight.
        InvalidInput is also raised if an adapted weight has a dtype that can't be merged, or a
        shape that contradicts config.json.
        CheckpointDamaged: the adapter is not of shape `lora` for this base model, or a merged
        weight is not finite.
    """
    arch = read_arch(str(base_model))
    factors = adapter_file(adapter, arch, lora, str(base_model))
    files = model_files(base_model)
    modules = lora_modules(arch, lora)
    for module, (columns, rows) in modules.items():
        if (name := f"{module}.weight") not in files:
            raise InvalidInput(f"{base_model} has no tensor {name}", field="base_model")
        entry = files[name].entries[name]
        if entry.dtype not in DTYPES or entry.shape != (rows, columns):
            problem = (
                f"{name} is {list(entry.shape)} in {entry.dtype}, not {[rows, columns]} in"
                f" {' or '.join(DTYPES)}"
            )
            raise InvalidInput(f"{files[name].path}: {problem}", field="base_model")
    directory.mkdir()
    index = base_model.glob("model.safetensors.index.json")
    for path in (*weight_files(base_model), *index, *other_files(base_model)):
        shutil.copyfile(path, directory / path.name)
    for module in modules:
        name, (a, b) = f"{module}.weight", peft_keys(module)
        file, entry = files[name], files[name].entries[name]
        merged = merge_arrays(widened(file[name]), factors[a], factors[b], lora, entry.dtype)
        if not np.isfinite(widened(merged)).all():
            raise CheckpointDamaged(
                f"{name} merged with {adapter / WEIGHTS_FILE} is not finite in {entry.dtype}"
            )
        with (directory / file.path.name).open("r+b") as out:
            out.seek(entry.begin)
            out.write(merged.tobytes())
    return sum(path.stat().st_size for path in directory.iterdir())
