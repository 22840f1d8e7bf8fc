"""Writes tensors to the volume as a Hugging Face model. The tensors have the names and shapes of
the model's weights. The tensors are either the weights, which transformers and vLLM load, or the
weights' optimizer state.

All ranks write their own parts into the same files, so no tensor is gathered. Ranks of any topology
can read the files (`load_weights`).
"""

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch

from tandem.families.arch import Arch
from tandem.families.model_config import other_files
from tandem.families.registry import weight_rules
from tandem.model.transfer.channel import BUFFER_BYTES, BUFFERS
from tandem.model.transfer.parts import Part, shares
from tandem.model.weights.base_weights import part_view
from tandem.model.weights.safetensors_reader import DTYPE_CODES
from tandem.system.safetensors_header import Entry, lay_out
from tandem.topology.sizes import Sizes

SHARD_BYTES = 4 * 2**30
WRITERS = 8
"""Number of threads that write at the same time."""


class Weights:
    """This rank's tensors, with the names and shapes of the model's weights."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        first = next(iter(tensors.values()))
        self.dtype, self.device = first.dtype, first.device

    @torch.no_grad()
    def fill(self, parts: Sequence[Part], buffer: torch.Tensor) -> None:
        """Write the parts one after another into `buffer`, a flat tensor of the dtype
        `self.dtype`."""
        for part, out in zip(parts, buffer.split([part.size for part in parts]), strict=True):
            source = part_view(part, self._tensors[part.parameter])
            self._fill(part, source, out.view(source.shape))

    def _fill(self, _part: Part, source: torch.Tensor, out: torch.Tensor) -> None:
        """Writes one part into `out`. `source`: the part as a view of this rank's tensor."""
        out.copy_(source)


class ModelFiles:
    """The files `model-0000i-of-0000n.safetensors` in `directory`, and the place of each tensor in
    them."""

    def __init__(self, directory: Path, arch: Arch, dtype: torch.dtype) -> None:
        """Distributes the tensors to files of at most SHARD_BYTES; a larger tensor gets its own
        file. Writes nothing.

        Args:
            arch: the architecture, which gives the tensors' names and shapes.
            dtype: the dtype of all tensors.
        """
        self._directory, self._dtype = directory, dtype
        shapes = {
            name: shape for rule in weight_rules(arch) for name, shape in rule.sources.items()
        }
        shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
        size = 0
        for name, shape in shapes.items():
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            size += nbytes
            if shards[-1] and size > SHARD_BYTES:
                shards.append({})
                size = nbytes
            shards[-1][name] = DTYPE_CODES[dtype], shape
        self._headers: dict[str, bytes] = {}
        # Maps a tensor's name to its file, and to its place in the file.
        self._places: dict[str, tuple[str, Entry]] = {}
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            self._headers[file], entries = lay_out(shard)
            self._places |= {name: (file, entry) for name, entry in entries.items()}

    def create(self, base_model: Path | None = None) -> None:
        """Create the files, with zeros for the tensors, and copy the model's other files:
        configuration and tokenizer."""
        # Parent directories are not created, because the directory of an ended attempt must not be
        # created again.
        self._directory.mkdir()
        # The entries are in the order of the tensors' bytes, so a file's last tensor determines the
        # file's size.
        sizes = {file: entry.end for file, entry in self._places.values()}
        for file, header in self._headers.items():
            (self._directory / file).write_bytes(header)
            # The files get their final size immediately. An NFS client that writes beyond the end
            # of its cached file sends the whole page. The zeros in such a page would overwrite the
            # bytes that another host has written meanwhile.
            os.truncate(self._directory / file, sizes[file])
        index = {
            "metadata": {"total_size": sum(entry.nbytes for _, entry in self._places.values())},
            "weight_map": {name: file for name, (file, _) in self._places.items()},
        }
        (self._directory / "model.safetensors.index.json").write_text(json.dumps(index))
        for path in other_files(base_model) if base_model else ():
            shutil.copyfile(path, self._directory / path.name)

    def write(
        self, weights: Weights, arch: Arch, sizes: Sizes, rank: int, *, beat: Callable[[], None]
    ) -> None:
        """Write this rank's share of every tensor into the files that `create` has made.

        Args:
            weights: this rank's tensors, in the dtype of the files.
            sizes: the sizes of the parallel dimensions, which decide the ranks' shares.
            rank: this rank's number among all ranks.
            beat: called regularly during the writing.
        """
        opened = {file: os.open(self._directory / file, os.O_WRONLY) for file in self._headers}
        most = BUFFER_BYTES // self._dtype.itemsize
        writes = deque[list[Future[None]]]()
        try:
            with ThreadPoolExecutor(WRITERS) as writers:
                for parts in shares(arch, sizes=sizes, rank=rank, most=most):
                    beat()
                    if len(writes) == BUFFERS:
                        _finish(writes.popleft())
                    lengths = [part.size for part in parts]
                    buffer = torch.empty(sum(lengths), dtype=self._dtype, device=weights.device)
                    weights.fill(parts, buffer)
                    values = zip(parts, _in_host_memory(buffer).split(lengths), strict=True)
                    writes.append(
                        [writers.submit(self._write, opened, part, flat) for part, flat in values]
                    )
                for buffer_writes in writes:
                    _finish(buffer_writes)
            for fd in opened.values():
                beat()  # before fsync, data may only be in host memory
                os.fsync(fd)
        finally:
            for fd in opened.values():
                os.close(fd)

    def _write(self, opened: dict[str, int], part: Part, flat: torch.Tensor) -> None:
        values = flat.view(part.shape)
        if values.ndim == 3:  # experts
            for expert, matrix in zip(
                range(part.in_tensor[0].start, part.in_tensor[0].stop), values, strict=True
            ):
                self._write_box(
                    opened, part.name.replace("*", str(expert)), part.in_tensor[1:], matrix
                )
        else:
            self._write_box(opened, part.name, part.in_tensor, values)

    def _write_box(
        self, opened: dict[str, int], name: str, box: tuple[slice, ...], values: torch.Tensor
    ) -> None:
        file, entry = self._places[name]
        width = torch.Size(entry.shape[1:]).numel() * self._dtype.itemsize  # bytes of a row
        left = box[1].start * self._dtype.itemsize if len(box) > 1 else 0
        rows = values.contiguous().view(len(values), -1).view(torch.uint8)
        # Whole rows are consecutive in the file, so one write is enough for all rows.
        for first, end in pairwise(
            [0, len(rows)] if rows.shape[1] == width else range(len(rows) + 1)
        ):
            _write_all(
                opened[file],
                rows[first:end].numpy().data,
                entry.begin + (box[0].start + first) * width + left,
            )


def _in_host_memory(buffer: torch.Tensor) -> torch.Tensor:
    """`buffer` itself if it is in host memory, else a copy of `buffer` in pinned host memory. The
    GPU copies directly into pinned memory."""
    if not buffer.is_cuda:
        return buffer
    return torch.empty_like(buffer, device="cpu", pin_memory=True).copy_(buffer)


def _finish(writes: list[Future[None]]) -> None:
    for write in writes:
        write.result()


def _write_all(fd: int, values: memoryview, at: int) -> None:
    view = values.cast("B")
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done
