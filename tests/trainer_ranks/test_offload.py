"""Offloading changes nothing that is computed: sizes and contents come back exactly, gradients as zeros."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.model import device, parallel
from tandem.model.device.offload import Offload
from tandem.spool import Spool
from tandem.spool.schema import LoraShape
from tandem.trainer.rank import worker
from tandem.trainer.rank.resident import RankState
from trainer_ranks import jobs
from trainer_ranks.offloading import SETTINGS, Training, adapter_for, same, total


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def alone():
    device.activate("cpu")
    parallel.init_parallel()
    yield
    parallel.destroy()


def test_contents_and_sizes_come_back_and_views_with_them() -> None:
    device.activate("cpu")
    whole, other = torch.arange(1000.0), torch.arange(7, dtype=torch.bfloat16)
    view = whole[10:20]
    offload = Offload(contents=True)
    assert offload.park([whole, view, other]) == 4000 + 14
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    offload.restore()
    assert torch.equal(whole, torch.arange(1000.0))
    assert torch.equal(view, torch.arange(10.0, 20.0))
    assert view.data_ptr() == whole.data_ptr() + 40
    assert torch.equal(other, torch.arange(7, dtype=torch.bfloat16))


def test_the_host_buffer_is_used_again_and_grows_only_for_more() -> None:
    device.activate("cpu")
    offload = Offload(contents=True)

    def buffer_after(size: int) -> tuple[int, int]:
        offload.park([torch.ones(size)])
        offload.restore()
        assert offload._host is not None
        return offload._host.data_ptr(), offload._host.nbytes

    first = buffer_after(2000)
    assert buffer_after(2000) == buffer_after(100) == first
    assert buffer_after(4000)[1] > first[1]


def test_what_is_dropped_has_no_host_copy_but_its_size() -> None:
    device.activate("cpu")
    tensor, offload = torch.ones(300), Offload(contents=False)
    assert offload.park([tensor]) == 1200
    assert offload._host is None
    offload.restore()
    assert tensor.untyped_storage().nbytes() == 1200


def test_parking_twice_is_refused() -> None:
    device.activate("cpu")
    offload = Offload(contents=True)
    offload.park([torch.ones(3)])
    with pytest.raises(RuntimeError, match="offloaded already"):
        offload.park([torch.ones(3)])


@pytest.mark.parametrize(
    ("what", "family"),
    [("parameters", "qwen3"), ("optimizer", "qwen3"), ("both", "qwen3"), ("both", "qwen3_moe")],
)
def test_training_goes_on_bit_for_bit(tmp_path: Path, what: str, family: str, alone) -> None:
    model = jobs.make_model(tmp_path / "model", family)
    adapter = adapter_for(model, tmp_path / "adapter")
    straight, interrupted = Training(model, adapter), Training(model, adapter)
    for number in range(2):
        assert straight.step(number) == interrupted.step(number)
    before, base = interrupted.tensors(), [tensor.clone() for tensor in interrupted.base()]
    expected = total(_device_tensors(interrupted, what))
    assert interrupted.offload(what) == expected
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in _device_tensors(interrupted, what))
    if what == "optimizer":  # publishing weights needs just the parameters
        assert torch.equal(interrupted.base()[0], base[0])
    interrupted.reload(what)
    assert same(interrupted.tensors(), before)
    assert all(torch.equal(now, was) for now, was in zip(interrupted.base(), base, strict=True))
    if what != "parameters":
        buffers = interrupted.optimizer._gradients.buffers
        assert all(not buffer.grad_data.any() for buffer in buffers)
        assert sum(buffer.grad_data.numel() for buffer in buffers) >= sum(
            parameter.numel() for parameter in interrupted.policy.lora_parameters().values()
        )
    for number in range(2, 4):
        assert straight.step(number) == interrupted.step(number)
    assert same(straight.tensors(), interrupted.tensors())
    assert not same(interrupted.tensors(), before)


def _device_tensors(training: Training, what: str) -> list[torch.Tensor]:
    state = training.optimizer.state()
    own = [*training.policy.lora_parameters().values(), *training.base(), training.policy._inv_freq]
    optimizer = [*state.exp_avg.values(), *state.exp_avg_sq.values()]
    optimizer += [buffer.grad_data for buffer in training.optimizer._gradients.buffers]
    return {"parameters": own, "optimizer": optimizer, "both": own + optimizer}[what]


def test_a_second_adam_begins_at_nothing_with_its_own_settings(model: Path, tmp_path: Path, alone) -> None:
    adapter = adapter_for(model, tmp_path / "adapter")
    used = Training(model, adapter)
    used.step(0)
    used.policy.load_adapter(adapter)
    other = SETTINGS.model_copy(update={"learning_rate": 3e-3, "beta2": 0.9, "weight_decay": 0.0})
    used.optimizer.reset(other)
    assert used.optimizer.state().step == 0
    fresh = Training(model, adapter)
    fresh.optimizer.reset(other)
    assert used.step(1) == fresh.step(1)
    assert same(used.tensors(), fresh.tensors())


# ---------------------------------------------------------------- jobs of a rank that stays


def _chain(spool: Spool, main) -> dict[str, dict[str, str]]:
    """Jobs one after another that make a rank keep, continue, switch and read; sha256 of each checkpoint's files."""
    found = {}

    def run(submit, name: str, job_id: str, **options) -> None:
        submit(spool, name, job_id, **options)
        job = jobs.claim(spool, job_id)
        assert main(spool.root, job_id, 1) == 0, jobs.error_of(spool, job)
        jobs.finish(spool, job)
        step = spool.checkpoints.newest(name)
        found[job_id] = {file: entry.sha256 for file, entry in spool.checkpoints.verify(name, step).files.items()}

    run(jobs.submit_sft, "a", "a1", epochs=2)
    run(jobs.submit_rl, "a", "a2", learning_rate=3e-3, weight_decay=0.1)  # goes on, with other settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "STALL_SECONDS", jobs.STALL_SECONDS + 1)  # new process groups, and all else with them
        run(jobs.submit_sft, "a", "a2-other-bound")
    run(jobs.submit_sft, "b", "b1")  # another run of the same shape
    run(jobs.submit_sft, "a", "a3")  # back: what is in memory is b's
    run(jobs.submit_sft, "other-shape", "o1")
    run(jobs.submit_sft, "a", "a4")
    spool.checkpoints.rollback("a", 4)
    run(jobs.submit_rl, "a", "a5")  # step 5 again, from another state than the one in memory
    return found


