"""Ranks that need the same weights read a part each, and have all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ranks import run_ranks
from tandem.families.registry import read_arch
from tandem.model import device
from tandem.model.weights.base_weights import BaseWeights
from tiny import write_random_model

RANK = """
import json, os, sys, torch
from pathlib import Path
from tandem.model import device, parallel
from tandem.families.registry import read_arch
from tandem.model.weights.base_weights import BaseWeights
from tandem.model.weights.load import load_weights
device.activate(sys.argv[2], int(os.environ["LOCAL_RANK"]))
parallel.init_parallel(timeout_seconds=300)
group = parallel.data_parallel_group() if sys.argv[2] == "cpu" else parallel.reading_group()
directory = Path(sys.argv[1])
arch = read_arch(str(directory))
alone, shared = (BaseWeights(arch, torch.float32, tp=1, group=g) for g in (None, group))
for weights in (alone, shared):
    for parameter in weights.parameters.values():
        parameter.fill_(torch.nan)
    load_weights(directory, arch, weights.own_share, tp=1, tp_rank=0)
read = [name for name, parameter in shared.parameters.items() if not parameter.isnan().all()]
shared.connect()
left = shared.exchange()
if left:
    load_weights(directory, arch, lambda: left, tp=1, tp_rank=0)
device.synchronize()
same = all(torch.equal(shared.parameters[name], parameter) for name, parameter in alone.parameters.items())
print(json.dumps([read, list(left), same, len(shared.own_share())]))
parallel.destroy()
"""


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    device.activate("cpu")


@pytest.mark.parametrize(("where", "ranks"), [("cpu", 3), pytest.param("cuda", 2, marks=pytest.mark.gpu)])
def test_each_rank_reads_its_share_and_gets_the_others(tmp_path: Path, where: str, ranks: int) -> None:
    """Another rank's share is copied from its GPU; on the CPU, whose memory ranks don't share so, it is left to be
    read, and no reading is shared after that."""
    if where == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip("needs two GPUs")
    model = write_random_model(tmp_path, num_hidden_layers=7)
    told = [json.loads(out) for out in run_ranks(ranks, "-c", RANK, str(model), where)]
    parameters = list(BaseWeights(read_arch(str(model)), torch.float32, tp=1).parameters)
    assert [name for read, *_ in told for name in read] == parameters
    for read, left, same, share_then in told:
        assert same
        assert len(parameters) / ranks / 2 < len(read) < len(parameters) / ranks * 2
        if where == "cuda":
            assert (left, share_then) == ([], len(read))
        else:
            assert (set(left), share_then) == (set(parameters) - set(read), len(parameters))


def test_it_is_one_piece_of_memory_with_room_for_nothing_else(tmp_path: Path) -> None:
    arch = read_arch(str(write_random_model(tmp_path, family="qwen3_moe")))
    weights = BaseWeights(arch, torch.bfloat16, tp=1)
    (size,) = {parameter.untyped_storage().nbytes() for parameter in weights.parameters.values()}
    begins = sorted(parameter.data_ptr() for parameter in weights.parameters.values())
    needed = sum(parameter.nbytes for parameter in weights.parameters.values())
    assert size % 2**21 == 0
    assert needed <= size < needed + 512 * len(begins) + 2**21
    assert all((begin - begins[0]) % 512 == 0 for begin in begins)
    assert weights.own_share() is weights.parameters
