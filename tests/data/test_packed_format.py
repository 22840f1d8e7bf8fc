"""The packed format: round trip, refusal of damaged directories, release of the maps."""

import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tandem.data.packed_format import FILE, Arrays, PackedBatch, write_packed
from tandem.errors import InvalidInput, SpoolUnusable, VolumeFull


def small() -> Arrays:
    """Two rows of 8. Row 0: prompt 5 6 with completions 7 8 and 9 (slots 2-3 and 4). Row 1: 1 2 3, training 2 and 3."""
    i32, f32 = np.int32, np.float32
    return {
        "tokens": np.array([[5, 6, 7, 8, 9, 0, 0, 0], [1, 2, 3, 0, 0, 0, 0, 0]], i32),
        "positions": np.array([[0, 1, 2, 3, 2, 0, 0, 0], [0, 1, 2, 0, 0, 0, 0, 0]], i32),
        "subtree_end": np.array([[5, 5, 4, 4, 5, 6, 7, 8], [3, 3, 3, 4, 5, 6, 7, 8]], i32),
        "row_num_tokens": np.array([5, 3], i32),
        "row_batch": np.array([0, -1], i32),
        "slot_experts": np.arange(-1, 31, dtype=np.int16).reshape(2, 8, 1, 2),
        "item_offsets": np.array([0, 3, 5], np.int64),
        "item_target": np.array([2, 3, 4, 1, 2], i32),
        "item_source": np.array([1, 2, 1, 0, 1], i32),
        "item_token": np.array([7, 8, 9, 2, 3], i32),
        "item_sequence": np.array([0, 0, 1, 2, 2], i32),
        "item_trajectory": np.array([0, 0, 1, 2, 2], i32),
        "item_logprob": np.array([-1, -2, -3, -4, -5], f32),
        "item_advantage": np.array([1, 1, -1, 0.5, 0.5], f32),
        "trajectory_group": np.array([0, 0, 1], i32),
        "trajectory_num_items": np.array([2, 1, 2], i32),
        "trajectory_reward": np.array([1, 0, 0.5], f32),
        "group_num_items": np.array([3, 2], i32),
    }


def test_round_trip(tmp_path: Path) -> None:
    arrays = small()
    write_packed(tmp_path / "a", arrays, vocab_size=10)
    with PackedBatch.open(tmp_path / "a") as batch:
        assert (len(batch), batch.sequence_length, batch.num_items) == (2, 8, 5)
        assert batch.trajectory_num_items.tolist() == [2, 1, 2]
        row = batch.row(0)
        assert row.num_tokens == 5
        assert row.tokens.tolist() == arrays["tokens"][0].tolist()
        assert row.item_source.tolist() == [1, 2, 1]
        assert row.item_logprob.tolist() == [-1, -2, -3]
        assert batch.row(1).item_trajectory.tolist() == [2, 2]
        assert np.array_equal(batch.row(1).slot_experts, arrays["slot_experts"][1])
        with pytest.raises(IndexError):
            batch.row(2)


def test_without_experts(tmp_path: Path) -> None:
    write_packed(tmp_path / "a", small() | {"slot_experts": np.zeros((2, 8, 0, 0), np.int16)}, vocab_size=10)
    with PackedBatch.open(tmp_path / "a") as batch:
        assert batch.row(1).slot_experts.shape == (8, 0, 0)


def test_the_file_is_numpys_own_and_always_the_same(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_packed(tmp_path / name, small(), vocab_size=10)
        assert [path.name for path in (tmp_path / name).iterdir()] == [FILE]
    assert (tmp_path / "a" / FILE).read_bytes() == (tmp_path / "b" / FILE).read_bytes()
    record = np.load(tmp_path / "a" / FILE, mmap_mode="r", allow_pickle=False)
    for name, array in small().items():
        assert record[name].dtype == array.dtype
        assert np.array_equal(record[name], array)
        assert record[name].flags.aligned


def test_close_releases_every_map(tmp_path: Path) -> None:
    directory = tmp_path / "a"
    write_packed(directory, small(), vocab_size=10)
    batch = PackedBatch.open(directory)
    row = batch.row(0)
    assert str(directory) in Path("/proc/self/maps").read_text()
    batch.close()
    batch.close()
    assert str(directory) not in Path("/proc/self/maps").read_text()
    assert not any(str(directory) in str(link.resolve()) for link in Path("/proc/self/fd").iterdir())
    shutil.rmtree(directory)
    assert row.tokens[0] == 5  # a row is a copy
    row.tokens[:] = 3
    with pytest.raises(ValueError, match="closed"):
        batch.row(0)


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("tokens", (0, 1), 10),
        ("tokens", (0, 1), -1),
        ("positions", (0, 1), 3),
        ("subtree_end", (0, 0), 9),
        ("subtree_end", (0, 6), 8),
        ("subtree_end", (0, 3), 3),
        ("row_num_tokens", 0, 9),
        ("slot_experts", (1, 7, 0, 1), -2),
        ("item_offsets", 1, 6),
        ("item_target", 0, 5),
        ("item_source", 2, 3),  # not an ancestor
        ("item_source", 0, 0),  # an ancestor, but not the parent
        ("item_source", 0, -1),
        ("item_sequence", 4, 4),
        ("item_sequence", 0, 1),
        ("item_trajectory", 1, 1),
        ("item_trajectory", 4, 3),
        ("item_logprob", 0, np.inf),
        ("item_advantage", 0, np.nan),
        ("trajectory_group", 0, 2),
        ("trajectory_num_items", 0, 3),
        ("group_num_items", 1, 1),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, name: str, index: int, value: float) -> None:
    """By the writer, and by the reader when the file was altered after it was written."""
    arrays = small()
    array = arrays[name].copy()
    array[index] = value
    with pytest.raises(InvalidInput) as refused:
        write_packed(tmp_path / "bad", {**arrays, name: array}, vocab_size=10)
    assert refused.value.field in arrays
    assert not (tmp_path / "bad").exists()

    write_packed(tmp_path / "a", arrays, vocab_size=10)
    alter(tmp_path / "a", **{name: array})
    with pytest.raises(InvalidInput) as damaged:
        PackedBatch.open(tmp_path / "a")
    assert damaged.value.field == refused.value.field


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"item_sequence": [0, 0, 1, 1, 1], "item_trajectory": [0, 0, 1, 1, 1]}, "split over rows"),
        ({"item_target": [3, 2, 4, 1, 2], "item_source": [2, 1, 1, 0, 1]}, "items are not in order"),
    ],
)
def test_sequences_in_disorder_are_refused(tmp_path: Path, changed: dict[str, list[int]], message: str) -> None:
    arrays = small() | {name: np.array(values, np.int32) for name, values in changed.items()}
    with pytest.raises(InvalidInput, match=message):
        write_packed(tmp_path / "bad", arrays, vocab_size=10)


