"""vLLM's own weights become those of an adapter merged into the base model, in place and between two engine steps.

`MergedWeights` belongs to one worker. It keeps a second copy of the base weights that adapters may touch, so each merge
starts from them and no rounding accumulates.
"""

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch

from tandem.families.adapter import WEIGHTS_FILE, peft_keys
from tandem.inference.server.worker.base_files import BaseFiles
from tandem.inference.server.worker.merge import merge
from tandem.inference.server.worker.weight_plan import Block, CannotWrite, plan
from tandem.inference.tensor_file import TensorFile

BASE = "base"
"""The version of the weights that vLLM loaded."""


@dataclass
class Factors:
    """The adapter of one version on this worker's device: A, B and the scale of each block that it adapts."""

    of_block: dict[Block, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    error: str = ""
    ready: bool = False


class MergedWeights:
    def __init__(
        self, model: torch.nn.Module, base_model: str, targets: frozenset[str], copy: Literal["device", "host"]
    ) -> None:
        """`targets`: names of the linear layers that adapters may touch.

        Proves the plan: the base model's files, put through it, are what vLLM loaded, byte for byte. Else CannotWrite.
        """
        self._parameters = dict(model.named_parameters())
        self._blocks = plan(model)
        self._base_files = BaseFiles(base_model)
        self._device = next(model.parameters()).device
        self._prove()
        self._adapted = [
            b for b in self._blocks if b.names[0].split(".")[-2] in targets and b.names[0].endswith("weight")
        ]
        self._base = {
            name: _copied(self._parameters[name].data, copy) for name in {block.parameter for block in self._adapted}
        }
        self._versions: dict[str, Factors] = {BASE: Factors(ready=True)}
        self.version = BASE
        self._changed: set[Block] = set()
        self._pinned: torch.Tensor | None = None
        self._reading = threading.Lock()

    @property
    def device_bytes(self) -> int:
        """Memory on the GPU beside vLLM's own: the copy, or the space for one parameter on its way from the host."""
        sizes = [base.nbytes for base in self._base.values()]
        return sum(sizes) if next(iter(self._base.values())).is_cuda else 2 * max(sizes)

    def _prove(self) -> None:
        for block in self._blocks:
            live = block.view(self._parameters[block.parameter].data)
            for name, part in zip(block.names, live, strict=True):
                try:
                    expected = self._base_files.block(name, block.of).to(part.dtype)
                except KeyError as error:
                    raise CannotWrite(f"the base model's files have no {name}") from error
                if expected.shape != part.shape or not torch.equal(_bits(expected.to(part.device)), _bits(part)):
                    raise CannotWrite(f"{block.parameter} of vLLM differs from {name} in the base model's files")

    def stage(self, version: str, directory: str, scale: float) -> None:
        """Begin to read an adapter in PEFT's format onto the device, in a thread. `staged` says when it is there."""
        if version not in self._versions or self._versions[version].error:
            self._versions[version] = factors = Factors()
            threading.Thread(target=self._read, args=(factors, directory, scale), daemon=True).start()

    def staged(self, version: str) -> bool:
        """Whether `swap` to this version is possible now. Raises RuntimeError where its adapter can't be read."""
        factors = self._versions[version]
        if factors.error:
            raise RuntimeError(f"the adapter of {version} can't be read: {factors.error}")
        return factors.ready

    @torch.inference_mode()
    def _read(self, factors: Factors, directory: str, scale: float) -> None:
        try:
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
                        (ranks, width), shape = file.shape(key_a), self._base_files.shape(name)
                        if (*file.shape(key_b), width) != (shape[0], ranks, shape[1]):
                            raise CannotWrite(f"{key_a} and its B don't fit a layer of shape {shape}")
                    rows, columns = block.of
                    a = _stacked([_tensor(data, file, key)[:, columns] for key, _ in keys])
                    b = _stacked([_tensor(data, file, key)[rows] for _, key in keys])
                    factors.of_block[block] = (a, b, s)
                    left -= {key for pair in keys for key in pair}
                if stream is not None:
                    stream.synchronize()
            if left:
                raise CannotWrite(f"vLLM's model has no place for {min(left)}")
            factors.ready = True
        except Exception as error:
            factors.error = f"{type(error).__name__}: {error}"

    def _on_device(self, path: Path, begin: int) -> torch.Tensor:
        """A file from byte `begin`, uint8. Pinned memory is kept for the next file, because it takes long to make."""
        size = path.stat().st_size - begin
        with self._reading:
            if self._pinned is None or self._pinned.numel() < size:
                self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            host = self._pinned[:size]
            with path.open("rb", buffering=0) as file:
                file.seek(begin)
                view, done = memoryview(host.numpy()), 0
                while done < size and (count := file.readinto(view[done:])):
                    done += count
            return host.to(self._device, copy=True)

    @torch.inference_mode()
    def swap(self, version: str) -> dict[str, Any]:
        """Make the weights those of a staged version. Call it between two steps, on the thread that runs them.

        If it raises, `version` is empty and the weights are torn, until a swap to the version before or another one.
        """
        begin, factors = time.perf_counter(), self._versions[version]
        if not factors.ready:
            raise RuntimeError(f"the adapter of {version} is not staged")
        self.version = ""
        self._write(factors)
        self.version = version
        return {"seconds": time.perf_counter() - begin}

    def _write(self, factors: Factors) -> None:
        of_parameter = defaultdict[str, list[Block]](list)
        for block in self._adapted:
            if block in factors.of_block or block in self._changed:
                of_parameter[block.parameter].append(block)
        for name, blocks in of_parameter.items():
            base = self._base[name].to(self._device, non_blocking=True)
            for block in blocks:
                out, source = block.view(self._parameters[name].data), block.view(base)
                if block in factors.of_block:
                    self._changed.add(block)
                    merge(out, source, *factors.of_block[block])
                else:
                    out.copy_(source)
                    self._changed.discard(block)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def discard(self, *, keep: list[str]) -> None:
        """Forget the adapters of versions that are neither in use nor in `keep`."""
        names = {BASE, self.version, *keep}
        self._versions = {name: factors for name, factors in self._versions.items() if name in names}

    @torch.inference_mode()
    def rows(self, wanted: dict[str, int]) -> list[dict[str, Any]]:
        """For one row of each named tensor that is on this worker: its columns here and the SHA-256 of its bytes."""
        found, parts = [], []
        for block in self._adapted:
            live = block.view(self._parameters[block.parameter].data)
            for name, part in zip(block.names, live, strict=True):
                begin, end, _ = block.of[0].indices(10**9)
                if name in wanted and begin <= wanted[name] < end:
                    columns = block.of[1]
                    parts.append(part[wanted[name] - begin])
                    first = columns.start or 0
                    found.append({"name": name, "begin": first, "end": first + part.shape[1]})
        host = torch.cat(parts).cpu() if parts else torch.empty(0)
        for entry, row in zip(found, host.split([p.numel() for p in parts]), strict=True):
            entry["sha256"] = sha256(_bits(row).numpy().tobytes()).hexdigest()
        return found


def _tensor(data: torch.Tensor, file: TensorFile, name: str) -> torch.Tensor:
    """A float32 tensor of the file whose bytes are in `data`."""
    if file.dtype(name) != "F32":
        raise CannotWrite(f"{name} is {file.dtype(name)}, not F32")
    begin, end = file.offsets(name)
    return data[begin:end].view(torch.float32).view(file.shape(name))


def _stacked(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def _copied(live: torch.Tensor, where: Literal["device", "host"]) -> torch.Tensor:
    if where == "device" or live.device.type == "cpu":
        return live.clone()
    return torch.empty(live.shape, dtype=live.dtype, pin_memory=True).copy_(live)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
