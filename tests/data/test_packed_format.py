"""The packed format. NumPy can read a packed file. Damaged files and files of other versions are
refused. The memory maps of a packed file are released."""

import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tandem.data import packed_format
from tandem.data.examples import SFTExample
from tandem.data.inputs import PackingSettings
from tandem.data.packed_format import FILE, PackedBatch
from tandem.data.prepare import prepare_sft
from tandem.errors import InvalidInput, SpoolUnusable, VolumeFull


def pack(out: Path) -> str:
    """Writes a packed file with two rows of 8 slots. Returns the file's SHA-256."""
    examples = [
        SFTExample(token_ids=[9, *range(size)], weights=[0] + [1.5] * size) for size in (7, 4)
    ]
    packing = PackingSettings(sequence_length=8)
    return prepare_sft(examples, tokenizer_path="", vocab_size=10, packing=packing, out=out).sha256


def test_the_file_is_numpys_own_and_always_the_same(tmp_path: Path) -> None:
    sha256 = pack(tmp_path / "a")
    assert pack(tmp_path / "b") == sha256
    assert [path.name for path in (tmp_path / "a").iterdir()] == [FILE]
    record = np.load(tmp_path / "a" / FILE, mmap_mode="r", allow_pickle=False)
    assert all(record[name].flags.aligned for name in record.dtype.names)
    assert (int(record["format"]), int(record["vocab_size"])) == (5, 10)
    with PackedBatch.open(tmp_path / "a", sha256) as batch:
        assert (len(batch), batch.sequence_length) == (2, 8)
        for index in range(2):
            row, items = batch.row(index), slice(*record["item_offsets"][index : index + 2])
            assert row.num_tokens == record["row_num_tokens"][index]
            for name in ("tokens", "positions", "subtree_end", "slot_experts"):
                assert np.array_equal(getattr(row, name), record[name][index])
            for name in (
                "target",
                "source",
                "token",
                "sequence",
                "trajectory",
                "logprob",
                "policy_step",
                "weight",
                "rejected",
            ):
                assert (
                    getattr(row, f"item_{name}").tobytes()
                    == record[f"item_{name}"][items].tobytes()
                )
        with pytest.raises(IndexError):
            batch.row(2)


def test_close_releases_every_map(tmp_path: Path) -> None:
    directory = tmp_path / "a"
    pack(directory)
    batch = PackedBatch.open(directory)
    row = batch.row(0)
    assert str(directory) in Path("/proc/self/maps").read_text()
    batch.close()
    batch.close()
    assert str(directory) not in Path("/proc/self/maps").read_text()
    assert not any(
        str(directory) in str(link.resolve()) for link in Path("/proc/self/fd").iterdir()
    )
    shutil.rmtree(directory)
    assert row.tokens[0] == 9  # The row is a copy, so its arrays stay valid after `close`.
    row.tokens[:] = 3
    with pytest.raises(ValueError, match="closed"):
        batch.row(0)


def test_another_file_is_refused(tmp_path: Path) -> None:
    """A damaged file, a file of another version of the format, and a missing file are refused."""
    sha256 = pack(tmp_path)
    whole = (tmp_path / FILE).read_bytes()
    for damaged in (
        b"",
        whole[:-1],
        whole[:100],
        whole[:-1] + b"?",
        whole[:20] + b"?" + whole[21:],
    ):
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(InvalidInput, match=r"was altered .*submit the job again"):
            PackedBatch.open(tmp_path, sha256)
    (tmp_path / FILE).write_bytes(whole)
    record = np.load(tmp_path / FILE)
    record["format"] = 2
    np.save(tmp_path / FILE, record)
    with pytest.raises(InvalidInput, match=r"format 2 is not 5: .*the same version"):
        PackedBatch.open(tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(InvalidInput, match="submit it again") as refused:
        PackedBatch.open(tmp_path, sha256)
    assert refused.value.field == FILE


# With a limit of 100 bytes the slots alone exceed the limit. With a limit of 200 bytes only the sum
# of all arrays exceeds the limit.
@pytest.mark.parametrize("limit", [100, 200])
def test_more_than_a_numpy_record_can_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(packed_format, "LARGEST_BYTES", limit)
    with pytest.raises(InvalidInput, match="make several jobs of it"):
        pack(tmp_path / "large")
    assert not (tmp_path / "large").exists()


def test_a_small_request_of_too_many_rows_takes_no_memory_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_format, "LARGEST_BYTES", 10 * 2**20)
    examples = [SFTExample(token_ids=[1, 2], weights=[0, 1])] * 100
    packing = PackingSettings(sequence_length=2**14)
    tracemalloc.start()
    try:
        with pytest.raises(
            InvalidInput, match=r"lower packing\.sequence_length, or raise optimizer\.batch_size"
        ):
            prepare_sft(
                examples,
                tokenizer_path="",
                vocab_size=10,
                packing=packing,
                out=tmp_path / "large",
                batch_size=1,
            )
        assert tracemalloc.get_traced_memory()[1] < 2 * 2**20
    finally:
        tracemalloc.stop()


def test_unwritable_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpoolUnusable, match="is a file, not a directory"):
        pack(tmp_path / "file" / "a")
    opened = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, mode: opened(Path("/dev/full"), "wb") if mode == "xb" else 1 / 0
    )
    with pytest.raises(VolumeFull, match="the volume is full"):
        pack(tmp_path / "full")
