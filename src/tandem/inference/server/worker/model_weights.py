"""The weights of vLLM's model on one worker: the live weights, a second copy of each parameter
that may change, and adapters to be merged."""

import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.families.adapter import WEIGHTS_FILE, in_targets, peft_keys
from tandem.families.model_config import model_directory, weight_files
from tandem.inference.server.command import CopyPlace, automatic_copy
from tandem.inference.server.worker.weight_layout import CannotWrite, Rectangle, weight_layout
from tandem.model.transfer.merge import merge
from tandem.model.transfer.pinned import pinned_memory
from tandem.system.plain_files import open_plain
from tandem.system.safetensors_header import DTYPES, Entry, read_header

BASE = "base"
"""The version of the weights that vLLM loaded."""

_ALIGNMENT = 512  # bytes; alignment of each pinned copy
_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, (name, _) in DTYPES.items()}

Factors = dict[Rectangle, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""For each rectangle that an adapter changes: A, B and the scale; see
`tandem.model.transfer.merge.merge`."""


def stored_tensors(model: str) -> dict[str, torch.Tensor]:
    """A model's tensors by name, memory-mapped, so that a part is read only when it is used.
    `model`: a directory, or a hub name in the cache."""
    stored: dict[str, torch.Tensor] = {}
    for path in weight_files(model_directory(model, cached=True)):
        stored |= file_tensors(path)
    return stored


def file_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file by name, memory-mapped. Raises the InvalidInput of
    `read_header`."""
    entries = read_header(path)
    with open_plain(path, links="any") as file:
        # The pages are private and writable, because torch warns about memory that is read-only.
        data = np.memmap(file, np.uint8, "c")
    stored = {}
    for name, entry in entries.items():
        flat = torch.from_numpy(data[entry.begin : entry.end])
        stored[name] = flat.view(_DTYPES[entry.dtype]).view(entry.shape)
    return stored


class ModelWeights:
    def __init__(
        self,
        model: torch.nn.Module,
        base_model: str,
        place: CopyPlace | float,
        targets: frozenset[str] | None = None,
    ) -> None:
        """Verifies the layout from `weight_layout`: at every place in the layout, the loaded
        weights must equal the base model's files byte for byte. Raises CannotWrite if the bytes
        differ.

        Args:
            place: the memory for the copy, or the number of bytes that are free besides the model,
                from which `automatic_copy` chooses the place.
            targets: names of the linear layers that may change; None: every tensor may change.
        """
        self._parameters = dict(model.named_parameters())
        self._base = stored_tensors(base_model)
        self._device = next(model.parameters()).device
        rectangles = weight_layout(model)
        self._prove(rectangles)
        self._adapted = [
            rectangle for rectangle in rectangles if in_targets(rectangle.names[0], targets)
        ]
        originals = {
            rectangle.parameter: self._parameters[rectangle.parameter].data
            for rectangle in self._adapted
        }
        size = sum(live.nbytes for live in originals.values())
        self.place = place if isinstance(place, str) else automatic_copy(place, size)
        on_device = self.place == "device" or self._device.type == "cpu"
        self._copy = (
            {name: live.clone() for name, live in originals.items()}
            if on_device
            else pinned_copies(originals)
        )
        self._pinned: torch.Tensor | None = None  # buffer for reading an adapter's file
        self._reading = threading.Lock()
        # All adapters are read on one CUDA stream, because torch's allocator reuses memory only on
        # the stream that freed it.
        self._reader = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @property
    def device_bytes(self) -> int:
        """Bytes of GPU memory that the second copy takes."""
        return sum(copy.nbytes for copy in self._copy.values() if copy.is_cuda)

    @property
    def spare_bytes(self) -> int:
        """Bytes of GPU memory that a swap needs besides the copy, for parameters that are copied
        from the host."""
        return 0 if self.device_bytes else 2 * max(copy.nbytes for copy in self._copy.values())

    def _prove(self, rectangles: list[Rectangle]) -> None:
        for rectangle in rectangles:
            live = rectangle.view(self._parameters[rectangle.parameter].data)
            for name, part in zip(rectangle.names, live, strict=True):
                try:
                    expected = self._base[name][rectangle.in_tensor].to(part.dtype)
                except KeyError as error:
                    raise CannotWrite(f"the base model's files have no {name}") from error
                if expected.shape != part.shape or not torch.equal(
                    bits(expected.to(part.device)), bits(part)
                ):
                    raise CannotWrite(
                        f"{rectangle.parameter} of vLLM differs from {name} in the base model's"
                        " files"
                    )

    @torch.inference_mode()
    def rows(self, row_numbers: dict[str, int]) -> list[dict[str, Any]]:
        """For each named tensor, the part of one row that is on this worker. The part is described
        by the range of its columns and the SHA-256 of its bytes. `row_numbers`: tensor name ->
        index of the row."""
        found, parts = [], []
        for rectangle in self._adapted:
            live = rectangle.view(self._parameters[rectangle.parameter].data)
            for name, part in zip(rectangle.names, live, strict=True):
                begin, end, _ = rectangle.in_tensor[0].indices(10**9)
                if name in row_numbers and begin <= row_numbers[name] < end:
                    parts.append(part[row_numbers[name] - begin])
                    first = rectangle.in_tensor[1].start or 0
                    found.append({"name": name, "begin": first, "end": first + part.shape[1]})
        host = torch.cat(parts).cpu() if parts else torch.empty(0)
        for entry, row in zip(found, host.split([p.numel() for p in parts]), strict=True):
            entry["sha256"] = sha256(bits(row).numpy().tobytes()).hexdigest()
        return found

    @contextmanager
    def _in_stream(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Runs the `with` block on a CUDA stream. When the block ends, the device has finished all
        work of the block. The device is also set, because `torch.cuda.stream` alone would return to
        the thread's default device, GPU 0, and create a CUDA context there."""
        if stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield
            stream.synchronize()

    @torch.inference_mode()
    def _factors(self, directory: str, scale: float) -> Factors:
        """The matrices A and B and the scale of an adapter in PEFT's format. The factors are on the
        device when the function returns. Raises CannotWrite if the adapter does not fit the
        model."""
        factors: Factors = {}
        path = Path(directory, WEIGHTS_FILE)
        entries = read_header(path)
        with self._in_stream(self._reader):
            data = self._on_device(path, entries)
            s = torch.full((1,), scale, dtype=torch.float64, device=self._device)
            left = set(entries)
            for rectangle in self._adapted:
                keys = [peft_keys(name.removesuffix(".weight")) for name in rectangle.names]
                if keys[0][0] not in left:
                    continue
                for name, (key_a, key_b) in zip(rectangle.names, keys, strict=True):
                    (ranks, width), shape = entries[key_a].shape, tuple(self._base[name].shape)
                    if (*entries[key_b].shape, width) != (shape[0], ranks, shape[1]):
                        raise CannotWrite(f"{key_a} and its B don't fit a layer of shape {shape}")
                rows, columns = rectangle.in_tensor
                a = torch.stack([data[key][:, columns] for key, _ in keys])
                b = torch.stack([data[key][rows] for _, key in keys])
                factors[rectangle] = (a, b, s)
                left -= {key for pair in keys for key in pair}
        if left:
            raise CannotWrite(f"vLLM's model has no place for {min(left)}")
        return factors

    def _on_device(self, path: Path, entries: dict[str, Entry]) -> dict[str, torch.Tensor]:
        """The tensors of an adapter's file. The pinned memory is kept for the next file, because
        allocating pinned memory takes long."""
        for name, entry in entries.items():
            if entry.dtype != "F32":
                raise CannotWrite(f"{name} is {entry.dtype}, not F32")
        begin = min((entry.begin for entry in entries.values()), default=0)
        size = max((entry.end for entry in entries.values()), default=0) - begin
        with self._reading:
            if self._pinned is None or self._pinned.numel() < size:
                self._pinned = torch.empty(
                    size, dtype=torch.uint8, pin_memory=self._device.type == "cuda"
                )
            host = self._pinned[:size]
            with open_plain(path, links="any") as file:
                file.seek(begin)
                file.readinto(host.numpy())
            data = host.to(self._device, copy=True)
        return {
            name: data[entry.begin - begin : entry.end - begin]
            .view(torch.float32)
            .view(entry.shape)
            for name, entry in entries.items()
        }


class MergedWeights(ModelWeights):
    """Merges an adapter into vLLM's own weights, in place and between two engine steps. The second
    copy always has the base model's weights. Each merge starts from the base model's weights, so no
    rounding accumulates.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        base_model: str,
        place: CopyPlace | float,
        targets: frozenset[str],
    ) -> None:
        super().__init__(model, base_model, place, targets)
        self._threads = ThreadPoolExecutor(1)
        self._staged = {BASE: Future[Factors]()}
        self._staged[BASE].set_result({})
        self._used = deque([BASE], maxlen=2)  # the last two versions that were in use
        self._changed: set[Rectangle] = set()

    def stage(self, version: str, scale: float, _source: dict[str, Any] | None = None) -> None:
        """Start a thread that reads an adapter onto the device. `staged` reports when the adapter
        has arrived. Only this adapter and the adapters of the two last used versions are kept.

        Args:
            version: the adapter's directory.
            scale: alpha / rank.
        """
        before = self._staged.get(version)
        if before is None or (before.done() and before.exception()):
            self._staged = {name: self._staged[name] for name in {BASE, *self._used}}
            self._staged[version] = self._threads.submit(self._factors, version, scale)

    def staged(self, version: str) -> str:
        """Returns "merge" if the version's adapter has arrived; empty while the adapter is still
        being read. Raises RuntimeError if the adapter can't be read."""
        staged = self._staged[version]
        if not staged.done():
            return ""
        if error := staged.exception():
            raise RuntimeError(
                f"the adapter of {version} can't be read: {type(error).__name__}: {error}"
            ) from error
        return "merge"

    @torch.inference_mode()
    def swap(self, version: str) -> None:
        """Make a staged version the current weights. Call this method between two engine steps, on
        the thread that runs the steps. Raises RuntimeError if the version is not staged; the
        weights are then unchanged. An error while the weights are written leaves them torn (partly
        old and partly new) until a later swap succeeds."""
        if not self.staged(version):
            raise RuntimeError(f"the adapter of {version} is not staged")
        self._write(self._staged[version].result())
        if version != self._used[-1]:
            self._used.append(version)

    def _write(self, factors: Factors) -> None:
        by_parameter = defaultdict[str, list[Rectangle]](list)
        for rectangle in self._adapted:
            if rectangle in factors or rectangle in self._changed:
                by_parameter[rectangle.parameter].append(rectangle)
        for name, rectangles in by_parameter.items():
            base = self._copy[name].to(self._device, non_blocking=True)
            for rectangle in rectangles:
                out, source = rectangle.view(self._parameters[name].data), rectangle.view(base)
                if rectangle in factors:
                    self._changed.add(rectangle)
                    merge(out, source, *factors[rectangle])
                else:
                    out.copy_(source)
                    self._changed.discard(rectangle)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def pinned_copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of the tensors in one block of pinned memory, which is never freed."""
    begins = [
        0,
        *accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()),
    ]
    memory = pinned_memory(begins[-1])
    return {
        name: (
            memory[begin : begin + tensor.nbytes]
            .view(tensor.dtype)
            .view(tensor.shape)
            .copy_(tensor)
        )
        for begin, (name, tensor) in zip(begins, tensors.items(), strict=False)
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as uint8. The last dimension is multiplied by the element size in
    bytes."""
    return tensor.contiguous().view(torch.uint8)
