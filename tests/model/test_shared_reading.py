"""Ranks that need the same weights read a part each, and have all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ranks import run_ranks
from tandem.model import device
from tandem.model.arch import read_arch
from tandem.model.weights import BaseWeights
from tiny import write_random_model

RANKS = 3
RANK = """
import json, sys, torch
from pathlib import Path
from tandem.model import device, parallel
from tandem.model.arch import read_arch
from tandem.model.weights import BaseWeights, load_weights
device.activate("cpu")
parallel.init_parallel(timeout_seconds=300)
directory = Path(sys.argv[1])
arch = read_arch(str(directory))
alone, shared = (BaseWeights(arch, torch.float32, tp=1, group=g) for g in (None, parallel.data_parallel_group()))
for weights in (alone, shared):
    for parameter in weights.parameters.values():
        parameter.fill_(torch.nan)
    load_weights(directory, arch, weights.share, tp=1, tp_rank=0)
read = [name for name, parameter in shared.parameters.items() if not parameter.isnan().all()]
shared.exchange()
same = all(torch.equal(shared.parameters[name], parameter) for name, parameter in alone.parameters.items())
print(json.dumps([read, same, len(alone.parameters)]))
parallel.destroy()
"""


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    device.activate("cpu")


def test_each_rank_reads_its_share_and_gets_the_others(tmp_path: Path) -> None:
    model = write_random_model(tmp_path, num_hidden_layers=7)
    told = [json.loads(out) for out in run_ranks(RANKS, "-c", RANK, str(model))]
    parameters = list(BaseWeights(read_arch(str(model)), torch.float32, tp=1).parameters)
    assert [name for read, _, _ in told for name in read] == parameters
    for read, same, count in told:
        assert same
        assert count / RANKS / 2 < len(read) < count / RANKS * 2


def test_it_is_one_piece_of_memory_with_room_for_nothing_else(tmp_path: Path) -> None:
    arch = read_arch(str(write_random_model(tmp_path, family="qwen3_moe")))
    weights = BaseWeights(arch, torch.bfloat16, tp=1)
    (size,) = {parameter.untyped_storage().nbytes() for parameter in weights.parameters.values()}
    begins = sorted(parameter.data_ptr() for parameter in weights.parameters.values())
    needed = sum(parameter.nbytes for parameter in weights.parameters.values())
    assert size % 2**21 == 0
    assert needed <= size < needed + 512 * len(begins) + 2**21
    assert all((begin - begins[0]) % 512 == 0 for begin in begins)
    assert weights.share() is weights.parameters
