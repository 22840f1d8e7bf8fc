"""Reads tensors of safetensors files into tensors on the device, as fast as the page cache delivers
them.

safetensors' own reader copies in one thread, through memory that isn't pinned. In this module,
several threads read chunks with `preadv` into pinned buffers and copy the chunks on CUDA streams.
So reading, copying and rearranging overlap.
"""

import contextlib
import dataclasses
import math
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.errors import InvalidInput
from tandem.model.transfer.pinned import pinned_memory, release_pinned
from tandem.system.plain_files import descriptor
from tandem.system.safetensors_header import DTYPES, read_header

CHUNK_BYTES = 16 * 2**20
THREADS = {"cuda": 8, "cpu": 4}
_DTYPES = {code: getattr(torch, name) for code, (name, _) in DTYPES.items()}
_STACKED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")
DTYPE_CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in _DTYPES.items()}
"""Dtype -> the dtype's name in a file's header."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    path: Path
    offset: int  # position of the tensor's first byte in the file
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """A range of a stored tensor, and the tensor that it fills.

    The stored tensor is read as a flat tensor. The range begins at the flat tensor's element
    `first` and has `target.shape[0]` units of `unit` elements. Only the elements `columns` of each
    unit are copied (None: all elements).
    """

    stored: StoredTensor
    first: int
    unit: int
    target: torch.Tensor  # [units, ...] of any dtype and strides, on any device
    columns: slice | None = None

    @property
    def offset(self) -> int:
        """The position of the range's first byte in the file."""
        return self.stored.offset + self.first * self.stored.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return len(self.target) * self.unit * self.stored.dtype.itemsize

    @property
    def verbatim(self) -> bool:
        """Whether the file's bytes are copied to the target without a change."""
        return (
            self.columns is None
            and self.target.is_contiguous()
            and self.target.dtype == self.stored.dtype
        )


