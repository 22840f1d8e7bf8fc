"""Two tensor-parallel ranks compute what one rank computes; ranks that need the same weights read them together."""

from pathlib import Path

import pytest
import torch

from policies import LORA, assert_close, make_policy, write_random_adapter
from rank_of_two import outputs_and_gradients
from ranks import run_ranks
from tandem.errors import InvalidInput
from tandem.families.adapter import WEIGHTS_FILE
from tandem.families.registry import read_arch
from tandem.families.topology import Sizes
from tandem.model import parallel
from tandem.model.weights.base_memory import BaseWeights
from tiny import write_random_model

SCRIPT = Path(__file__).parent.parent / "rank_of_two.py"


def run_two(directory, where):
    """Write a model and an adapter, start two ranks on them; the ranks' results."""
    model = write_random_model(directory / "model", seed=9, num_hidden_layers=4)
    write_random_adapter(directory / "adapter", model, LORA, seed=9)
    run_ranks(2, str(SCRIPT), str(directory), where)
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def ranks(directory):
    return run_two(directory, "cpu")


@pytest.fixture(scope="module")
def expected(ranks, directory, alone):
    return outputs_and_gradients(make_policy(directory / "model", LORA, directory / "adapter"))


@pytest.mark.parametrize("rank", [0, 1])
def test_outputs_and_every_gradient(ranks, expected, rank):
    for name in ("logprobs", "entropy", "logits", "base"):
        torch.testing.assert_close(ranks[rank][name], expected[name], atol=2e-5, rtol=1e-5)
    assert_close(ranks[rank]["gradients"], expected["gradients"], 1e-5)


def test_replicated_tensors_have_the_same_gradient_on_both_ranks(ranks):
    """Bit for bit, or ranks would drift apart over many steps."""
    first, second = (rank["replicated"] for rank in ranks)
    names = {name.split(".")[-3] + "." + name.split(".")[-2] for name in first}
    assert names == {f"{t}_proj.lora_A" for t in ("q", "k", "v", "gate", "up")} | {"o_proj.lora_B", "down_proj.lora_B"}
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_adapter_comes_back_whole(ranks, directory):
    """Each rank reads its part; gathered and written by one rank, the file has the same bytes."""
    assert (directory / "saved" / WEIGHTS_FILE).read_bytes() == (directory / "adapter" / WEIGHTS_FILE).read_bytes()


def test_a_number_of_ranks_that_does_not_divide_is_refused(alone):
    with pytest.raises(InvalidInput, match="don't divide"):
        parallel.init_parallel(Sizes(tensor=2))


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_rank_reads_its_share_and_gets_the_others(request, tmp_path, where):
    """A GPU copies the other rank's share. On the CPU ranks can't share memory, so each reads the other's share too,
    and from then on all weights."""
    if where == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = request.getfixturevalue("ranks") if where == "cpu" else run_two(tmp_path, where)
    readings = [rank["reading"] for rank in ranks]
    everything = [name for reading in readings for name in reading["read"]]
    assert len(set(everything)) == len(everything)
    for reading in readings:
        assert reading["same"]
        assert len(everything) / 4 < len(reading["read"]) < len(everything)
        if where == "cuda":
            assert (reading["missing"], reading["next"]) == ([], len(reading["read"]))
        else:
            assert (set(reading["missing"]), reading["next"]) == (
                set(everything) - set(reading["read"]),
                len(everything),
            )


class Group:
    """Stands for a process group, of which this is one rank."""

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
    first, second = (BaseWeights(arch, torch.float32, sizes, groups=each).own_share() for each in groups)
    parameters = BaseWeights(arch, torch.float32, sizes).parameters
    assert {*first, *second} == {*parameters}
    experts = {name for name in parameters if ".experts." in name}
    assert len(experts) >= 4
    assert {*first} & {*second} == {*parameters} - experts
    assert {*first} & experts
    assert {*second} & experts


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
