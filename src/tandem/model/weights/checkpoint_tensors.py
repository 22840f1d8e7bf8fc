"""Reads a checkpoint's tensors, which must be exactly the expected ones, whole and finite."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from tandem.errors import CheckpointDamaged, InvalidInput
from tandem.families.adapter import WEIGHTS_FILE, adapter_shapes
from tandem.families.arch import Arch
from tandem.model.weights.safetensors_reader import Piece, StoredTensor, fill_targets, read_headers
from tandem.spool.schema import LoraShape


def check_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    """The tensors stored in `path`, by name. Reads only the header.

    Raises:
        CheckpointDamaged: the file is missing or not a whole safetensors file, or its names and shapes are not exactly
            `shapes`.
    """
    if not path.is_file():
        raise CheckpointDamaged(f"{path} is missing")
    try:
        stored = read_headers([path])
    except InvalidInput as error:
        raise CheckpointDamaged(error.message) from error
    for name in sorted(shapes.keys() ^ stored.keys()):
        raise CheckpointDamaged(f"{path} {'has an unexpected tensor' if name in stored else 'lacks the tensor'} {name}")
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise CheckpointDamaged(f"{path}: {name} has the shape {list(stored[name].shape)}, expected {list(shape)}")
    return stored


def check_adapter(directory: Path, arch: Arch, lora: LoraShape) -> dict[str, StoredTensor]:
    """The tensors of the adapter in `directory`, by PEFT key: exactly those of `adapter_shapes`.

    Raises:
        CheckpointDamaged: as `check_tensors`.
    """
    return check_tensors(directory / WEIGHTS_FILE, adapter_shapes(arch, lora))


def read_tensors(stored: Mapping[str, StoredTensor], where: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of one file (`check_tensors`) on the device `where`, all views of one allocation.

    Raises:
        CheckpointDamaged: the file has become shorter, or a tensor holds NaN or infinity.
    """
    path, begin = min((tensor.path, tensor.offset) for tensor in stored.values())
    whole = torch.empty(sum(tensor.nbytes for tensor in stored.values()), dtype=torch.uint8, device=where)
    try:
        fill_targets([Piece(StoredTensor(path, begin, torch.uint8, (len(whole),)), 0, 1, whole)], threads=4)
    except InvalidInput as error:
        raise CheckpointDamaged(error.message) from error
    tensors = {}
    for name, tensor in stored.items():
        at = tensor.offset - begin
        tensors[name] = whole[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    # The largest magnitudes, in a few kernels for all tensors. A tensor with NaN has the norm NaN.
    largest = torch.stack([norm.float() for norm in torch._foreach_norm(list(floats.values()), math.inf)])
    for name, finite in zip(floats, largest.isfinite().tolist(), strict=True):
        if not finite:
            raise CheckpointDamaged(f"{path}: {name} holds NaN or infinity")
    return tensors


def read_adapter(directory: Path, arch: Arch, lora: LoraShape, where: torch.device) -> dict[str, torch.Tensor]:
    """The adapter in `directory`, by PEFT key, on the device `where`. Raises as `check_adapter` and `read_tensors`."""
    return read_tensors(check_adapter(directory, arch, lora), where)