def read_headers(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """Every tensor in the files, by name. Raises InvalidInput, as `read_header` does."""
    return {
        name: StoredTensor(path, entry.begin, _DTYPES[entry.dtype], entry.shape)
        for path in paths
        for name, entry in read_header(path).items()
    }


def expert_by_expert(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """`stored`, with each tensor that stacks all experts replaced by one tensor per expert. The
    stacked tensors are gate_up [experts, 2 * features, hidden] with the rows of gate first, and
    down [experts, hidden, features].

    Qwen3.5's published checkpoints are stacked; transformers writes one tensor per expert. vLLM
    reads both formats.
    """
    found = dict(stored)
    for name, whole in stored.items():
        if not (stack := _STACKED.fullmatch(name)) or len(whole.shape) != 3:
            continue
        kinds = ("gate", "up") if stack[2] == "gate_up" else ("down",)
        experts, rows, columns = whole.shape[0], whole.shape[1] // len(kinds), whole.shape[2]
        for number in range(experts * len(kinds)):
            expert, kind = divmod(number, len(kinds))
            offset = whole.offset + number * rows * columns * whole.dtype.itemsize
            part = StoredTensor(whole.path, offset, whole.dtype, (rows, columns))
            found[f"{stack[1]}.{expert}.{kinds[kind]}_proj.weight"] = part
    return found


def fill_targets(pieces: Iterable[Piece], *, threads: int | None = None) -> None:
    """Copy every piece to its target. When the function returns, all copies are complete and the
    buffers are freed.

    Raises InvalidInput if a file can't be read or has become shorter.
    """
    chunks = [chunk for piece in pieces for chunk in _split(piece)]
    if not chunks:
        return
    chunks.sort(key=lambda chunk: (str(chunk.stored.path), chunk.offset))
    reads = deque(_merge(chunks))
    buffer_bytes = max(sum(chunk.nbytes for chunk in read) for read in reads)
    where = chunks[0].target.device
    threads = min(threads or THREADS[where.type], len(reads))
    with contextlib.ExitStack() as opened, ThreadPoolExecutor(threads) as pool:
        files: dict[Path, int] = {}
        for path in {chunk.stored.path for chunk in chunks}:
            try:
                files[path] = descriptor(path, os.O_RDONLY, links="any")
            except OSError as error:
                raise InvalidInput(f"{path} can't be read: {error}", field="base_model") from error
            opened.callback(os.close, files[path])
        for worker in [
            pool.submit(_work, reads, files, buffer_bytes, where) for _ in range(threads)
        ]:
            worker.result()


def _split(piece: Piece) -> Iterator[Piece]:
    """`piece`, split into pieces of at most CHUNK_BYTES. A unit larger than CHUNK_BYTES is one
    piece."""
    if 0 < piece.nbytes <= CHUNK_BYTES:
        yield piece
        return
    units = max(1, CHUNK_BYTES // (piece.unit * piece.stored.dtype.itemsize))
    for begin in range(0, len(piece.target), units):
        target = piece.target[begin : begin + units]
        yield dataclasses.replace(piece, first=piece.first + begin * piece.unit, target=target)


def _merge(chunks: list[Piece]) -> Iterator[list[Piece]]:
    """Sorted chunks, grouped into reads. The chunks of a read are consecutive bytes of the same
    dtype. A read has at most CHUNK_BYTES, or is a single chunk. Grouping matters, because a mixture
    of experts has thousands of small tensors one after another."""
    read: list[Piece] = []
    for chunk in chunks:
        last = read[-1] if read else chunk
        consecutive = (
            chunk.offset == last.offset + last.nbytes and chunk.stored.path == last.stored.path
        )
        size = chunk.offset + chunk.nbytes - read[0].offset if read else 0
        if read and not (
            consecutive and chunk.stored.dtype == last.stored.dtype and size <= CHUNK_BYTES
        ):
            yield read
            read = []
        read.append(chunk)
    yield read


def _work(
    reads: deque[list[Piece]], files: dict[Path, int], buffer_bytes: int, where: torch.device
) -> None:
    """The work of one thread: the thread takes reads from `reads` until the queue is empty. If one
    thread fails, all threads stop.

    After each call that releases the GIL, the thread must wait to get the GIL back. So the thread
    makes as few such calls as possible. A read that consists of one verbatim chunk needs only two
    such calls.
    """
    if where.type == "cuda":
        # A new thread's default device is GPU 0, and the thread's first CUDA call would create a
        # context on GPU 0.
        torch.cuda.set_device(where)
    with contextlib.ExitStack() as held, torch.no_grad():
        aligned = -(-buffer_bytes // 16) * 16  # rounded up to whole elements of any dtype
        buffer = held.enter_context(_host_buffer(aligned, pinned=where.type == "cuda"))
        memory = memoryview(buffer.numpy())
        stream = torch.cuda.Stream(where) if where.type == "cuda" else None
        if stream is not None:
            held.callback(stream.synchronize)  # Wait for the copies before the buffer is freed.
            # Kernels that were queued earlier may still use the targets' memory.
            stream.wait_stream(torch.cuda.default_stream(where))
            held.enter_context(torch.cuda.stream(stream))
        while reads:
            try:
                chunks = reads.popleft()
            except IndexError:  # another thread took the last read
                return
            try:
                stored = chunks[0].stored
                counts = [len(chunk.target) * chunk.unit for chunk in chunks]
                nbytes = sum(counts) * stored.dtype.itemsize
                _read(files[stored.path], memory[:nbytes], chunks[0].offset, stored.path)
                for chunk, values in zip(
                    chunks, buffer[:nbytes].view(stored.dtype).split(counts), strict=True
                ):
                    _copy(chunk, values, where, wait=chunk is chunks[-1])
                if stream is not None and not chunks[-1].verbatim:
                    stream.synchronize()  # wait for the copies before the buffer is used again
            except BaseException:
                reads.clear()
                raise


def _copy(chunk: Piece, values: torch.Tensor, where: torch.device, *, wait: bool) -> None:
    """Queue the copy of the flat tensor `values` to the chunk's target. `wait`: whether a verbatim
    copy is complete when the function returns."""
    if chunk.verbatim:
        chunk.target.view(-1).copy_(values, non_blocking=not wait)
        return
    values = values.to(where, non_blocking=True)  # the device rearranges and converts the values
    if chunk.columns is not None:
        values = values.view(-1, chunk.unit)[:, chunk.columns]
    chunk.target.copy_(values.view(chunk.target.shape), non_blocking=True)


def _read(file: int, memory: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(memory):
        try:
            count = os.preadv(file, [memory[done:]], offset + done)
        except OSError as error:
            raise InvalidInput(f"{path} can't be read: {error}", field="base_model") from error
        if count == 0:
            raise InvalidInput(
                f"{path} can't be read: it ends at byte {offset + done}", field="base_model"
            )
        done += count


@contextlib.contextmanager
def _host_buffer(size: int, *, pinned: bool) -> Iterator[torch.Tensor]:
    """Host memory, uint8 [size], into which files are read. The memory is freed at the end of the
    `with` block. `pinned`: whether the memory is pinned, for copies to a GPU."""
    if not pinned:
        yield torch.empty(size, dtype=torch.uint8)
        return
    buffer = pinned_memory(size)
    try:
        yield buffer
    finally:
        release_pinned(buffer)
