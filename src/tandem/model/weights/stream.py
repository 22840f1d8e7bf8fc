"""Tensors of safetensors files onto the device, as fast as the page cache gives them.

safetensors' own reader copies with one thread through memory that isn't pinned. Here several threads read chunks with
`preadv` into pinned buffers of their own and copy them on streams of their own, so that reading, copying and the layout
on the device overlap. The format is an 8-byte little-endian length, that much JSON, then the data:
https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.errors import InvalidInput
from tandem.model.device.allocation import host_buffer

CHUNK_BYTES = 16 * 2**20
THREADS = {"cuda": 8, "cpu": 4}
_LONGEST_HEADER = 100 * 10**6  # bytes; the reference implementation's own limit
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    path: Path
    offset: int  # of its first byte in the file
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A range of a stored tensor and where it goes.

    The range begins at element `first` of the tensor's flat order and is `target.shape[0]` units of `unit` elements
    each. Of the elements of a unit `columns` are wanted (all where it is None).
    """

    stored: Stored
    first: int
    unit: int
    target: torch.Tensor  # [units, ...] of any dtype and strides, on any device
    columns: slice | None = None


def headers(paths: Iterable[Path]) -> dict[str, Stored]:
    """Every tensor of the files. InvalidInput, naming the file, where one is not a whole safetensors file."""
    found: dict[str, Stored] = {}
    for path in paths:
        try:
            found |= _header(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise InvalidInput(f"{path} can't be read: {error}", field="base_model") from error
    return found


def _header(path: Path) -> dict[str, Stored]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size - 8, _LONGEST_HEADER):
            raise ValueError(f"its header would be {length} bytes, the file is {size}")
        entries: dict[str, Any] = json.loads(file.read(length))
    found = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name} has the unknown dtype {entry['dtype']}")
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if end - begin != math.prod(shape) * dtype.itemsize or begin < 0:
            raise ValueError(f"{name} of shape {list(shape)} and {entry['dtype']} does not fill bytes {begin} to {end}")
        if 8 + length + end > size:
            raise ValueError(f"{name} ends at byte {8 + length + end}, the file at {size}")
        found[name] = Stored(path, 8 + length + begin, dtype, shape)
    return found


@dataclass(frozen=True)
class _Task:
    """What of a piece is read at once."""

    piece: Piece
    offset: int  # of its first byte in the file
    count: int  # elements
    target: torch.Tensor  # flat where the bytes are what it is to hold, else as the piece has it
    as_it_is: bool

    @property
    def bytes(self) -> int:
        return self.count * self.piece.stored.dtype.itemsize

    @property
    def place(self) -> tuple[str, int]:
        """(file, first byte): in the order of the files, for whoever must read them from a disk."""
        return str(self.piece.stored.path), self.offset


