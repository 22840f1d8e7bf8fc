"""Writes the identity adapter of step 0. The identity adapter does not change the base model's
function. The controller writes the identity adapter without torch or a GPU."""

import zlib
from pathlib import Path

import numpy as np

from tandem.families.adapter import WEIGHTS_FILE, lora_modules, peft_keys, write_adapter_config
from tandem.families.arch import Arch
from tandem.spool.schema import LoraShape
from tandem.system.safetensors_header import lay_out


def write_identity_adapter(
    directory: Path, arch: Arch, lora: LoraShape, *, base_model: str, seed: int
) -> None:
    """Write both files of the identity adapter.

    The values are PEFT's initial values: B is zero, and A is U(-1/sqrt(in), 1/sqrt(in)), which is
    Kaiming-uniform with a = sqrt(5). Every A has its own random stream, seeded by `seed` and the
    layer's name. The same seed gives the same bytes on every machine.

    Args:
        directory: the adapter's directory, which exists.
        base_model: the base model's directory or hub name, for `adapter_config.json`.
        seed: the run's seed; not negative.
    """
    tensors = {}
    for module, (in_features, out_features) in lora_modules(arch, lora).items():
        stream = np.random.Generator(
            np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(module.encode())]))
        )
        bound = in_features**-0.5
        uniform = stream.random((lora.rank, in_features), dtype=np.float32)
        a, b = peft_keys(module)
        tensors[a] = (uniform * np.float32(2 * bound) - np.float32(bound)).astype(np.float32)
        tensors[b] = np.zeros((out_features, lora.rank), dtype=np.float32)
    names = sorted(tensors)  # safetensors' own order
    header, _ = lay_out({name: ("F32", tensors[name].shape) for name in names})
    with (directory / WEIGHTS_FILE).open("wb") as file:
        file.write(header)
        for name in names:
            file.write(tensors[name].data)
    write_adapter_config(directory, lora, base_model)
