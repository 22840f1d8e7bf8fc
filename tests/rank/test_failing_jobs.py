"""Jobs that can't be run: each ends in an error that names the cause, and changes no checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rank import jobs
from tandem.data.inputs import Group, Trajectory, Turn
from tandem.errors import CheckpointDamaged, InvalidInput
from tandem.families.adapter import WEIGHTS_FILE
from tandem.spool import Spool
from tandem.spool.schema import RLLoss
from tandem.trainer.rank import checkpoint, model_loader, session, worker
from tandem.training.steps import Training


def flipped(content: bytes) -> bytes:
    """With another last bit."""
    return content[:-1] + bytes([content[-1] ^ 1])


def test_base_weights_that_can_t_be_read_are_reported_although_other_threads_wait(spool: Spool, monkeypatch) -> None:
    def fails(*arguments: Any, **cut: int) -> None:
        raise InvalidInput("model.safetensors can't be read: it ends at byte 7", field="base_model")

    monkeypatch.setattr(session, "device", jobs.gpu_like())
    monkeypatch.setattr(model_loader, "load_weights", fails)
    error = jobs.fail_here(spool, jobs.submit_sft(spool))
    assert (error.type, error.retriable) == ("invalid_input", False)
    assert "ends at byte 7" in error.message


def test_a_checkpoint_that_exists_is_kept_and_another_jobs_is_a_conflict(spool: Spool) -> None:
    job = jobs.claim(spool, jobs.submit_sft(spool))
    assert worker.main(spool.root, "sft", 1) == 0
    before = spool.checkpoints.manifest("r", 1)
    assert worker.main(spool.root, "sft", 1) == 0
    assert spool.checkpoints.manifest("r", 1) == before
    manifest = spool.checkpoints.path("r", 1) / "manifest.json"
    manifest.write_text(before.model_copy(update={"job": "somebody"}).model_dump_json())
    assert worker.main(spool.root, "sft", 1) == 1
    error = jobs.error_of(spool, job)
    assert error.type == "conflict"
    assert "somebody" in error.message


@pytest.mark.parametrize(
    ("file", "damage"),
    [(WEIGHTS_FILE, "altered"), (checkpoint.OPTIMIZER_FILE, "missing"), (checkpoint.OPTIMIZER_FILE, "not listed")],
)
def test_a_damaged_checkpoint_fails_the_job(file: str, damage: str, spool: Spool) -> None:
    """R16: for the adapter and for the optimizer's state, also if the manifest doesn't list it. Nothing is reset."""
    directory = jobs.run_here(spool, jobs.submit_sft(spool, job_id="first"))
    path = directory / file
    if damage == "altered":
        path.write_bytes(flipped(path.read_bytes()))
    else:
        path.unlink()
    if damage == "not listed":
        manifest = json.loads((directory / "manifest.json").read_text())
        del manifest["files"][file]
        (directory / "manifest.json").write_text(json.dumps(manifest))
    error = jobs.fail_here(spool, jobs.submit_sft(spool, job_id="second"))
    assert (error.type, error.retriable) == ("checkpoint_damaged", False)
    assert Path(file).name in error.message
    assert ("missing" if damage == "not listed" else damage) in error.message
    assert spool.checkpoints.steps("r") == [0, 1]


def test_values_that_are_not_finite_are_named_and_no_checkpoint_is_made(spool: Spool) -> None:
    """The largest advantage that float32 can hold, at a ratio of 5."""
    groups = jobs.random_groups(0)
    turn = Turn(prompt_token_ids=[1, 2], token_ids=[3, 4], logprobs=[-20.0, -20.0])
    groups[0] = Group(trajectories=[Trajectory(turns=[turn], reward=1.0, advantage=3e38), *groups[0].trajectories])
    error = jobs.fail_here(spool, jobs.submit_rl(spool, groups=groups, grad_accumulation_sequences=64))
    assert error.type == "non_finite"
    assert "optimizer step 1 of 1: not finite: loss; the gradient of " in error.message
    assert "lora_B.weight" in error.message
    assert spool.checkpoints.steps("r") == [0]


def test_an_unknown_reference_checkpoint_fails_the_job(spool: Spool) -> None:
    error = jobs.fail_here(spool, jobs.submit_rl(spool, loss=RLLoss(kl_coef=0.1, kl_reference=5)))
    assert error.type == "invalid_input"
    assert "loss.kl_reference" in error.message
    assert "checkpoint 5" in error.message


def test_running_out_of_memory_has_an_error_type_and_a_last_beat(spool: Spool, monkeypatch) -> None:
    original = Training._optimizer_step

    def second_runs_out(training, step, *rest):
        if step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(training, step, *rest)

    monkeypatch.setattr(Training, "_optimizer_step", second_runs_out)
    error = jobs.fail_here(spool, jobs.submit_sft(spool, epochs=4))
    assert (error.type, error.retriable) == ("oom", True)
    assert "Tried to allocate" in error.message
    beat = spool.jobs.beats("sft", 1)[0]
    assert (beat.phase, beat.step) == ("out of memory", 1)


@pytest.mark.parametrize("name", [WEIGHTS_FILE, checkpoint.OPTIMIZER_FILE])
def test_what_the_volume_alters_while_it_is_written_is_noticed_by_whoever_reads_it(
    spool: Spool, monkeypatch, name: str
) -> None:
    write, read = Path.write_bytes, Path.read_bytes

    def flip(path: Path, content: bytes) -> int:
        return write(path, flipped(content) if path.match(f"*/{name}") else content)

    def from_page_cache(path: Path) -> bytes:
        return flipped(read(path)) if path.match(f"*/{name}") else read(path)

    monkeypatch.setattr(Path, "write_bytes", flip)
    monkeypatch.setattr(Path, "read_bytes", from_page_cache)  # which still has what was written
    jobs.claim(spool, jobs.submit_sft(spool))
    assert worker.main(spool.root, "sft", 1) == 0
    with pytest.raises(CheckpointDamaged, match=f"{name} is altered"):
        spool.checkpoints.verify("r", 1)
