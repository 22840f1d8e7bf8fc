"""The reader of safetensors files reads the files that the safetensors library writes. Its errors
name damaged files."""

import pytest
import torch
from safetensors.torch import save_file

from tandem.errors import InvalidInput
from tandem.model import device
from tandem.model.weights import safetensors_reader
from tandem.model.weights.safetensors_reader import Piece, fill_targets, read_headers


@pytest.fixture(autouse=True)
def on_the_cpu():
    device.activate("cpu")


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "f32": random(48, 10),
        "bf16": random(33, 7).to(torch.bfloat16),
        "f16": random(5).to(torch.float16),
        "long": random(4096, 3),
        "empty": random(0, 3),
    }


@pytest.fixture
def file(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def whole(stored, target):
    return Piece(stored, 0, max(1, target[0].numel()) if len(target) else 1, target)


@pytest.mark.parametrize(("chunk_bytes", "threads"), [(1, 4), (100, 1), (4096, 4), (2**25, 1)])
def test_every_tensor_arrives_bit_for_bit(file, tensors, chunk_bytes, threads, monkeypatch):
    monkeypatch.setattr(safetensors_reader, "CHUNK_BYTES", chunk_bytes)
    stored = read_headers([file])
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    targets = {name: torch.full_like(tensor, 9.0) for name, tensor in tensors.items()}
    fill_targets([whole(stored[name], target) for name, target in targets.items()], threads=threads)
    for name, tensor in tensors.items():
        assert torch.equal(targets[name], tensor), name


@pytest.mark.parametrize("chunk_bytes", [1, 2**25])
def test_ranges_columns_blocks_and_dtypes(file, tensors, chunk_bytes, monkeypatch):
    monkeypatch.setattr(safetensors_reader, "CHUNK_BYTES", chunk_bytes)
    stored = read_headers([file])["f32"]
    rows = torch.zeros(16, 10, dtype=torch.float64)  # This dtype is not the file's.
    columns = torch.zeros(48, 4)
    # Each of the six groups has 12 rows. The file has rows 2 to 9 of each group.
    blocks = torch.zeros(6, 12, 10)
    pieces = [Piece(stored, 16 * 10, 10, rows), Piece(stored, 0, 10, columns, slice(3, 7))]
    fill_targets([*pieces, Piece(stored, 0, 8 * 10, blocks[:, 2:10])])
    assert torch.equal(rows, tensors["f32"][16:32].double())
    assert torch.equal(columns, tensors["f32"][:, 3:7])
    expected = torch.zeros(6, 12, 10)
    expected[:, 2:10] = tensors["f32"].view(6, 8, 10)
    assert torch.equal(blocks, expected)


def test_small_neighbours_are_read_together(file, monkeypatch):
    reads, preadv = [], safetensors_reader.os.preadv
    monkeypatch.setattr(
        safetensors_reader.os, "preadv", lambda *args: reads.append(args[-1]) or preadv(*args)
    )
    monkeypatch.setattr(safetensors_reader, "CHUNK_BYTES", 1000)
    save_file({f"{i:03}": torch.full((10,), float(i)) for i in range(100)}, file)
    stored, stack = read_headers([file]), torch.zeros(100, 10)
    fill_targets([whole(stored[f"{i:03}"], stack[i]) for i in range(100)])
    assert torch.equal(stack, torch.arange(100.0)[:, None].expand(-1, 10))
    assert len(reads) == 4  # A read gets 25 tensors of 40 bytes each.


def test_a_file_that_becomes_shorter_is_named(file, tensors):
    pieces = [
        whole(stored, torch.zeros_like(tensors[name]))
        for name, stored in read_headers([file]).items()
    ]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InvalidInput, match="it ends at byte"):
        fill_targets(pieces, threads=4)
    file.unlink()
    with pytest.raises(InvalidInput, match="can't be read"):
        fill_targets(pieces)
