"""Offloading changes no result. After a restore, tensors have the same sizes and contents as
before, but gradients are zeros."""

import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tandem.model import device
from tandem.model.device import offload
from tandem.model.device.offload import Offload
from tiny import write_random_model
from training.offloading import Training, same, total


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    device.activate("cpu")


def test_contents_and_sizes_come_back_and_views_with_them() -> None:
    whole, other = torch.arange(1000.0), torch.arange(7, dtype=torch.bfloat16)
    view = whole[10:20]
    parked = Offload(contents=True)
    assert parked.park([whole, view, other]) == 4000 + 14
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match="offloaded already"):
        parked.park([torch.ones(3)])
    parked.restore()
    assert torch.equal(whole, torch.arange(1000.0))
    assert torch.equal(view, torch.arange(10.0, 20.0))
    assert view.data_ptr() == whole.data_ptr() + 40
    assert torch.equal(other, torch.arange(7, dtype=torch.bfloat16))
    dropped = Offload(contents=False)
    assert dropped.park([whole]) == 4000
    dropped.restore()
    assert not dropped._host
    assert whole.untyped_storage().nbytes() == 4000


def test_the_host_buffer_is_used_again_and_grows_only_for_more() -> None:
    parked = Offload(contents=True)

    def buffer_after(size: int) -> tuple[int, int]:
        parked.park([torch.ones(size)])
        parked.restore()
        [host] = parked._host
        return host.data_ptr(), host.nbytes

    first = buffer_after(2000)
    assert buffer_after(2000) == buffer_after(100) == first
    assert buffer_after(4000)[1] > first[1]


def test_tensors_may_lie_in_several_host_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch rounds the size of pinned memory up to a power of two. So a single buffer could take
    twice the memory of the tensors."""
    monkeypatch.setattr(offload, "CHUNK", 1024)
    parked = Offload(contents=True)
    for sizes in ((100, 700, 3, 256, 0, 1000), (2000, 5)):
        tensors = [torch.arange(float(size)) for size in sizes]
        parked.park(tensors)
        assert {len(host) for host in parked._host[:-1]} == {1024}
        parked.restore()
        assert all(torch.equal(tensor, torch.arange(float(len(tensor)))) for tensor in tensors)


@pytest.mark.parametrize(
    ("part", "family"),
    [("parameters", "qwen3"), ("optimizer", "qwen3"), ("both", "qwen3"), ("both", "qwen3_moe")],
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
    # If only the optimizer is offloaded, the parameters stay on the device, because the publication
    # of weights needs them.
    if part == "optimizer":
        assert torch.equal(interrupted.base()[0], base[0])
    interrupted.restore(part)
    assert same(interrupted.trained(), before)
    assert same(interrupted.base(), base)
    if part != "parameters":
        buffers = [memory for memory, _ in interrupted.optimizer._gradients]
        assert not any(buffer.any() for buffer in buffers)
        trained = sum(
            parameter.numel() for parameter in interrupted.policy.lora_parameters().values()
        )
        assert sum(buffer.numel() for buffer in buffers) >= trained
    for number in range(2, 4):
        assert straight.step(number) == interrupted.step(number)
    assert same(straight.trained(), interrupted.trained())
    assert not same(interrupted.trained(), before)


def test_offloading_lets_go_of_what_a_stage_has_sent(tmp_path: Path, alone) -> None:
    interrupted, waited = Training(write_random_model(tmp_path / "model"), tmp_path / "adapter"), []
    sent = [torch.zeros(4), torch.zeros(4)]
    living = [weakref.ref(tensor) for tensor in sent]
    for lane in (interrupted.policy.stage._forward, interrupted.policy.stage._backward):
        lane._sending = SimpleNamespace(wait=lambda: waited.append(1)), sent.pop()
    interrupted.offload("parameters")
    assert len(waited) == 2
    assert [reference() for reference in living] == [None, None]
