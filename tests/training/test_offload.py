"""Offloading changes no result: sizes and contents come back exactly, gradients as zeros."""

from pathlib import Path

import pytest
import torch

from tandem.model import device
from tandem.model.device.offload import Offload
from tiny import write_random_model
from training.offloading import Training, same, total


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    device.activate("cpu")


def test_contents_and_sizes_come_back_and_views_with_them() -> None:
    whole, other = torch.arange(1000.0), torch.arange(7, dtype=torch.bfloat16)
    view = whole[10:20]
    offload = Offload(contents=True)
    assert offload.park([whole, view, other]) == 4000 + 14
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match="offloaded already"):
        offload.park([torch.ones(3)])
    offload.restore()
    assert torch.equal(whole, torch.arange(1000.0))
    assert torch.equal(view, torch.arange(10.0, 20.0))
    assert view.data_ptr() == whole.data_ptr() + 40
    assert torch.equal(other, torch.arange(7, dtype=torch.bfloat16))
    dropped = Offload(contents=False)
    assert dropped.park([whole]) == 4000
    dropped.restore()
    assert dropped._host is None
    assert whole.untyped_storage().nbytes() == 4000


def test_the_host_buffer_is_used_again_and_grows_only_for_more() -> None:
    offload = Offload(contents=True)

    def buffer_after(size: int) -> tuple[int, int]:
        offload.park([torch.ones(size)])
        offload.restore()
        assert offload._host is not None
        return offload._host.data_ptr(), offload._host.nbytes

    first = buffer_after(2000)
    assert buffer_after(2000) == buffer_after(100) == first
    assert buffer_after(4000)[1] > first[1]


@pytest.mark.parametrize(
    ("part", "family"), [("parameters", "qwen3"), ("optimizer", "qwen3"), ("both", "qwen3"), ("both", "qwen3_moe")]
)
def test_training_continues_bit_for_bit(tmp_path: Path, part: str, family: str, alone) -> None:
    model, adapter = write_random_model(tmp_path / "model", family=family), tmp_path / "adapter"
    straight, interrupted = Training(model, adapter), Training(model, adapter)
    for number in range(2):
        assert straight.step(number) == interrupted.step(number)
    before, base = interrupted.trained(), [tensor.clone() for tensor in interrupted.base()]
    expected = total(interrupted.device_tensors(part))
    assert interrupted.offload(part) == expected
    assert total(interrupted.device_tensors(part)) == 0
    if part == "optimizer":  # publishing weights needs only the parameters
        assert torch.equal(interrupted.base()[0], base[0])
    interrupted.restore(part)
    assert same(interrupted.trained(), before)
    assert same(interrupted.base(), base)
    if part != "parameters":
        buffers = [memory for memory, _ in interrupted.optimizer._gradients]
        assert not any(buffer.any() for buffer in buffers)
        trained = sum(parameter.numel() for parameter in interrupted.policy.lora_parameters().values())
        assert sum(buffer.numel() for buffer in buffers) >= trained
    for number in range(2, 4):
        assert straight.step(number) == interrupted.step(number)
    assert same(straight.trained(), interrupted.trained())
    assert not same(interrupted.trained(), before)
