"""The tests check how many bytes of GPU memory are freed when a policy is offloaded, and how many
are taken when it is restored. No other memory stays on the GPU."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.model import device, parallel
from tandem.model.device import memory
from tandem.trainer.rank import checkpoint
from tiny import write_random_model
from training.offloading import Training, same, total

pytestmark = pytest.mark.gpu

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
LENGTH = 512
SMALL = 1024  # The maximum number of bytes of the optimizer's scalars.


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = SHAPE if request.param == "qwen3" else SHAPE | EXPERTS
    return write_random_model(tmp_path_factory.mktemp("model"), family=request.param, **shape)


@pytest.fixture
def empty() -> Iterator[int]:
    """The bytes that are allocated before a `Training` is built."""
    device.activate("cuda")
    torch.use_deterministic_algorithms(True, warn_only=True)
    parallel.init_parallel()
    yield allocated()
    parallel.destroy()


@pytest.fixture
def training(model: Path, tmp_path: Path, empty: int) -> Training:
    return Training(model, tmp_path / "adapter")


def allocated() -> int:
    gc.collect()  # The garbage collection frees autograd's graphs of earlier steps.
    memory.release_cached()
    # The requested bytes are counted, because the allocator may give up to 1 MiB more for a large
    # block.
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.parametrize("part", ["parameters", "optimizer", "both"])
def test_each_part_gives_back_its_bytes_and_training_continues_bit_for_bit(
    training, model, tmp_path, part
) -> None:
    straight = Training(model, tmp_path / "adapter")
    for number in range(2):
        assert straight.step(number, LENGTH) == training.step(number, LENGTH)
    size = total(training.device_tensors(part))
    training.optimizer.zero_grad()
    before = allocated()
    training.offload(part)
    assert before - allocated() == size
    training.restore(part)
    assert allocated() == before
    for number in range(2, 4):
        assert straight.step(number, LENGTH) == training.step(number, LENGTH)
    assert same(straight.trained(), training.trained())


def test_nothing_stays_and_the_host_buffers_are_used_again(training, empty) -> None:
    floor = None
    for number in range(3):
        training.step(number, LENGTH)
        training.offload("both")
        assert allocated() - empty <= SMALL
        assert torch.cuda.memory_reserved() <= 8 * 2**20  # Segments with scalars stay reserved.
        host = torch.cuda.host_memory_stats()["allocated_bytes.current"]
        parts = training.policy._own_memory, training.optimizer._adam_memory
        needed = sum(chunk.nbytes for part in parts for chunk in part._host)
        assert needed > 0
        # torch rounds the sizes of the host's buffers up to a power of two.
        assert needed <= host <= 2 * needed + 2**20
        floor = floor or host
        assert host == floor
        training.restore("both")


def test_offloading_after_a_save_gives_back_what_it_gave_before(training, empty, tmp_path) -> None:
    """Writing a checkpoint leaves no tensors on the device."""
    training.step(0, LENGTH)
    training.optimizer.zero_grad()
    before = allocated()
    contents = checkpoint.gather_contents(training.policy, training.optimizer)
    checkpoint.write_adapter(contents, b"{}", tmp_path / "staged")
    assert allocated() == before
    del contents
    training.offload("both")
    assert allocated() - empty <= SMALL
