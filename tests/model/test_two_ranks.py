"""Ranks that need the same base weights read them together. Each rank has all its base weights in
one allocation."""

from pathlib import Path

import pytest
import torch

from ranks import run_ranks
from tandem.errors import InvalidInput
from tandem.families.registry import read_arch
from tandem.model import parallel
from tandem.model.weights.base_memory import BaseWeights
from tandem.topology.sizes import Sizes
from tiny import write_random_model

SCRIPT = Path(__file__).parent / "rank_of_two.py"


def test_a_number_of_ranks_that_does_not_divide_is_refused(alone):
    with pytest.raises(InvalidInput, match="don't divide"):
        parallel.init_parallel(Sizes(tensor=2))


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_rank_reads_its_share_and_gets_the_others(tmp_path, where):
    """On GPUs a rank copies the other rank's share. For a next job a rank on a GPU reads only its
    own share. On the CPU ranks can't share memory, so each rank reads all weights, for the first
    job and for a next job."""
    if where == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    write_random_model(tmp_path / "model", seed=9, num_hidden_layers=4)
    run_ranks(2, str(SCRIPT), str(tmp_path), where)
    readings = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    everything = [name for reading in readings for name in reading["read"]]
    assert len(set(everything)) == len(everything)
    for reading in readings:
        assert reading["same"]
        assert len(everything) / 4 < len(reading["read"]) < len(everything)
        others = set() if where == "cuda" else set(everything) - set(reading["read"])
        assert set(reading["missing"]) == others
        assert reading["next"] == len(reading["read"]) + len(others)


class Group:
    """Stands for a process group of `size` ranks in which this process is the rank `rank`."""

    def __init__(self, rank, size):
        self.rank = lambda: rank
        self.size = lambda: size


def test_shares_are_consecutive_and_about_equal(alone, tmp_path):
    arch = read_arch(str(write_random_model(tmp_path, num_hidden_layers=7)))
    groups = [(Group(rank, 5),) * 2 for rank in range(5)]
    shares = [BaseWeights(arch, torch.float32, Sizes(), groups=each).own_share() for each in groups]
    parameters = BaseWeights(arch, torch.float32, Sizes()).parameters
    assert [name for share in shares for name in share] == list(parameters)
    sizes, largest = (
        [sum(p.nbytes for p in share.values()) for share in shares],
        max(p.nbytes for p in parameters.values()),
    )
    assert all(abs(size - sum(sizes) / 5) <= largest for size in sizes)


def test_tensor_parallel_ranks_share_the_reading_of_whole_experts_only(alone, tmp_path):
    arch = read_arch(str(write_random_model(tmp_path, family="qwen3_moe")))
    sizes = Sizes(tensor=2, sequence=True)
    groups = [(Group(0, 1), Group(rank, 2)) for rank in range(2)]
    first, second = (
        BaseWeights(arch, torch.float32, sizes, groups=each).own_share() for each in groups
    )
    parameters = BaseWeights(arch, torch.float32, sizes).parameters
    assert {*first, *second} == {*parameters}
    experts = {name for name in parameters if ".experts." in name}
    assert len(experts) >= 4
    assert {*first} & {*second} == {*parameters} - experts
    assert {*first} & experts
    assert {*second} & experts


def test_each_rank_reads_the_small_parameters_in_fp32(alone, tmp_path):
    arch = read_arch(str(write_random_model(tmp_path, family="glm4_moe")))
    groups = [(Group(rank, 2),) * 2 for rank in range(2)]
    first, second = (
        BaseWeights(arch, torch.bfloat16, Sizes(), groups=each).own_share() for each in groups
    )
    assert {*first} | {*second} == {*BaseWeights(arch, torch.bfloat16, Sizes()).parameters}
    both = {*first} & {*second}
    assert both == {name for name in first if name.endswith("correction_bias")} != set()
    assert {first[name].dtype for name in both} == {torch.float32}


def test_the_allocation_has_no_room_for_anything_else(alone, tmp_path):
    arch = read_arch(str(write_random_model(tmp_path, family="qwen3_moe")))
    weights = BaseWeights(arch, torch.bfloat16, Sizes())
    (size,) = {parameter.untyped_storage().nbytes() for parameter in weights.parameters.values()}
    begins = sorted(parameter.data_ptr() for parameter in weights.parameters.values())
    needed = sum(parameter.nbytes for parameter in weights.parameters.values())
    assert size % 2**21 == 0
    assert needed <= size < needed + 512 * len(begins) + 2**21
    assert all((begin - begins[0]) % 512 == 0 for begin in begins)
    assert weights.own_share() is weights.parameters
