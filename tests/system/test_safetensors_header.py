"""The header of safetensors files. Tandem reads headers that safetensors' own library writes, and
refuses damaged headers with a message. Tandem writes the same headers as the library."""

import json
import random
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import deserialize
from safetensors.numpy import save

from tandem.errors import InvalidInput
from tandem.system import safetensors_header
from tandem.system.safetensors_header import DTYPES, Entry, lay_out, read_header

TENSORS: dict[str, NDArray[Any]] = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5, dtype=np.int64),
    "none": np.zeros((0, 4), np.float32),
    "scalar": np.array(7, np.int64),
}
WHOLE = save(TENSORS, metadata={"format": "pt"})
LENGTH = int.from_bytes(WHOLE[:8], "little")
HEADER: dict[str, Any] = json.loads(WHOLE[8 : 8 + LENGTH])
DATA = WHOLE[8 + LENGTH :]


def joined(header: Any, data: bytes = DATA) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def changed(**entry: Any) -> bytes:
    """The file with a changed entry in its header. The entry is that of `scalar`, the
    second-to-last tensor."""
    return joined(HEADER | {"scalar": HEADER["scalar"] | entry})


def test_every_tensor_is_where_the_library_wrote_it(tmp_path: Path) -> None:
    (path := tmp_path / "file").write_bytes(WHOLE)
    entries = read_header(path)
    assert entries.keys() == TENSORS.keys()
    for name, entry in entries.items():
        array = TENSORS[name]
        assert (entry.shape, entry.nbytes) == (array.shape, array.nbytes)
        assert WHOLE[entry.begin : entry.end] == array.tobytes()


def test_what_is_written_is_what_the_library_writes() -> None:
    ordered = sorted(TENSORS, key=lambda name: (-TENSORS[name].dtype.itemsize, name))
    codes = {"float32": "F32", "int64": "I64"}
    header, entries = lay_out(
        {name: (codes[TENSORS[name].dtype.name], TENSORS[name].shape) for name in ordered}
    )
    assert header + b"".join(TENSORS[name].tobytes() for name in ordered) == WHOLE
    assert {name: WHOLE[entry.begin : entry.end] for name, entry in entries.items()} == {
        name: array.tobytes() for name, array in TENSORS.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_has_the_librarys_size(tmp_path: Path, dtype: str) -> None:
    header, entries = lay_out({"x": (dtype, (3,))})
    whole = header + bytes(entries["x"].nbytes)
    ((_, found),) = deserialize(whole)
    assert (found["dtype"], len(found["data"])) == (dtype, entries["x"].nbytes)
    (path := tmp_path / "file").write_bytes(whole)
    assert read_header(path) == entries


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "its header would be 0 bytes, the file is 0"),
        (WHOLE[:20], "its header would be"),
        ((2**60).to_bytes(8, "little") + b"{}", "its header would be"),
        (joined(b"[[[["), "its header is not JSON"),
        (joined(b"[" * 10**5), "its header is not JSON"),
        (joined(b"\xff\xfe\xff"), "its header is not JSON"),
        (joined(b"[]"), "its header is not a JSON object"),
        (joined(HEADER, DATA[:-1]), r"its last tensor ends at byte \d+, the file at \d+"),
        (joined(HEADER, DATA + b"\0"), r"its last tensor ends at byte \d+, the file at \d+"),
        (joined({"x": 7}), "x has no valid dtype, shape and data_offsets"),
        (joined({"x": {"shape": [1]}}), "x has no valid dtype, shape and data_offsets"),
        (changed(dtype=7), "scalar has no valid dtype"),
        (changed(dtype="F4"), "scalar has the unknown dtype F4"),
        (changed(shape=[-1]), "scalar has no valid dtype, shape"),
        (changed(shape=[True]), "scalar has no valid dtype, shape"),
        (changed(shape=[1.0]), "scalar has no valid dtype, shape"),
        (changed(shape=[3]), "does not fill bytes"),
        (changed(data_offsets=[0]), "scalar has no valid dtype, shape and data_offsets"),
        (changed(data_offsets=[-8, 0]), "scalar has no valid dtype, shape and data_offsets"),
        (changed(data_offsets=[8, 0]), "does not fill bytes 8 to 0"),
        (changed(data_offsets=[0, 8]), "begins at byte .*, what is before it ends at"),
        (changed(data_offsets=[48, 56]), "begins at byte .*, what is before it ends at"),
        (changed(data_offsets=[2**70, 2**70 + 8]), "begins at byte .*, what is before it ends at"),
    ],
)
def test_a_file_that_is_not_whole_is_refused_in_words(
    tmp_path: Path, content: bytes, says: str
) -> None:
    (path := tmp_path / "file").write_bytes(content)
    with pytest.raises(InvalidInput, match=says) as refused:
        read_header(path)
    assert refused.value.message.startswith(f"{path} can't be read: ")


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InvalidInput, match=f"{path} can't be read"):
            read_header(path)


def test_a_long_header_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:  # sparse
        file.write((2**30).to_bytes(8, "little"))
        file.truncate(2**31)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match="would be 1073741824 bytes, at most 100000000"):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    path.write_bytes(WHOLE)
    monkeypatch.setattr(safetensors_header, "LONGEST_HEADER", LENGTH)
    assert read_header(path)
    monkeypatch.setattr(safetensors_header, "LONGEST_HEADER", LENGTH - 1)
    with pytest.raises(InvalidInput, match="its header would be"):
        read_header(path)


def flip(raw: bytearray, chance: random.Random) -> None:
    raw[chance.randrange(8 + LENGTH)] ^= 1 << chance.randrange(8)


def cut(raw: bytearray, chance: random.Random) -> None:
    del raw[chance.randrange(len(raw)) :]


def remove(raw: bytearray, chance: random.Random) -> None:
    begin = chance.randrange(len(raw))
    del raw[begin : begin + chance.randrange(1, 9)]


def digit(raw: bytearray, chance: random.Random) -> None:
    places = [at for at in range(8, 8 + LENGTH) if chr(raw[at]).isdigit()]
    raw[chance.choice(places)] = ord(chance.choice("0123456789"))


@pytest.mark.parametrize("damage", [flip, cut, remove, digit])
def test_a_damaged_file_is_refused_or_its_tensors_fill_it(
    tmp_path: Path, damage: Callable[[bytearray, random.Random], None]
) -> None:
    """Only InvalidInput is raised. If the library refuses a header, Tandem refuses it too."""
    path, chance, refused = tmp_path / "file", random.Random(0), 0
    for _ in range(500):
        damage(raw := bytearray(WHOLE), chance)
        path.write_bytes(raw)
        try:
            entries = read_header(path)
        except InvalidInput:
            refused += 1
            continue
        filled(entries, len(raw))
        deserialize(bytes(raw))  # raises if the library refuses the header
    assert refused > 100


def filled(entries: dict[str, Entry], size: int) -> None:
    ranges = sorted((entry.begin, entry.end) for entry in entries.values())
    assert all(end == begin for (_, end), (begin, _) in pairwise(ranges))
    assert not ranges or ranges[-1][1] == size
