"""Offloading in bytes, on a GPU: what is given back, what comes again, and that nothing else stays."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tandem.model import device, parallel
from tandem.model.device import memory
from tandem.trainer.rank import checkpoint
from trainer_ranks.offloading import Training, adapter_for, same, total

pytestmark = pytest.mark.gpu

SHAPE = {
    "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
LENGTH = 512
SMALL = 1024  # bytes: scalars of the optimizer's


EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import write_random_model

    shape = SHAPE if request.param == "qwen3" else SHAPE | EXPERTS
    return write_random_model(tmp_path_factory.mktemp("model"), family=request.param, **shape)


@pytest.fixture
def training(model: Path, tmp_path: Path):
    device.activate("cuda")
    torch.use_deterministic_algorithms(True, warn_only=True)
    parallel.init_parallel()
    before = allocated()
    training = Training(model, adapter_for(model, tmp_path / "adapter"))
    training.before = before
    yield training
    parallel.destroy()


def allocated() -> int:
    gc.collect()  # graphs of earlier steps
    memory.release_cached()
    # What was asked for: of a large block the allocator may give up to 1 MiB more.
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def parameters(training: Training) -> list[torch.Tensor]:
    return [*training.policy.gpt.parameters(), training.policy._inv_freq]


def optimizer_tensors(training: Training) -> list[torch.Tensor]:
    state = training.optimizer.state()
    buffers = [buffer.grad_data for buffer in training.optimizer._gradients.buffers]
    return [*state.exp_avg.values(), *state.exp_avg_sq.values(), *buffers]


@pytest.mark.parametrize("what", ["parameters", "optimizer", "both"])
def test_bytes_of_each_part_and_training_that_goes_on_bit_for_bit(training, model, tmp_path, what) -> None:
    straight = Training(model, adapter_for(model, tmp_path / "again"))
    for number in range(2):
        assert straight.step(number, LENGTH) == training.step(number, LENGTH)
    sizes = {
        "parameters": total(parameters(training)),
        "optimizer": total(optimizer_tensors(training)),
    }
    sizes["both"] = sum(sizes.values())
    training.optimizer.zero_grad()
    before = allocated()
    training.offload(what)
    assert before - allocated() == sizes[what]
    training.reload(what)
    assert allocated() == before
    for number in range(2, 4):
        assert straight.step(number, LENGTH) == training.step(number, LENGTH)
    assert same(straight.tensors(), training.tensors())


def test_nothing_stays_and_the_host_buffers_are_used_again(training) -> None:
    floor = None
    for number in range(3):
        training.step(number, LENGTH)
        training.offload("both")
        assert allocated() - training.before <= SMALL
        assert torch.cuda.memory_reserved() <= 8 * 2**20  # segments with a scalar in them
        host = torch.cuda.host_memory_stats()["allocated_bytes.current"]
        needed = sum(part._host.nbytes for part in (training.policy._own_memory, training.optimizer._adam_memory))
        assert needed > 0
        # Their sizes are rounded up to a power of two.
        assert needed <= host <= 2 * needed + 2**20
        floor = floor or host
        assert host == floor
        training.reload("both")


def test_offloading_after_a_save_gives_back_what_it_gave_before(training, tmp_path) -> None:
    """R25: nothing of a checkpoint stays on the device."""
    training.step(0, LENGTH)
    training.optimizer.zero_grad()
    before = allocated()
    saved = checkpoint.gather(training.policy, training.optimizer)
    previous = tmp_path / "previous"
    previous.mkdir()
    (previous / "adapter_config.json").write_text("{}")
    checkpoint.write(saved, previous, tmp_path / "staged")
    assert allocated() == before
    del saved
    training.offload("both")
    assert allocated() - training.before <= SMALL
