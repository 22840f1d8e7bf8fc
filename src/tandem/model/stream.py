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

CHUNK_BYTES = 16 * 2**20
THREADS = {"cuda": 16, "cpu": 4}
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


def fill(pieces: Iterable[Piece], *, threads: int | None = None, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Copy every piece to its target. On return all of it is there; the buffers are left to torch's cache of pinned
    memory, for a call that follows, until `device.release_cached`.

    Raises InvalidInput where a file can't be read or has become shorter.
    """
    tasks = sorted((task for piece in pieces for task in _split(piece, chunk_bytes)), key=_place)
    if not tasks:
        return
    pending: queue.SimpleQueue[list[Piece]] = queue.SimpleQueue()
    reads = list(_together(tasks, chunk_bytes))
    for read in reads:
        pending.put(read)
    largest = max(sum(map(_bytes, read)) for read in reads)
    where = tasks[0].target.device
    threads = min(threads or THREADS[where.type], len(reads))
    with contextlib.ExitStack() as held, ThreadPoolExecutor(threads) as pool:
        files: dict[Path, int] = {}
        for path in {task.stored.path for task in tasks}:
            try:
                files[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise InvalidInput(f"{path} can't be read: {error}", field="base_model") from error
            held.callback(os.close, files[path])
        workers = [pool.submit(_work, pending, files, largest, where) for _ in range(threads)]
        for worker in workers:
            worker.result()


def _split(piece: Piece, chunk_bytes: int) -> Iterable[Piece]:
    """`piece` in parts of whole units of at most `chunk_bytes` (or one unit)."""
    units = piece.target.shape[0]
    step = max(1, chunk_bytes // (piece.unit * piece.stored.dtype.itemsize))
    for begin in range(0, units, step):
        target = piece.target[begin : begin + step]
        yield Piece(piece.stored, piece.first + begin * piece.unit, piece.unit, target, piece.columns)


def _together(tasks: list[Piece], chunk_bytes: int) -> Iterator[list[Piece]]:
    """`tasks`, which are in the order of the files, in runs that are one read of at most `chunk_bytes` (or one piece):
    a mixture of experts has thousands of small tensors, one after the other."""
    run: list[Piece] = []
    end, size = ("", 0), 0
    for task in tasks:
        path, begin = _place(task)
        # A run has one dtype, so every piece begins at a multiple of it in the buffer.
        fits = run and (path, begin) == end and size + _bytes(task) <= chunk_bytes
        if not fits or task.stored.dtype != run[0].stored.dtype:
            if run:
                yield run
            run, size = [], 0
        run.append(task)
        size += _bytes(task)
        end = path, begin + _bytes(task)
    yield run


def _place(piece: Piece) -> tuple[str, int]:
    """(file, first byte): in the order of the files, for whoever must read them from a disk."""
    return str(piece.stored.path), piece.stored.offset + piece.first * piece.stored.dtype.itemsize


def _bytes(piece: Piece) -> int:
    return int(piece.target.shape[0]) * piece.unit * piece.stored.dtype.itemsize


def _work(pending: queue.SimpleQueue[list[Piece]], files: dict[Path, int], largest: int, where: torch.device) -> None:
    """One thread: take pieces until there are none."""
    cuda = where.type == "cuda"
    buffer = torch.empty(largest, dtype=torch.uint8, pin_memory=cuda)
    view = memoryview(buffer.numpy())
    with contextlib.ExitStack() as held, torch.no_grad():
        stream = torch.cuda.Stream(where) if cuda else None
        if stream is not None:
            # The targets' memory may still be in use by what was queued before.
            stream.wait_stream(torch.cuda.default_stream(where))
            held.enter_context(torch.cuda.stream(stream))
        while True:
            try:
                pieces = pending.get_nowait()
            except queue.Empty:
                return
            try:
                count = sum(map(_bytes, pieces))
                path = pieces[0].stored.path
                _read(files[path], view[:count], _place(pieces[0])[1], path)
                at = 0
                for piece in pieces:
                    _lay_out(piece, buffer[at : at + _bytes(piece)], where)
                    at += _bytes(piece)
                if stream is not None:
                    stream.synchronize()  # before the buffer is used again
            except BaseException:
                with contextlib.suppress(queue.Empty):  # the others stop too
                    while True:
                        pending.get_nowait()
                raise


def _lay_out(piece: Piece, raw: torch.Tensor, where: torch.device) -> None:
    """Queue the copy of the bytes `raw` to their target."""
    source = raw.view(piece.stored.dtype)
    as_it_is = piece.columns is None and piece.target.is_contiguous() and piece.target.dtype == piece.stored.dtype
    if not as_it_is:
        source = source.to(where, non_blocking=True)  # laid out and converted there
    if piece.columns is not None:
        source = source.view(-1, piece.unit)[:, piece.columns]
    piece.target.copy_(source.view(piece.target.shape), non_blocking=True)


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
