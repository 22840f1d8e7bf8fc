"""The packed format: the file in a job's data directory, its writer and its reader.

`arrays.npy` is one record in NumPy's own format, so `np.load(file, mmap_mode="r")["tokens"]` reads an array. Its fields
are `format`, `vocab_size` (both int64 []) and the arrays. With R rows of L slots, N items, T trajectories and G groups:

| array | shape | meaning |
|---|---|---|
| `item_offsets` | int64 [R + 1] | items of row r are `item_offsets[r] : item_offsets[r + 1]` |
| `tokens` | int32 [R, L] | token ids; padding is 0 |
| `positions` | int32 [R, L] | depth in the tree = RoPE position; padding is 0 |
| `subtree_end` | int32 [R, L] | query q may attend to key k exactly when `k <= q < subtree_end[k]`; padding: own + 1 |
| `slot_experts` | int16 [R, L, M, K] | the sampler's K experts in each of M layers, or -1; M = K = 0: all unknown |
| `row_num_tokens` | int32 [R] | slots in use; padding is at the end of a row |
| `row_batch` | int32 [R] | the row's batch with `optimizer.batch_size`, else 0; -1: held out, only evaluated |
| `item_target` | int32 [N] | slot, within its row, of the trained token |
| `item_source` | int32 [N] | slot of the token before it in the tree, whose logits predict it |
| `item_token` | int32 [N] | the trained token; what stands in the slot, unless the client gave other targets |
| `item_sequence` | int32 [N] | its linear sequence: 0, 1, ...; its items are contiguous, in order, in one row |
| `item_trajectory` | int32 [N] | index into `trajectory_*` |
| `item_logprob` | float32 [N] | the sampler's log-prob in nats; NaN for SFT |
| `item_advantage` | float32 [N] | advantage; for SFT the item's weight; in a pair 1 (chosen) or -1 (rejected) |
| `trajectory_group` | int32 [T] | index into `group_*` |
| `trajectory_num_items` | int32 [T] | items that train this trajectory, over all rows |
| `trajectory_reward` | float32 [T] | reward; NaN for SFT |
| `group_num_items` | int32 [G] | items of the group, over all rows |

A slot that several trajectories share has one item for each of them. The same arrays give the same bytes.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from tandem.errors import InvalidInput
from tandem.spool import fs

FORMAT = 3
FILE = "arrays.npy"
Int16 = NDArray[np.int16]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Arrays = dict[str, NDArray[Any]]  # by the names in the table


@dataclass(frozen=True)
class PackedRow:
    """One row: `tokens`, `positions` and `subtree_end` are [L], `item_*` are [items of the row].

    The arrays are copies: writable, and valid after the batch is closed.
    """

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
    item_advantage: Float32


_ROW_SLOTS = ("tokens", "positions", "subtree_end")
_ROW_ITEMS = (
    "item_target", "item_source", "item_token", "item_sequence", "item_trajectory", "item_logprob", "item_advantage"
)  # fmt: skip
_TRAJECTORIES = ("trajectory_group", "trajectory_num_items", "trajectory_reward")
# The arrays by dimensions: the letters of the table, and O for R + 1.
_ARRAYS = {"RL": _ROW_SLOTS, "RLMK": ("slot_experts",), "R": ("row_num_tokens", "row_batch"), "O": ("item_offsets",),
           "N": _ROW_ITEMS, "T": _TRAJECTORIES, "G": ("group_num_items",)}  # fmt: skip
_NAMES = tuple(name for names in _ARRAYS.values() for name in names)
_DTYPES: dict[str, type[np.generic]] = dict.fromkeys(_NAMES, np.int32) | {
    "item_offsets": np.int64, "item_logprob": np.float32, "item_advantage": np.float32, "trajectory_reward": np.float32,
    "slot_experts": np.int16,
}  # fmt: skip
# The widest first, so that all are aligned.
_FIELDS = ("format", "vocab_size", *sorted(_NAMES, key=lambda name: -np.dtype(_DTYPES[name]).itemsize))
_HEAD = [("format", "<i8"), ("vocab_size", "<i8")]


def write_packed(out: Path, arrays: Arrays, *, vocab_size: int) -> None:
    """Writes `arrays` into the directory `out`, which is made if absent and must not hold the file yet.

    InvalidInput (field: the array) if the arrays contradict the format; SpoolUnusable if the volume can't take them,
    and then `out` may hold a part of the file. The caller commits `out` by renaming it.
    """
    _check(arrays, vocab_size, out)
    fields = {"format": np.array(FORMAT, np.int64), "vocab_size": np.array(vocab_size, np.int64)} | arrays
    dtype = np.dtype([(name, fields[name].dtype, fields[name].shape) for name in _FIELDS])
    with fs.volume_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        with (out / FILE).open("xb") as file:
            # NumPy's writer would need all arrays in memory a second time.
            header = {"descr": dtype.descr, "fortran_order": False, "shape": ()}
            npy.write_array_header_1_0(file, header)  # type: ignore[no-untyped-call]
            for name in _FIELDS:
                file.write(np.ascontiguousarray(fields[name]).data)


def digest(path: Path) -> str:
    """SHA-256 of the file in a packed directory, lower-case hex."""
    return fs.sha256_file(path / FILE)


class PackedBatch(AbstractContextManager["PackedBatch"]):
    """A packed directory, memory-mapped. Slots and items stay on disk; the small arrays are read into memory.

    Use it as a context manager or call `close()`. Then the process does not map the file, so that the directory can
    be removed on any file system (R18).
    """

    def __init__(self, path: Path, arrays: Arrays) -> None:
        self.path = path
        self.sequence_length: int = arrays["tokens"].shape[1]
        self.num_items = len(arrays["item_target"])
        self.num_trajectories = len(arrays["trajectory_group"])
        self.num_groups = len(arrays["group_num_items"])
        self.row_num_tokens: Int32 = np.array(arrays["row_num_tokens"])
        self.row_batch: Int32 = np.array(arrays["row_batch"])
        self.item_offsets: Int64 = np.array(arrays["item_offsets"])
        self.trajectory_group: Int32 = np.array(arrays["trajectory_group"])
        self.trajectory_num_items: Int32 = np.array(arrays["trajectory_num_items"])
        self.trajectory_reward: Float32 = np.array(arrays["trajectory_reward"])
        self.group_num_items: Int32 = np.array(arrays["group_num_items"])
        self._maps = {name: arrays[name] for name in (*_ROW_SLOTS, "slot_experts", *_ROW_ITEMS)}  # empty: closed

    @classmethod
    def open(cls, path: Path, sha256: str | None = None) -> Self:
        """Maps and checks a packed directory.

        InvalidInput (field: the file, or the array that contradicts the format). Reads all arrays once for that, so
        that a damaged file can't make a rank index out of bounds later. `sha256`: what `digest` gave when it was
        written.
        """
        fields = _map(path)
        _check(fields, int(fields["vocab_size"]), path)
        if sha256 not in (None, digest(path)):
            raise InvalidInput(f"packed data in {path} was altered (its sha256 differs); submit the job again")
        return cls(path, fields)

    def __len__(self) -> int:
        return len(self.row_num_tokens)

    def row(self, index: int) -> PackedRow:
        """Row `index` in [0, len)."""
        if not self._maps:
            raise ValueError(f"packed data in {self.path} is closed")
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        items = slice(int(self.item_offsets[index]), int(self.item_offsets[index + 1]))
        slots = {name: np.array(self._maps[name][index]) for name in (*_ROW_SLOTS, "slot_experts")}
        columns = {name: np.array(self._maps[name][items]) for name in _ROW_ITEMS}
        return PackedRow(index=index, num_tokens=int(self.row_num_tokens[index]), **slots, **columns)

    def close(self) -> None:
        """Drops every map. May be called again."""
        self._maps.clear()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _map(path: Path) -> Arrays:
    """The fields of the file, memory-mapped."""
    try:
        record = npy.open_memmap(path / FILE, mode="r")  # type: ignore[no-untyped-call]
    except FileNotFoundError as exc:
        problem = f"there is no {FILE}: the job is of another version of Tandem, or has ended; submit it again"
        raise InvalidInput(f"packed data in {path}: {problem}", field=FILE) from exc
    except Exception as exc:  # NumPy raises errors of many types for a damaged header
        raise InvalidInput(f"packed data in {path}: can't read {FILE}: {exc}", field=FILE) from exc
    if record.shape or record.dtype.descr[:2] != _HEAD:
        problem = f"{FILE} is not a record of arrays"
    elif record["format"] != FORMAT:
        problem = f"format {record['format']} is not {FORMAT}: controller and trainer must be of the same version"
    elif record.dtype.names != _FIELDS:
        problem = f"{FILE} must hold {', '.join(_FIELDS)}"
    else:
        return {name: record[name] for name in _FIELDS}
    raise InvalidInput(f"packed data in {path}: {problem}", field=FILE)


def _check(arrays: Arrays, vocab_size: int, path: Path) -> None:
    """InvalidInput (field: the array) if the arrays contradict the format. Takes a few passes over the arrays."""
    for rules in (_shapes(arrays), _rows(arrays, vocab_size), _items(arrays), _trajectories(arrays)):
        for holds, name, problem in rules:
            if not holds:
                raise InvalidInput(f"packed data in {path}: {problem}", field=name)


# Each rule may rely on those before it: whether it holds, the array at fault if not, and what is wrong then.
Rules = Iterator[tuple[bool | np.bool, str, str]]


def _shapes(arrays: Arrays) -> Rules:
    sizes: dict[str, int] = {}
    for letters in ("RLMK", "RL", "N", "T", "G"):
        sizes |= zip(letters, arrays[_ARRAYS[letters][0]].shape, strict=False)
    sizes["O"] = sizes.get("R", 0) + 1
    for letters, names in _ARRAYS.items():
        shape = [sizes.get(letter) for letter in letters]
        for name in names:
            array, dtype = arrays[name], np.dtype(_DTYPES[name])
            if list(array.shape) != shape or array.dtype != dtype:  # only then, because dtypes take long to print
                yield False, name, f"{name} is {array.dtype} {list(array.shape)}, expected {dtype} {shape}"
            yield array.size > 0 or letters == "RLMK", name, f"{name} is empty"
    yield sizes["L"] >= 2, "tokens", f"rows of {sizes['L']} slots can't hold an item"


def _rows(arrays: Arrays, vocab_size: int) -> Rules:
    tokens, positions, subtree_end = (arrays[name] for name in _ROW_SLOTS)
    used, offsets, items = arrays["row_num_tokens"], arrays["item_offsets"], len(arrays["item_target"])
    length = tokens.shape[1]
    slot = np.arange(length)
    yield used.min() >= 0 and used.max() <= length, "row_num_tokens", "a row uses more slots than it has"
    in_vocabulary = tokens.min() >= 0 and tokens.max() < vocab_size
    yield in_vocabulary, "tokens", f"a token id is outside the vocabulary [0, {vocab_size})"
    yield ((positions >= 0) & (positions <= slot)).all(), "positions", "a position is outside its row"
    yield (arrays["slot_experts"] >= -1).all(), "slot_experts", "an expert's number is below -1"
    limit = np.where(slot < used[:, None], used[:, None], slot + 1)
    yield ((subtree_end > slot) & (subtree_end <= limit)).all(), "subtree_end", "a subtree leaves its row"
    rising = offsets[0] == 0 and offsets[-1] == items and (np.diff(offsets) >= 0).all()
    yield rising, "item_offsets", f"offsets must rise from 0 to {items}"
    trained = np.unique(arrays["row_batch"][arrays["row_batch"] >= 0])
    numbered = arrays["row_batch"].min() >= -1 and np.array_equal(trained, np.arange(len(trained)))
    yield numbered and len(trained) > 0, "row_batch", "batches are not numbered 0, 1, ..., or -1 for held-out rows"
    in_vocabulary = arrays["item_token"].min() >= 0 and arrays["item_token"].max() < vocab_size
    yield in_vocabulary, "item_token", f"a trained token's id is outside the vocabulary [0, {vocab_size})"


def _items(arrays: Arrays) -> Rules:
    positions, subtree_end, used = arrays["positions"], arrays["subtree_end"], arrays["row_num_tokens"]
    target, source, sequence = arrays["item_target"], arrays["item_source"], arrays["item_sequence"]
    row = np.repeat(np.arange(len(used)), np.diff(arrays["item_offsets"]))
    yield ((target >= 0) & (target < used[row])).all(), "item_target", "an item trains a slot that is padding"
    yield ((source >= 0) & (source < target)).all(), "item_source", "an item's source is not before its target"
    linked = (subtree_end[row, source] > target) & (positions[row, source] + 1 == positions[row, target])
    yield linked.all(), "item_source", "an item's source is not the token before its target in the tree"
    step = np.diff(sequence)
    yield sequence[0] == 0 and np.isin(step, (0, 1)).all(), "item_sequence", "sequences are not in order"
    yield (step[np.diff(row) > 0] == 1).all(), "item_sequence", "a sequence is split over rows"
    yield (np.diff(target)[step == 0] > 0).all(), "item_target", "a sequence's items are not in order"
    same_trajectory = np.diff(arrays["item_trajectory"])[step == 0] == 0
    yield same_trajectory.all(), "item_trajectory", "a sequence belongs to two trajectories"
    yield np.isfinite(arrays["item_advantage"]).all(), "item_advantage", "an advantage is not finite"
    yield not np.isinf(arrays["item_logprob"]).any(), "item_logprob", "a log-prob is infinite"


def _trajectories(arrays: Arrays) -> Rules:
    trajectory, group = arrays["item_trajectory"], arrays["trajectory_group"]
    trajectories, groups = len(group), len(arrays["group_num_items"])
    yield trajectory.min() >= 0 and trajectory.max() < trajectories, "item_trajectory", "an unknown trajectory"
    yield group.min() >= 0 and group.max() < groups, "trajectory_group", "an unknown group"
    counts = np.bincount(trajectory, minlength=trajectories)
    yield (counts == arrays["trajectory_num_items"]).all(), "trajectory_num_items", "counts differ from items"
    counts = np.bincount(group[trajectory], minlength=groups)
    yield (counts == arrays["group_num_items"]).all(), "group_num_items", "counts differ from items"
