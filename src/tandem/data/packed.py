"""The packed format: what a job's data directory holds, its writer and its reader.

One `.npy` file per array, named as the fields of `PackedArrays`, and `meta.json`. With R rows of L slots, N items,
T trajectories and G groups:

| array | shape | meaning |
|---|---|---|
| `tokens` | int32 [R, L] | token ids; padding is 0 |
| `positions` | int32 [R, L] | depth in the tree = RoPE position; padding is 0 |
| `subtree_end` | int32 [R, L] | query q may attend to key k exactly when `k <= q < subtree_end[k]`; padding: own + 1 |
| `row_num_tokens` | int32 [R] | slots in use; padding is at the end of a row |
| `item_offsets` | int64 [R + 1] | items of row r are `item_offsets[r] : item_offsets[r + 1]` |
| `item_target` | int32 [N] | slot, within its row, of the trained token |
| `item_source` | int32 [N] | slot of the token before it in the tree: whose logits predict it |
| `item_sequence` | int32 [N] | the linear sequence: 0, 1, ...; its items are contiguous, in order, in one row |
| `item_trajectory` | int32 [N] | index into `trajectory_*` |
| `item_logprob` | float32 [N] | the sampler's log-prob in nats; NaN for SFT |
| `item_advantage` | float32 [N] | advantage; the example's weight for SFT |
| `trajectory_group` | int32 [T] | index into `group_*` |
| `trajectory_num_items` | int32 [T] | items that train this trajectory, over all rows |
| `trajectory_reward` | float32 [T] | reward; NaN for SFT |
| `group_num_items` | int32 [G] | items of the group, over all rows |

A slot that several trajectories share carries one item for each of them. The same arrays give the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tandem.errors import InvalidInput, SpoolUnusable

FORMAT = 1
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class PackedArrays:
    """Every array of a packed batch in memory; shapes and dtypes as in the module's table."""

    tokens: Int32
    positions: Int32
    subtree_end: Int32
    row_num_tokens: Int32
    item_offsets: Int64
    item_target: Int32
    item_source: Int32
    item_sequence: Int32
    item_trajectory: Int32
    item_logprob: Float32
    item_advantage: Float32
    trajectory_group: Int32
    trajectory_num_items: Int32
    trajectory_reward: Float32
    group_num_items: Int32


