"""The packed format: round trip, refusal of other files, release of the maps."""

import shutil
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
    sha256 = write_packed(tmp_path / "a", arrays, vocab_size=10)
    assert write_packed(tmp_path / "b", arrays, vocab_size=10) == sha256
    assert [path.name for path in (tmp_path / "a").iterdir()] == [FILE]
    record = np.load(tmp_path / "a" / FILE, mmap_mode="r", allow_pickle=False)  # NumPy's own format
    for name, array in arrays.items():
        assert record[name].dtype == array.dtype
        assert np.array_equal(record[name], array)
        assert record[name].flags.aligned
    with PackedBatch.open(tmp_path / "a", sha256) as batch:
        assert (len(batch), batch.sequence_length) == (2, 8)
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


def test_another_file_is_refused(tmp_path: Path) -> None:
    """A damaged one, one of another version, and none, as an older version has it."""
    sha256 = write_packed(tmp_path, small(), vocab_size=10)
    whole = (tmp_path / FILE).read_bytes()
    for damaged in (b"", whole[:-1], whole[:100], whole[:-1] + b"?", whole[:20] + b"?" + whole[21:]):
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(InvalidInput, match=r"was altered .*submit the job again"):
            PackedBatch.open(tmp_path, sha256)
    (tmp_path / FILE).write_bytes(whole)
    record = np.load(tmp_path / FILE)
    record["format"] = 2
    np.save(tmp_path / FILE, record)
    with pytest.raises(InvalidInput, match=r"format 2 is not 3: .*the same version"):
        PackedBatch.open(tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(InvalidInput, match="submit it again") as refused:
        PackedBatch.open(tmp_path, sha256)
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