def test_a_rank_that_stays_makes_the_checkpoints_that_new_ones_make(tmp_path: Path, model: Path) -> None:
    made = {}
    for name, main in (("new", worker.main), ("stays", worker.resident())):
        spool = Spool.create(tmp_path / name)
        for run in ("a", "b"):
            jobs.make_run(spool, model, run)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jobs, "LORA", LoraShape(rank=2, alpha=4, targets=("q_proj", "o_proj")))
            jobs.make_run(spool, model, "other-shape")
        made[name] = _chain(spool, main)
        parallel.destroy()
    assert made["stays"] == made["new"]
    assert len({files["adapter_model.safetensors"] for files in made["new"].values()}) == 8


def test_what_is_in_memory_is_used_only_for_the_checkpoint_it_is(tmp_path: Path, model: Path) -> None:
    spool = Spool.create(tmp_path / "spool")
    jobs.make_run(spool, model)
    state, read = RankState(), []

    def main(root: Path, job_id: str, attempt: int) -> int:
        return worker.main(root, job_id, attempt, state)

    original = RankState.check_checkpoint

    def listening(self, *arguments):
        checked = original(self, *arguments)
        if not checked.exception():
            read.append("memory" if checked.result() is None else "files")
        return checked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankState, "check_checkpoint", listening)
        for number, job_id in enumerate(("first", "second", "third")):
            if number == 2:  # damaged: in memory or not, the job must say so
                path = spool.checkpoints.path("r", 2) / "adapter_model.safetensors"
                path.write_bytes(path.read_bytes()[:-1] + b"x")
            jobs.submit_sft(spool, job_id=job_id)
            job = jobs.claim(spool, job_id)
            status = main(spool.root, job_id, 1)
            if number == 2:
                assert status == 1
                assert "altered" in jobs.error_of(spool, job).message
            else:
                assert status == 0
                jobs.finish(spool, job)
    assert read == ["files", "memory"]
    parallel.destroy()


def test_another_base_model_under_the_same_name_is_loaded(tmp_path: Path) -> None:
    """What is kept was made from files; if those changed, it is of no use."""
    model = jobs.make_model(tmp_path / "model")
    losses = []
    main = worker.resident()
    for name in ("before", "after"):
        spool = Spool.create(tmp_path / name)
        jobs.make_run(spool, model)
        jobs.submit_sft(spool, job_id="sft")
        job = jobs.claim(spool, "sft")
        assert main(spool.root, "sft", 1) == 0, jobs.error_of(spool, job)
        losses.append(jobs.steps_of(spool, "sft")[0]["loss"])
        jobs.write_random_model(model, seed=99)
    parallel.destroy()
    assert losses[0] != losses[1]
