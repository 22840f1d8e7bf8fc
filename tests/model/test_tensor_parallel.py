"""Two tensor-parallel ranks compute what one rank computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from policies import LORA, assert_close, make_policy, write_random_adapter
from ranks import run_ranks
from tandem.errors import InvalidInput
from tandem.families.adapter import WEIGHTS_FILE
from tandem.model import parallel
from tiny import write_random_model
from tp_rank import outputs_and_gradients

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model, an adapter, and what two ranks made of them."""
    directory = tmp_path_factory.mktemp("tp")
    model = write_random_model(directory / "model", seed=9)
    write_random_adapter(directory / "adapter", model, LORA, seed=9)
    run_ranks(2, str(TESTS / "tp_rank.py"), str(directory))
    return directory


@pytest.fixture(scope="module")
def expected(directory, alone):
    return outputs_and_gradients(make_policy(directory / "model", LORA, directory / "adapter"))


@pytest.mark.parametrize("rank", [0, 1])
def test_outputs(directory, expected, rank):
    actual = torch.load(directory / f"rank{rank}.pt")
    for name in ("logprobs", "entropy", "logits", "base"):
        torch.testing.assert_close(actual[name], expected[name], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_gradient(directory, expected, rank):
    assert_close(torch.load(directory / f"rank{rank}.pt")["gradients"], expected["gradients"], 1e-5)


def test_replicated_tensors_have_the_same_gradient_on_both_ranks(directory):
    """To the bit: else ranks would drift apart over many steps."""
    first, second = (torch.load(directory / f"rank{rank}.pt")["replicated"] for rank in range(2))
    names = {name.split(".")[-3] + "." + name.split(".")[-2] for name in first}
    assert names == {f"{t}_proj.lora_A" for t in ("q", "k", "v", "gate", "up")} | {"o_proj.lora_B", "down_proj.lora_B"}
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_adapter_comes_back_whole(directory):
    """Read by two ranks, each its part; gathered and written by one: the same bytes."""
    assert (directory / "saved" / WEIGHTS_FILE).read_bytes() == (directory / "adapter" / WEIGHTS_FILE).read_bytes()


def test_ranks_that_do_not_divide_are_refused(alone):
    with pytest.raises(InvalidInput, match="don't divide"):
        parallel.init_parallel(2)