def test_source_in_another_branch_is_refused(tmp_path: Path) -> None:
    """Slot 5 is a child of slot 4; slot 2 is as deep as slot 4, but no ancestor of slot 5."""
    arrays = small()
    for name, values in [
        ("tokens", [5, 6, 7, 8, 9, 1, 0, 0]),
        ("positions", [0, 1, 2, 3, 2, 3, 0, 0]),
        ("subtree_end", [6, 6, 4, 4, 6, 6, 7, 8]),
    ]:
        arrays[name][0] = values
    arrays["row_num_tokens"][0] = 6
    arrays["item_target"][2], arrays["item_source"][2] = 5, 4
    write_packed(tmp_path / "good", arrays, vocab_size=10)
    arrays["item_source"][2] = 2
    with pytest.raises(InvalidInput, match="not the token before its target"):
        write_packed(tmp_path / "bad", arrays, vocab_size=10)


def alter(directory: Path, **fields: np.ndarray | int) -> None:
    """Writes the file again with other fields; None removes a field."""
    record = np.load(directory / FILE)
    changed = {name: record[name] for name in record.dtype.names} | fields
    values = {name: np.asarray(value) for name, value in changed.items() if value is not None}
    altered = np.zeros((), [(name, value.dtype, value.shape) for name, value in values.items()])
    for name, value in values.items():
        altered[name] = value
    np.save(directory / FILE, altered)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"format": 1}, FILE, "format 1 is not 3"),
        ({"format": 2.0}, FILE, "not a record"),
        ({"vocab_size": [10, 10]}, FILE, "not a record"),
        ({"positions": None}, FILE, "must hold"),
        ({"item_source": np.zeros(5, np.int64)}, "item_source", "is int64"),
        ({"item_source": np.array([1, 2, 1, 0, 1], ">i4")}, "item_source", "is >i4"),
        ({"item_logprob": np.zeros(6, np.float32)}, "item_logprob", "expected float32"),
        ({"tokens": np.zeros(8, np.int32)}, "tokens", "expected int32"),
        ({"item_target": np.zeros((5, 1), np.int32)}, "item_target", "expected int32"),
        ({"trajectory_group": np.int32(0)}, "trajectory_group", "expected int32"),
        ({"item_offsets": np.array([0, 5], np.int64)}, "item_offsets", "expected int64"),
    ],
)
def test_another_format_is_refused(tmp_path: Path, fields: dict[str, np.ndarray], field: str, message: str) -> None:
    write_packed(tmp_path / "a", small(), vocab_size=10)
    alter(tmp_path / "a", **fields)
    with pytest.raises(InvalidInput, match=message) as refused:
        PackedBatch.open(tmp_path / "a")
    assert refused.value.field == field


def test_every_truncation_and_every_altered_header_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    write_packed(tmp_path, small(), vocab_size=10)
    whole = (tmp_path / FILE).read_bytes()
    header = whole.index(b"\n") + 1
    damaged = [whole[:size] for size in range(len(whole))]
    damaged += [whole[:i] + bytes([byte]) + whole[i + 1 :] for i in range(header) for byte in b"\0'9"]
    for content in damaged:
        (tmp_path / FILE).write_bytes(content)
        with suppress(InvalidInput), PackedBatch.open(tmp_path) as batch:
            assert len(content) == len(whole)
            assert batch.row(0).tokens.tolist() == small()["tokens"][0].tolist()


def test_data_of_an_older_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", small()["tokens"])
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(InvalidInput, match="submit it again") as refused:
        PackedBatch.open(tmp_path)
    assert refused.value.field == FILE


def test_unwritable_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpoolUnusable, match="is a file, not a directory"):
        write_packed(tmp_path / "file" / "a", small(), vocab_size=10)
    (tmp_path / "full").mkdir()
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode: opened(Path("/dev/full"), "wb") if mode == "xb" else 1 / 0)
    with pytest.raises(VolumeFull, match="the volume is full"):
        write_packed(tmp_path / "full", small(), vocab_size=10)
