"""Reads a checkpoint's tensors. The file must have exactly the expected tensors, and the tensors
must be complete and finite."""

import math
from collections.abc import Iterable, Mapping
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
        CheckpointDamaged: the file is missing, or is not a complete safetensors file, or its names
            and shapes are not exactly `shapes`.
    """
    if not path.is_file():
        raise CheckpointDamaged(f"{path} is missing")
    try:
        stored = read_headers([path])
    except InvalidInput as error:
        raise CheckpointDamaged(error.message) from error
    for name in sorted(shapes.keys() ^ stored.keys()):
        raise CheckpointDamaged(
            f"{path} {'has an unexpected tensor' if name in stored else 'lacks the tensor'} {name}"
        )
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise CheckpointDamaged(
                f"{path}: {name} has the shape {list(stored[name].shape)}, expected {list(shape)}"
            )
    return stored


def check_adapter(directory: Path, arch: Arch, lora: LoraShape) -> dict[str, StoredTensor]:
    """The adapter's tensors in `directory`, by PEFT key. The keys and shapes are exactly those of
    `adapter_shapes`.

    Raises:
        CheckpointDamaged: as in `check_tensors`.
    """
    return check_tensors(directory / WEIGHTS_FILE, adapter_shapes(arch, lora))


def read_tensors(path: Path, tensors: Mapping[str, torch.Tensor], pieces: Iterable[Piece]) -> None:
    """Read a file's pieces into tensors.

    Args:
        path: the file, for error messages.
        tensors: the tensors that the pieces fill, of floating dtypes and on one device. The keys
            are the names for error messages.
        pieces: the pieces of the file; each piece has its target.

    Raises:
        CheckpointDamaged: the file has become shorter, or one of `tensors` contains NaN or infinity
            after the reading.
    """
    try:
        fill_targets(pieces, threads=4)
    except InvalidInput as error:
        raise CheckpointDamaged(error.message) from error
    if not tensors:
        return
    # The largest magnitude of each tensor, computed by a few kernels for all tensors together. A
    # tensor with NaN has the norm NaN.
    largest = torch.stack(
        [norm.float() for norm in torch._foreach_norm(list(tensors.values()), math.inf)]
    )
    for name, finite in zip(tensors, largest.isfinite().tolist(), strict=True):
        if not finite:
            raise CheckpointDamaged(f"{path}: {name} holds NaN or infinity")