def fill(pieces: Iterable[Piece], *, threads: int | None = None, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Copy every piece to its target. On return all of it is there, and the buffers are gone.

    Raises InvalidInput where a file can't be read or has become shorter.
    """
    tasks = sorted((task for piece in pieces for task in _split(piece, chunk_bytes)), key=lambda task: task.place)
    if not tasks:
        return
    pending: queue.SimpleQueue[list[_Task]] = queue.SimpleQueue()
    reads = list(_together(tasks, chunk_bytes))
    for read in reads:
        pending.put(read)
    largest = max(sum(task.bytes for task in read) for read in reads)
    where = tasks[0].target.device
    threads = min(threads or THREADS[where.type], len(reads))
    with contextlib.ExitStack() as held, ThreadPoolExecutor(threads) as pool:
        files: dict[Path, int] = {}
        for path in {task.piece.stored.path for task in tasks}:
            try:
                files[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise InvalidInput(f"{path} can't be read: {error}", field="base_model") from error
            held.callback(os.close, files[path])
        workers = [pool.submit(_work, pending, files, largest, where) for _ in range(threads)]
        for worker in workers:
            worker.result()


def _split(piece: Piece, chunk_bytes: int) -> Iterator[_Task]:
    """`piece` in parts of whole units of at most `chunk_bytes` (or one unit)."""
    stored, whole = piece.stored, piece.target
    size = stored.dtype.itemsize
    as_it_is = piece.columns is None and whole.is_contiguous() and whole.dtype == stored.dtype
    units = whole.shape[0]
    step = max(1, chunk_bytes // (piece.unit * size))
    for begin in range(0, units, step):
        target = whole[begin : begin + step]
        count = target.shape[0] * piece.unit
        offset = stored.offset + (piece.first + begin * piece.unit) * size
        if as_it_is:
            target = target.view(-1)
        yield _Task(piece, offset, count, target, as_it_is)


def _together(tasks: list[_Task], chunk_bytes: int) -> Iterator[list[_Task]]:
    """`tasks`, which are in the order of the files, in runs that are one read of at most `chunk_bytes` (or one piece):
    a mixture of experts has thousands of small tensors, one after the other."""
    run: list[_Task] = []
    end, size = ("", 0), 0
    for task in tasks:
        path, begin = task.place
        # A run has one dtype, so the buffer can be seen as a tensor of that.
        fits = run and (path, begin) == end and size + task.bytes <= chunk_bytes
        if not fits or task.piece.stored.dtype != run[0].piece.stored.dtype:
            if run:
                yield run
            run, size = [], 0
        run.append(task)
        size += task.bytes
        end = path, begin + task.bytes
    yield run


def _work(pending: queue.SimpleQueue[list[_Task]], files: dict[Path, int], largest: int, where: torch.device) -> None:
    """One thread: take reads until there are none.

    As few calls as can be that give up the interpreter's lock, since each must wait for it again: where a read is one
    piece that needs no laying out, two.
    """
    cuda = where.type == "cuda"
    typed: dict[torch.dtype, torch.Tensor] = {}
    with contextlib.ExitStack() as held, torch.no_grad():
        whole = -(-largest // 16) * 16  # elements of any dtype
        buffer = held.enter_context(host_buffer(whole, pinned=cuda))
        view = memoryview(buffer.numpy())
        stream = torch.cuda.Stream(where) if cuda else None
        if stream is not None:
            held.callback(stream.synchronize)  # before the buffer goes
            # The targets' memory may still be in use by what was queued before.
            stream.wait_stream(torch.cuda.default_stream(where))
            held.enter_context(torch.cuda.stream(stream))
        while True:
            try:
                tasks = pending.get_nowait()
            except queue.Empty:
                return
            try:
                stored = tasks[0].piece.stored
                _read(files[stored.path], view[: sum(task.bytes for task in tasks)], tasks[0].offset, stored.path)
                if stored.dtype not in typed:
                    typed[stored.dtype] = buffer.view(stored.dtype)
                at = 0
                for task in tasks:
                    _lay_out(task, typed[stored.dtype][at : at + task.count], where, wait=task is tasks[-1])
                    at += task.count
                if stream is not None and not tasks[-1].as_it_is:
                    stream.synchronize()  # before the buffer is used again
            except BaseException:
                with contextlib.suppress(queue.Empty):  # the others stop too
                    while True:
                        pending.get_nowait()
                raise


def _lay_out(task: _Task, source: torch.Tensor, where: torch.device, *, wait: bool) -> None:
    """Queue the copy of `source` to its target; with `wait`, and where it is copied as it is, it has been made."""
    if task.as_it_is:
        task.target.copy_(source, non_blocking=not wait)
        return
    source = source.to(where, non_blocking=True)  # laid out and converted there
    if task.piece.columns is not None:
        source = source.view(-1, task.piece.unit)[:, task.piece.columns]
    task.target.copy_(source.view(task.target.shape), non_blocking=True)


def _read(file: int, view: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(view):
        try:
            count = os.preadv(file, [view[done:]], offset + done)
        except OSError as error:
            raise InvalidInput(f"{path} can't be read: {error}", field="base_model") from error
        if count == 0:
            raise InvalidInput(f"{path} can't be read: it ends at byte {offset + done}", field="base_model")
        done += count
