"""A checkpoint's tensors: exactly those expected, whole and finite, or an error that names the one that isn't."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from tandem.errors import CheckpointDamaged, InvalidInput
from tandem.families.adapter import WEIGHTS_FILE, adapter_shapes, check_config
from tandem.families.arch import Arch
from tandem.model.weights import stream
from tandem.model.weights.stream import Piece, Stored
from tandem.spool.schema import LoraShape


def expect(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Stored]:
    """Where the tensors of `path` lie, which must be those of `shapes`. Reads the header alone.

    Raises:
        CheckpointDamaged: the file is missing or not a whole safetensors file, or a tensor is missing, unexpected or
            misshapen.
    """
    if not path.is_file():
        raise CheckpointDamaged(f"{path} is missing")
    try:
        found = stream.headers([path])
    except InvalidInput as error:
        raise CheckpointDamaged(error.message) from error
    for name in sorted(shapes.keys() ^ found.keys()):
        raise CheckpointDamaged(f"{path} {'has an unexpected tensor' if name in found else 'lacks the tensor'} {name}")
    for name, shape in shapes.items():
        if found[name].shape != shape:
            raise CheckpointDamaged(f"{path}: {name} has the shape {list(found[name].shape)}, expected {list(shape)}")
    return found


def read(stored: Mapping[str, Stored], where: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of one file, `expect`'s, on the device `where`, all in one piece of memory, which any of them keeps.

    Raises:
        CheckpointDamaged: the file has become shorter, or a tensor holds NaN or infinity.
    """
    path, begin = min((tensor.path, tensor.offset) for tensor in stored.values())
    whole = torch.empty(sum(map(_bytes, stored.values())), dtype=torch.uint8, device=where)
    try:
        stream.fill([Piece(Stored(path, begin, torch.uint8, (len(whole),)), 0, 1, whole)], threads=4)
    except InvalidInput as error:
        raise CheckpointDamaged(error.message) from error
    found = {}
    for name, tensor in stored.items():
        at = tensor.offset - begin
        found[name] = whole[at : at + _bytes(tensor)].view(tensor.dtype).view(tensor.shape)
    floats = {name: tensor for name, tensor in found.items() if tensor.is_floating_point()}
    # The largest magnitudes, in a few kernels for all of them. NaN is larger than anything.
    largest = torch.stack([norm.float() for norm in torch._foreach_norm(list(floats.values()), math.inf)])
    for name, finite in zip(floats, largest.isfinite().tolist(), strict=True):
        if not finite:
            raise CheckpointDamaged(f"{path}: {name} holds NaN or infinity")
    return found


def expect_adapter(directory: Path, arch: Arch, lora: LoraShape) -> dict[str, Stored]:
    """Where the tensors of the adapter in `directory` lie, by PEFT key: exactly those that `adapter_shapes` names.

    Raises:
        CheckpointDamaged: as `expect`, and where the config says another rank, alpha or targets than `lora`.
    """
    check_config(directory, lora)
    return expect(directory / WEIGHTS_FILE, adapter_shapes(arch, lora))


def read_adapter(directory: Path, arch: Arch, lora: LoraShape, where: torch.device) -> dict[str, torch.Tensor]:
    """The adapter in `directory`, by PEFT key, on the device `where`. Raises as `expect_adapter` and `read` do."""
    return read(expect_adapter(directory, arch, lora), where)


def _bytes(stored: Stored) -> int:
    return math.prod(stored.shape) * stored.dtype.itemsize
