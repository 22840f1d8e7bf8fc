"""Reads a model's files block by block, and adapters onto the device."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tandem.families.adapter import WEIGHTS_FILE, peft_keys
from tandem.inference.server.worker.weight_plan import Block, CannotWrite
from tandem.inference.tensor_file import TensorFile, weight_files

Factors = dict[Block, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""A, B and the scale of each block that an adapter changes; see `tandem.model.transfer.merge.merge`."""


def stored_tensors(model: str) -> dict[str, Any]:
    """A model's tensors by name, as safetensors' slices: indexing one reads that block. `model`: see `weight_files`.
    Files stay open, memory-mapped."""
    opened = [safe_open(path, framework="pt") for path in weight_files(model)]
    return {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118 - it is no dict


class FactorReader:
    def __init__(self, blocks: Sequence[Block], base: Mapping[str, Any], device: torch.device) -> None:
        """`blocks`: those that adapters may change; `base`: the base model's `stored_tensors`."""
        self._adapted, self._base, self._device = blocks, base, device
        self._pinned: torch.Tensor | None = None
        self._reading = threading.Lock()

    @torch.inference_mode()
    def read(self, directory: str, scale: float) -> Factors:
        """An adapter in PEFT's format. On return all of it is on the device. CannotWrite where it does not fit."""
        factors: Factors = {}
        file = TensorFile(Path(directory, WEIGHTS_FILE))
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        with torch.cuda.stream(stream):
            data = self._on_device(Path(directory, WEIGHTS_FILE), file.begin)
            s = torch.full((1,), scale, dtype=torch.float64, device=self._device)
            left = set(file)
            for block in self._adapted:
                keys = [peft_keys(name.removesuffix(".weight")) for name in block.names]
                if keys[0][0] not in left:
                    continue
                for name, (key_a, key_b) in zip(block.names, keys, strict=True):
                    (ranks, width), shape = file.shape(key_a), tuple(self._base[name].get_shape())
                    if (*file.shape(key_b), width) != (shape[0], ranks, shape[1]):
                        raise CannotWrite(f"{key_a} and its B don't fit a layer of shape {shape}")
                rows, columns = block.of
                a = _stacked([_tensor(data, file, key)[:, columns] for key, _ in keys])
                b = _stacked([_tensor(data, file, key)[rows] for _, key in keys])
                factors[block] = (a, b, s)
                left -= {key for pair in keys for key in pair}
            if stream is not None:
                stream.synchronize()
        if left:
            raise CannotWrite(f"vLLM's model has no place for {min(left)}")
        return factors

    def _on_device(self, path: Path, begin: int) -> torch.Tensor:
        """A file from byte `begin`, uint8. Pinned memory is kept for the next file, because it takes long to make."""
        size = path.stat().st_size - begin
        with self._reading:
            if self._pinned is None or self._pinned.numel() < size:
                self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            host = self._pinned[:size]
            with path.open("rb") as file:
                file.seek(begin)
                file.readinto(host.numpy())
            return host.to(self._device, copy=True)


def _tensor(data: torch.Tensor, file: TensorFile, name: str) -> torch.Tensor:
    """A float32 tensor of the file whose bytes are in `data`."""
    if file.dtype(name) != "F32":
        raise CannotWrite(f"{name} is {file.dtype(name)}, not F32")
    begin, end = file.offsets(name)
    return data[begin:end].view(torch.float32).view(file.shape(name))


def _stacked(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)
