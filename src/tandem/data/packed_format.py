"""The packed format: the file in a job's data directory, its writer and its reader.

`arrays.npy` is one record in NumPy's own format, so `np.load(file, mmap_mode="r")["tokens"]` reads
an array. The record's fields are `format`, `vocab_size` (both int64 []) and the arrays. The shapes
contain the numbers of rows R, slots per row L, items N, trajectories T and groups G:

    item_offsets          int64 [R + 1]        items of row r: item_offsets[r] : item_offsets[r + 1]
    tokens                int32 [R, L]         token ids; padding is 0
    positions             int32 [R, L]         depth in the tree = RoPE position; padding is 0
    subtree_end           int32 [R, L]         query q may attend to key k exactly when
                                               k <= q < subtree_end[k]; padding: own + 1
    slot_experts          int16 [R, L, M, K]   the sampler's K experts in each of M layers, or -1;
                                               M = K = 0: all unknown
    row_num_tokens        int32 [R]            slots in use; padding is at the end of a row
    row_batch             int32 [R]            the row's batch with `optimizer.batch_size`, else 0;
                                               -1: held out, only evaluated
    item_target           int32 [N]            slot of the trained token within its row
    item_source           int32 [N]            slot of the trained token's parent in the tree; the
                                               parent's logits predict the token
    item_token            int32 [N]            the token id to predict: the id in the slot
                                               `item_target`, or the client's own target
    item_sequence         int32 [N]            the item's linear sequence: 0, 1, ...; the items of
                                               a sequence are contiguous, in order, in one row
    item_trajectory       int32 [N]            index into `trajectory_*`
    item_logprob          float32 [N]          the sampler's log-prob in nats; NaN for SFT, and for
                                               items that `gspo_token` leaves out of the ratio
    item_policy_step      int32 [N]            the step that sampled the token; -1: unknown, or
                                               not sampled
    item_weight           float32 [N]          the factor of the item's loss: for RL the advantage,
                                               for SFT the weight; in a pair 1
    item_rejected         bool [N]             whether the item is of a pair's rejected answer;
                                               False without pairs
    trajectory_group      int32 [T]            index into `group_*`
    trajectory_num_items  int32 [T]            number of the trajectory's items, over all rows
    trajectory_reward     float32 [T]          reward; NaN for SFT
    group_num_items       int32 [G]            number of the group's items, over all rows

If several trajectories share a slot, the slot has one item for each trajectory that trains the
slot's token. Equal arrays give a file with equal bytes.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from tandem.errors import InvalidInput
from tandem.spool import fs

FORMAT = 5
FILE = "arrays.npy"
LARGEST_BYTES = 2**31 - 1  # the size limit of a NumPy record
Int16 = NDArray[np.int16]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
Arrays = dict[str, NDArray[Any]]  # keyed by the array names in the module's docstring


@dataclass(frozen=True)
class PackedRow:
    """One row. `tokens`, `positions` and `subtree_end` have the shape [L], and `item_*` have the
    shape [items of the row]. The arrays are copies: they are writable, and stay valid after the
    batch is closed."""

    index: int
    num_tokens: int
    tokens: Int32
    positions: Int32
    subtree_end: Int32
    slot_experts: Int16
    item_target: Int32
    item_source: Int32
    item_token: Int32
    item_sequence: Int32
    item_trajectory: Int32
    item_logprob: Float32
    item_policy_step: Int32
    item_weight: Float32
    item_rejected: Bool


_ROW_SLOTS = ("tokens", "positions", "subtree_end", "slot_experts")
_ROW_ITEMS = tuple(field.name for field in fields(PackedRow) if field.name.startswith("item_"))
# The fields of the record. The widest types come first, so that every array is aligned.
_FIELDS = (
    "format",
    "vocab_size",
    "item_offsets",
    "tokens",
    "positions",
    "subtree_end",
    "row_num_tokens",
    "row_batch",
    *(name for name in _ROW_ITEMS if name != "item_rejected"),
    "trajectory_group",
    "trajectory_num_items",
    "trajectory_reward",
    "group_num_items",
    "slot_experts",
    "item_rejected",
)


def check_size(size: int) -> None:
    """Raises InvalidInput if packed arrays of `size` bytes exceed the limit of the file."""
    if size > LARGEST_BYTES:
        remedy = (
            "make several jobs of it, lower packing.sequence_length, or raise optimizer.batch_size"
        )
        raise InvalidInput(
            f"packed, the job has {size / 2**30:.1f} GiB, and at most 2 are possible; {remedy}"
        )


def write_packed(out: Path, arrays: Arrays, *, vocab_size: int) -> str:
    """Writes the arrays as a packed directory. Returns the file's SHA-256 in lower-case hex. Raises
    InvalidInput if the arrays are too large. Raises SpoolUnusable if the volume can't take the
    file; `out` may then hold a part of the file.

    Args:
        out: the directory, which is made if absent and must not hold the file yet. The caller
            commits the directory by renaming it.
        arrays: the arrays of the module's table, keyed by their names.
        vocab_size: the model's vocabulary size, which is written beside the arrays.
    """
    arrays = {
        "format": np.array(FORMAT, np.int64),
        "vocab_size": np.array(vocab_size, np.int64),
    } | arrays
    check_size(sum(arrays[name].nbytes for name in _FIELDS))
    dtype = np.dtype([(name, arrays[name].dtype, arrays[name].shape) for name in _FIELDS])
    with fs.volume_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        with (out / FILE).open("xb") as file:
            # NumPy's own writer would need a second copy of all arrays in memory.
            header = {"descr": dtype.descr, "fortran_order": False, "shape": ()}
            npy.write_array_header_1_0(file, header)  # type: ignore[no-untyped-call]
            for name in _FIELDS:
                file.write(np.ascontiguousarray(arrays[name]).data)
        return fs.sha256_file(out / FILE)


class PackedBatch(AbstractContextManager["PackedBatch"]):
    """A packed directory, memory-mapped for reading. The arrays of slots and items stay on disk;
    the smaller arrays are read into memory. After the `with` block or `close()` the file is no
    longer mapped, so the directory can be removed on any file system."""

    def __init__(self, path: Path, arrays: Arrays) -> None:
        self.path = path
        self.sequence_length: int = arrays["tokens"].shape[1]
        self.row_num_tokens: Int32 = np.array(arrays["row_num_tokens"])
        self.row_batch: Int32 = np.array(arrays["row_batch"])
        self.item_offsets: Int64 = np.array(arrays["item_offsets"])
        self.trajectory_group: Int32 = np.array(arrays["trajectory_group"])
        self.trajectory_num_items: Int32 = np.array(arrays["trajectory_num_items"])
        self.trajectory_reward: Float32 = np.array(arrays["trajectory_reward"])
        self.group_num_items: Int32 = np.array(arrays["group_num_items"])
        # The mapped arrays by name; empty after `close`.
        self._maps = {name: arrays[name] for name in (*_ROW_SLOTS, *_ROW_ITEMS)}

    @classmethod
    def open(cls, path: Path, sha256: str | None = None) -> Self:
        """Maps a packed directory. Raises InvalidInput if the file is missing, has another format,
        or does not have the SHA-256 `sha256`."""
        try:
            altered = sha256 not in (None, fs.sha256_file(path / FILE))
        except FileNotFoundError as exc:
            problem = f"there is no {FILE}: the job has ended; submit it again"
            raise InvalidInput(f"packed data in {path}: {problem}", field=FILE) from exc
        if altered:
            raise InvalidInput(
                f"packed data in {path} was altered (its sha256 differs); submit the job again"
            )
        record = npy.open_memmap(path / FILE, mode="r")  # type: ignore[no-untyped-call]
        if record["format"] != FORMAT:
            problem = (
                f"format {record['format']} is not {FORMAT}: controller and trainer must be of the"
                " same version"
            )
            raise InvalidInput(f"packed data in {path}: {problem}", field=FILE)
        return cls(path, {name: record[name] for name in _FIELDS})

    def __len__(self) -> int:
        return len(self.row_num_tokens)

    def row(self, index: int) -> PackedRow:
        """The row `index`, from 0 to the number of rows - 1. Raises IndexError for another index,
        and ValueError if the batch is closed."""
        if not self._maps:
            raise ValueError(f"packed data in {self.path} is closed")
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        items = slice(int(self.item_offsets[index]), int(self.item_offsets[index + 1]))
        slots = {name: np.array(self._maps[name][index]) for name in _ROW_SLOTS}
        columns = {name: np.array(self._maps[name][items]) for name in _ROW_ITEMS}
        return PackedRow(
            index=index, num_tokens=int(self.row_num_tokens[index]), **slots, **columns
        )

    def close(self) -> None:
        """Closes the memory map of the file. Calling `close` again does nothing."""
        self._maps.clear()

    def __exit__(self, *exc_info: object) -> None:
        self.close()
