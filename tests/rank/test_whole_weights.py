"""The whole weights that ranks send, or write as files, are an independent merge, bit by bit."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import whole_weights_rank
from inference.worker_models import merged
from policies import LORA, write_random_adapter
from ranks import run_ranks
from tandem.families.adapter import stacked_name
from tandem.families.parts import buffers
from tandem.families.registry import read_arch
from tandem.families.topology import Sizes
from tandem.trainer.rank import model_files
from tiny import write_random_model

CASES: list[tuple[str, dict[str, Any], int]] = [
    ("qwen3", {}, 1),
    ("qwen3", {}, 2),
    ("qwen2", {"tie_word_embeddings": True, "head_dim": 8}, 2),
    ("qwen3_moe", {}, 1),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[2]}")
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    family, sizes, tp = request.param
    directory = tmp_path_factory.mktemp(family)
    model = write_random_model(directory / "model", family=family, num_hidden_layers=3, **sizes)
    write_random_adapter(directory / "adapter", model, LORA, seed=3)
    run_ranks(tp, whole_weights_rank.__file__, str(directory), str(tp))
    return directory, tp


def expected(directory: Path) -> dict[str, torch.Tensor]:
    return merged(load_file(directory / "model/model.safetensors"), directory / "adapter")


def test_ranks_send_each_element_once(written: tuple[Path, int]) -> None:
    directory, tp = written
    whole = expected(directory)
    stacks = defaultdict(list)
    for name in sorted(whole, key=lambda name: [int(w) if w.isdigit() else w for w in name.split(".")]):
        stacks[stacked_name(name)].append(whole[name])
    tensors = {name: torch.stack(of) if "*" in name else of[0] for name, of in stacks.items()}
    for targets in (None, LORA.targets):
        times = {name: torch.zeros_like(value) for name, value in tensors.items()}
        for rank in range(tp):
            for wanted, name, of, values in torch.load(directory / f"sent{rank}.pt", weights_only=False):
                if wanted == targets:
                    assert torch.equal(values, tensors[name][of]), name
                    times[name][of] += 1
        for name, count in times.items():
            sent = targets is None or name.split(".")[-2] in targets
            assert (count == (sent and "bias" not in name if targets else 1)).all(), name


def test_the_files_are_a_model_that_transformers_loads(written: tuple[Path, int]) -> None:
    directory, _ = written
    model = AutoModelForCausalLM.from_pretrained(directory / "merged", dtype=torch.float32)
    files = sorted((directory / "merged").glob("*.safetensors"))
    tensors = {name: value for file in files for name, value in load_file(file).items()}
    whole = expected(directory)
    assert tensors.keys() == whole.keys()
    assert all(torch.equal(tensors[name], whole[name]) for name in whole)
    model.save_pretrained(directory / "again")
    again = load_file(directory / "again/model.safetensors")
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_a_large_model_is_written_in_several_files(
    written: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = written
    monkeypatch.setattr(model_files, "SHARD_BYTES", 20_000)
    arch = read_arch(str(directory / "model"))
    files = model_files.ModelFiles(tmp_path / "merged", arch, torch.float32)
    files.create(directory / "model")
    places = files._places.values()
    assert len({file for file, *_ in places}) > 3
    for file in {file for file, *_ in places}:
        sizes = [torch.Size(shape).numel() * 4 for name, _, shape in places if name == file]
        assert len(sizes) == 1 or sum(sizes) <= 20_000
        # Already before a rank writes, else an NFS client overwrites what those of other hosts have written.
        header = int.from_bytes((tmp_path / "merged" / file).read_bytes()[:8], "little")
        assert (tmp_path / "merged" / file).stat().st_size == 8 + header + sum(sizes)


@pytest.mark.parametrize("tp", [1, 2])
def test_no_buffer_is_longer_than_allowed(written: tuple[Path, int], tp: int) -> None:
    """But for one row, or the rows of one head group or one expert."""
    arch = read_arch(str(written[0] / "model"))
    most = 3000
    for rank in range(tp if arch.moe is None else 1):
        lists = list(buffers(arch, None, sizes=Sizes(tensor=tp if arch.moe is None else 1), rank=rank, most=most))
        assert all(sum(part.size for part in parts) <= most for parts in lists)
        assert sum(len(parts) > 1 for parts in lists) > 1
