"""The packed format: the files in a job's data directory, their writer and their reader.

One `<array>.npy` for each array, and `meta.json`. With R rows of L slots, N items, T trajectories and G groups:

| array | shape | meaning |
|---|---|---|
| `tokens` | int32 [R, L] | token ids; padding is 0 |
| `positions` | int32 [R, L] | depth in the tree = RoPE position; padding is 0 |
| `subtree_end` | int32 [R, L] | query q may attend to key k exactly when `k <= q < subtree_end[k]`; padding: own + 1 |
| `row_num_tokens` | int32 [R] | slots in use; padding is at the end of a row |
| `item_offsets` | int64 [R + 1] | items of row r are `item_offsets[r] : item_offsets[r + 1]` |
| `item_target` | int32 [N] | slot, within its row, of the trained token |
| `item_source` | int32 [N] | slot of the token before it in the tree, whose logits predict it |
| `item_sequence` | int32 [N] | its linear sequence: 0, 1, ...; its items are contiguous, in order, in one row |
| `item_trajectory` | int32 [N] | index into `trajectory_*` |
| `item_logprob` | float32 [N] | the sampler's log-prob in nats; NaN for SFT |
| `item_advantage` | float32 [N] | advantage; the example's weight for SFT |
| `trajectory_group` | int32 [T] | index into `group_*` |
| `trajectory_num_items` | int32 [T] | items that train this trajectory, over all rows |
| `trajectory_reward` | float32 [T] | reward; NaN for SFT |
| `group_num_items` | int32 [G] | items of the group, over all rows |

A slot that several trajectories share has one item for each of them. The same arrays give the same bytes.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tandem.errors import InvalidInput, SpoolUnusable
from tandem.spool import fs

FORMAT = 1
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
    item_target: Int32
    item_source: Int32
    item_sequence: Int32
    item_trajectory: Int32
    item_logprob: Float32
    item_advantage: Float32


_ROW_SLOTS = ("tokens", "positions", "subtree_end")
_ROW_ITEMS = ("item_target", "item_source", "item_sequence", "item_trajectory", "item_logprob", "item_advantage")
_TRAJECTORIES = ("trajectory_group", "trajectory_num_items", "trajectory_reward")
# The arrays by dimensions: the letters of the table, and O for R + 1.
_ARRAYS = {"RL": _ROW_SLOTS, "R": ("row_num_tokens",), "O": ("item_offsets",), "N": _ROW_ITEMS, "T": _TRAJECTORIES,
           "G": ("group_num_items",)}  # fmt: skip
_NAMES = tuple(name for names in _ARRAYS.values() for name in names)
_DTYPES: dict[str, type[np.generic]] = dict.fromkeys(_NAMES, np.int32) | {
    "item_offsets": np.int64, "item_logprob": np.float32, "item_advantage": np.float32, "trajectory_reward": np.float32
}  # fmt: skip
# The sizes in meta.json, by the letters of the table.
_SIZES = {"R": "num_rows", "L": "sequence_length", "N": "num_items", "T": "num_trajectories", "G": "num_groups"}
_META_KEYS = {"format", "vocab_size", *_SIZES.values()}


def write_packed(out: Path, arrays: Arrays, *, vocab_size: int) -> None:
    """Writes `arrays` into the directory `out`, which is made if absent and must hold none of these files yet.

    InvalidInput (field: the file) if the arrays contradict the format; SpoolUnusable if the volume can't take them, and
    then `out` may hold some of the files. The caller commits `out` by renaming it.
    """
    rows, length = arrays["tokens"].shape
    meta = {
        "format": FORMAT, "vocab_size": vocab_size, "num_rows": rows, "sequence_length": length,
        "num_items": len(arrays["item_target"]), "num_trajectories": len(arrays["trajectory_group"]),
        "num_groups": len(arrays["group_num_items"]),
    }  # fmt: skip
    _check(arrays, meta, out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in _NAMES:
            with (out / f"{name}.npy").open("xb") as file:
                np.save(file, np.ascontiguousarray(arrays[name]), allow_pickle=False)
        (out / "meta.json").write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n")
    except OSError as exc:
        problem = f"could not write the packed data into {out}: {exc.strerror or exc}"
        raise SpoolUnusable(f"{problem}; check that the volume is writable and has space") from exc


def digest(path: Path) -> str:
    """SHA-256 of the SHA-256 of each file in a packed directory, in the order of their names; lower-case hex."""
    total = hashlib.sha256()
    for file in sorted(path.iterdir()):
        total.update(bytes.fromhex(fs.sha256_file(file)))
    return total.hexdigest()


class PackedBatch(AbstractContextManager["PackedBatch"]):
    """A packed directory, memory-mapped. Slots and items stay on disk; the small arrays are read into memory.

    Use it as a context manager or call `close()`. Then the process maps none of these files, so that the directory can
    be removed on any file system (R18).
    """

    def __init__(self, path: Path, meta: dict[str, int], arrays: Arrays) -> None:
        self.path = path
        self.num_rows = meta["num_rows"]
        self.sequence_length = meta["sequence_length"]
        self.num_items = meta["num_items"]
        self.num_trajectories = meta["num_trajectories"]
        self.num_groups = meta["num_groups"]
        self.row_num_tokens: Int32 = np.array(arrays["row_num_tokens"])
        self.item_offsets: Int64 = np.array(arrays["item_offsets"])
        self.trajectory_group: Int32 = np.array(arrays["trajectory_group"])
        self.trajectory_num_items: Int32 = np.array(arrays["trajectory_num_items"])
        self.trajectory_reward: Float32 = np.array(arrays["trajectory_reward"])
        self.group_num_items: Int32 = np.array(arrays["group_num_items"])
        self._maps = {name: arrays[name] for name in (*_ROW_SLOTS, *_ROW_ITEMS)}  # empty: closed

    @classmethod
    def open(cls, path: Path, sha256: str | None = None) -> Self:
        """Maps and checks a packed directory.

        InvalidInput (field: the file) if a file is missing, unreadable or contradicts the format. Reads all arrays
        once for that, so that a damaged directory can't make a rank index out of bounds later. `sha256`: what `digest`
        gave when it was written.
        """
        meta = _read_meta(path)
        arrays: Arrays = {}
        for name in _NAMES:
            file = path / f"{name}.npy"
            try:
                arrays[name] = np.load(file, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError) as exc:
                raise InvalidInput(f"packed data in {path}: can't read {file.name}: {exc}", field=file.name) from exc
        _check(arrays, meta, path)
        if sha256 not in (None, digest(path)):
            raise InvalidInput(f"packed data in {path} was altered (its sha256 differs); submit the job again")
        return cls(path, meta, arrays)

    def __len__(self) -> int:
        return self.num_rows

    def row(self, index: int) -> PackedRow:
        """Row `index` in [0, len)."""
        if not self._maps:
            raise ValueError(f"packed data in {self.path} is closed")
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self.num_rows}")
        items = slice(int(self.item_offsets[index]), int(self.item_offsets[index + 1]))
        slots = {name: np.array(self._maps[name][index]) for name in _ROW_SLOTS}
        columns = {name: np.array(self._maps[name][items]) for name in _ROW_ITEMS}
        return PackedRow(index=index, num_tokens=int(self.row_num_tokens[index]), **slots, **columns)

    def close(self) -> None:
        """Drops every map. May be called again."""
        self._maps.clear()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _read_meta(path: Path) -> dict[str, int]:
    try:
        meta = json.loads((path / "meta.json").read_text())
    except (OSError, ValueError) as exc:
        raise InvalidInput(f"packed data in {path}: can't read meta.json: {exc}", field="meta.json") from exc
    if not isinstance(meta, dict) or set(meta) != _META_KEYS or not all(type(value) is int for value in meta.values()):
        problem = f"meta.json must hold the integers {sorted(_META_KEYS)}"
    elif meta["format"] != FORMAT:
        problem = f"format {meta['format']} is not {FORMAT}: controller and trainer must be of the same version"
    else:
        return meta
    raise InvalidInput(f"packed data in {path}: {problem}", field="meta.json")


def _check(arrays: Arrays, meta: dict[str, int], path: Path) -> None:
    """InvalidInput (field: the file) if the arrays contradict the format. Takes a few passes over the arrays."""
    for rules in (_shapes(arrays, meta), _rows(arrays, meta), _items(arrays), _trajectories(arrays, meta)):
        for holds, name, problem in rules:
            if not holds:
                raise InvalidInput(f"packed data in {path}: {problem}", field=f"{name}.npy")


# Each rule may rely on those before it: whether it holds, the array at fault if not, and what is wrong then.
Rules = Iterator[tuple[bool | np.bool, str, str]]


def _shapes(arrays: Arrays, meta: dict[str, int]) -> Rules:
    sizes = {letter: meta[key] for letter, key in _SIZES.items()} | {"O": meta["num_rows"] + 1}
    for letters, names in _ARRAYS.items():
        shape = tuple(sizes[letter] for letter in letters)
        for name in names:
            array, dtype = arrays[name], np.dtype(_DTYPES[name])
            right = array.shape == shape and array.dtype == dtype
            yield right, name, f"{name} is {array.dtype} {list(array.shape)}, expected {dtype} {list(shape)}"
            yield array.size > 0, name, f"{name} is empty"
    yield sizes["L"] >= 2, "tokens", f"rows of {sizes['L']} slots can't hold an item"


def _rows(arrays: Arrays, meta: dict[str, int]) -> Rules:
    tokens, positions, subtree_end = (arrays[name] for name in _ROW_SLOTS)
    used, offsets, length = arrays["row_num_tokens"], arrays["item_offsets"], meta["sequence_length"]
    slot = np.arange(length)
    yield used.min() >= 0 and used.max() <= length, "row_num_tokens", "a row uses more slots than it has"
    in_vocabulary = tokens.min() >= 0 and tokens.max() < meta["vocab_size"]
    yield in_vocabulary, "tokens", f"a token id is outside the vocabulary [0, {meta['vocab_size']})"
    yield ((positions >= 0) & (positions <= slot)).all(), "positions", "a position is outside its row"
    limit = np.where(slot < used[:, None], used[:, None], slot + 1)
    yield ((subtree_end > slot) & (subtree_end <= limit)).all(), "subtree_end", "a subtree leaves its row"
    rising = offsets[0] == 0 and offsets[-1] == meta["num_items"] and (np.diff(offsets) >= 0).all()
    yield rising, "item_offsets", f"offsets must rise from 0 to {meta['num_items']}"


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


def _trajectories(arrays: Arrays, meta: dict[str, int]) -> Rules:
    trajectory, group = arrays["item_trajectory"], arrays["trajectory_group"]
    trajectories, groups = meta["num_trajectories"], meta["num_groups"]
    yield trajectory.min() >= 0 and trajectory.max() < trajectories, "item_trajectory", "an unknown trajectory"
    yield group.min() >= 0 and group.max() < groups, "trajectory_group", "an unknown group"
    counts = np.bincount(trajectory, minlength=trajectories)
    yield (counts == arrays["trajectory_num_items"]).all(), "trajectory_num_items", "counts differ from items"
    counts = np.bincount(group[trajectory], minlength=groups)
    yield (counts == arrays["group_num_items"]).all(), "group_num_items", "counts differ from items"