@dataclass(frozen=True)
class PackedRow:
    """One row, copied out of the maps: `tokens`, `positions`, `subtree_end` are [L], `item_*` are [items of the row].

    The arrays are the caller's own and writable; they stay valid after the batch is closed.
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
_NAMES = tuple(field.name for field in fields(PackedArrays))
_DTYPES: dict[str, type[np.generic]] = {
    name: np.float32 if name in ("item_logprob", "item_advantage", "trajectory_reward") else np.int32 for name in _NAMES
} | {"item_offsets": np.int64}


def write_packed(out: Path, arrays: PackedArrays, *, vocab_size: int) -> None:
    """Write `arrays` into the directory `out`, which is made if it is absent and must hold nothing of the same name.

    Raises InvalidInput (field: the array) where the arrays contradict the format, SpoolUnusable when the volume
    can't take them; then nothing is promised about what `out` holds. The caller commits `out` by renaming it.
    """
    contents = {name: np.ascontiguousarray(getattr(arrays, name)) for name in _NAMES}
    meta = {
        "format": FORMAT,
        "vocab_size": vocab_size,
        "num_rows": arrays.tokens.shape[0],
        "sequence_length": arrays.tokens.shape[1],
        "num_items": arrays.item_target.shape[0],
        "num_trajectories": arrays.trajectory_group.shape[0],
        "num_groups": arrays.group_num_items.shape[0],
    }
    _check(contents, meta, out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, array in contents.items():
            with (out / f"{name}.npy").open("xb") as file:
                np.save(file, array, allow_pickle=False)
        (out / "meta.json").write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n")
    except OSError as exc:
        raise SpoolUnusable(
            f"could not write the packed data into {out}: {exc.strerror or exc}; "
            "check that the volume is writable and has space"
        ) from exc


class PackedBatch:
    """A packed directory, memory-mapped. `rows` and `items` stay on disk; the small tables are read into memory.

    Use it as a context manager or call `close()`: afterwards no map of these files is left in the process, so that the
    directory can be removed on any file system (R18).
    """

    def __init__(self, path: Path, meta: dict[str, int], arrays: dict[str, NDArray[Any]]) -> None:
        self.path = path
        self.vocab_size = meta["vocab_size"]
        self.num_rows = meta["num_rows"]
        self.sequence_length = meta["sequence_length"]
        self.num_items = meta["num_items"]
        self.num_trajectories = meta["num_trajectories"]
        self.num_groups = meta["num_groups"]
        self.row_num_tokens: Int32 = np.array(arrays.pop("row_num_tokens"))
        self.item_offsets: Int64 = np.array(arrays.pop("item_offsets"))
        self.trajectory_group: Int32 = np.array(arrays.pop("trajectory_group"))
        self.trajectory_num_items: Int32 = np.array(arrays.pop("trajectory_num_items"))
        self.trajectory_reward: Float32 = np.array(arrays.pop("trajectory_reward"))
        self.group_num_items: Int32 = np.array(arrays.pop("group_num_items"))
        self.num_sequences = int(arrays["item_sequence"][-1]) + 1
        self._maps = arrays
        self._closed = False

    @classmethod
    def open(cls, path: Path) -> PackedBatch:
        """Map and check a packed directory.

        Raises InvalidInput whose `field` is the file that is missing, unreadable or contradicts the format. All
        arrays are read once for that, so that a damaged directory can't make a rank index out of bounds later.
        """
        meta = _read_meta(path)
        arrays: dict[str, NDArray[Any]] = {}
        for name in _NAMES:
            file = path / f"{name}.npy"
            try:
                arrays[name] = np.load(file, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError) as exc:
                raise InvalidInput(f"packed data in {path}: can't read {file.name}: {exc}", field=file.name) from exc
        _check(arrays, meta, path)
        return cls(path, meta, arrays)

    def __len__(self) -> int:
        return self.num_rows

    def row(self, index: int) -> PackedRow:
        """Row `index` in [0, len)."""
        if self._closed:
            raise ValueError(f"packed data in {self.path} is closed")
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self.num_rows}")
        items = slice(int(self.item_offsets[index]), int(self.item_offsets[index + 1]))
        slots = {name: np.array(self._maps[name][index]) for name in _ROW_SLOTS}
        columns = {name: np.array(self._maps[name][items]) for name in _ROW_ITEMS}
        return PackedRow(index=index, num_tokens=int(self.row_num_tokens[index]), **slots, **columns)

    def close(self) -> None:
        """Drop every map. Calling it again does nothing."""
        self._maps.clear()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_meta(path: Path) -> dict[str, int]:
    keys = {"format", "vocab_size", "num_rows", "sequence_length", "num_items", "num_trajectories", "num_groups"}
    try:
        meta = json.loads((path / "meta.json").read_text())
    except (OSError, ValueError) as exc:
        raise InvalidInput(f"packed data in {path}: can't read meta.json: {exc}", field="meta.json") from exc
    if not isinstance(meta, dict) or set(meta) != keys or not all(type(value) is int for value in meta.values()):
        raise InvalidInput(f"packed data in {path}: meta.json must hold the integers {sorted(keys)}", field="meta.json")
    if meta["format"] != FORMAT:
        raise InvalidInput(
            f"packed data in {path} has format {meta['format']}, this program reads {FORMAT}: "
            "controller and trainer must be of the same version",
            field="meta.json",
        )
    return meta


def _check(arrays: dict[str, NDArray[Any]], meta: dict[str, int], path: Path) -> None:
    """Everything a reader relies on. Vectorised; a few passes over the arrays."""
    rows, length, items = meta["num_rows"], meta["sequence_length"], meta["num_items"]
    trajectories, groups = meta["num_trajectories"], meta["num_groups"]

    def require(condition: bool | np.bool, name: str, what: str) -> None:
        if not condition:
            raise InvalidInput(f"packed data in {path}: {what}", field=f"{name}.npy")

    for name in _NAMES:
        shape: tuple[int, ...]
        if name in _ROW_SLOTS:
            shape = (rows, length)
        elif name in _ROW_ITEMS:
            shape = (items,)
        else:
            shape = {"row": (rows,), "item": (rows + 1,), "trajectory": (trajectories,), "group": (groups,)}[
                name.split("_")[0]
            ]
        array = arrays[name]
        require(
            array.shape == shape and array.dtype == _DTYPES[name],
            name,
            f"{name} is {array.dtype} {list(array.shape)}, expected {np.dtype(_DTYPES[name])} {list(shape)}",
        )
        require(array.size > 0, name, f"{name} is empty")
    require(length >= 2, "tokens", f"rows of {length} slots can't hold a trained token")

    tokens, positions, subtree_end = arrays["tokens"], arrays["positions"], arrays["subtree_end"]
    used, offsets = arrays["row_num_tokens"], arrays["item_offsets"]
    slot = np.arange(length)
    require(used.min() >= 0 and used.max() <= length, "row_num_tokens", "a row uses more slots than it has")
    require(
        tokens.min() >= 0 and tokens.max() < meta["vocab_size"],
        "tokens",
        f"a token id is outside the vocabulary [0, {meta['vocab_size']})",
    )
    require(bool(((positions >= 0) & (positions <= slot)).all()), "positions", "a position is outside its row")
    limit = np.where(slot < used[:, None], used[:, None], slot + 1)
    require(bool(((subtree_end > slot) & (subtree_end <= limit)).all()), "subtree_end", "a subtree leaves its row")
    require(
        bool(offsets[0] == 0 and offsets[-1] == items and (np.diff(offsets) >= 0).all()),
        "item_offsets",
        f"offsets must rise from 0 to {items}",
    )

    row = np.repeat(np.arange(rows), np.diff(offsets))
    target, source, sequence = arrays["item_target"], arrays["item_source"], arrays["item_sequence"]
    require(bool(((target >= 0) & (target < used[row])).all()), "item_target", "an item trains a slot that is padding")
    require(bool(((source >= 0) & (source < target)).all()), "item_source", "an item's source is not before its target")
    linked = (subtree_end[row, source] > target) & (positions[row, source] + 1 == positions[row, target])
    require(bool(linked.all()), "item_source", "an item's source is not the token before its target in the tree")
    step = np.diff(sequence)
    require(bool(sequence[0] == 0 and ((step == 0) | (step == 1)).all()), "item_sequence", "sequences are not in order")
    require(not bool((step[np.diff(row) > 0] == 0).any()), "item_sequence", "a sequence is split over rows")
    require(bool((np.diff(target)[step == 0] > 0).all()), "item_target", "a sequence's items are not in order")

    trajectory, group = arrays["item_trajectory"], arrays["trajectory_group"]
    require(trajectory.min() >= 0 and trajectory.max() < trajectories, "item_trajectory", "an unknown trajectory")
    require(not bool((np.diff(trajectory)[step == 0] != 0).any()), "item_trajectory", "a sequence of two trajectories")
    require(group.min() >= 0 and group.max() < groups, "trajectory_group", "an unknown group")
    counts = np.bincount(trajectory, minlength=trajectories)
    require(bool((counts == arrays["trajectory_num_items"]).all()), "trajectory_num_items", "counts differ from items")
    counts = np.bincount(group[trajectory], minlength=groups)
    require(bool((counts == arrays["group_num_items"]).all()), "group_num_items", "counts differ from items")
    require(bool(np.isfinite(arrays["item_advantage"]).all()), "item_advantage", "an advantage is not finite")
    require(not bool(np.isinf(arrays["item_logprob"]).any()), "item_logprob", "a log-prob is infinite")
