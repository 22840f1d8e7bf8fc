"""A rank that stays makes the same checkpoints as new ones, and uses what it kept only where it is still right."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from rank import jobs
from tandem.model import parallel
from tandem.spool import Spool
from tandem.spool.schema import LoraShape
from tandem.trainer.rank import worker
from tandem.trainer.rank.session import RankState


@pytest.fixture(autouse=True)
def leave():
    yield
    parallel.destroy()


def chain(spool: Spool, main: Callable[[Path, str, int], int]) -> dict[str, dict[str, str]]:
    """Run jobs for which a resident rank continues, switches and reads again; sha256 of each checkpoint's files."""
    made = {}

    def run(submit, name: str, job_id: str, **options) -> None:
        step = int(jobs.run_here(spool, submit(spool, name, job_id, **options), main).name)
        made[job_id] = {file: entry.sha256 for file, entry in spool.checkpoints.verify(name, step).files.items()}

    run(jobs.submit_sft, "a", "a1", epochs=2)
    run(jobs.submit_rl, "a", "a2", learning_rate=3e-3, weight_decay=0.1, beta2=0.9)  # continues, with other settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "STALL_SECONDS", jobs.STALL_SECONDS + 1)  # needs new process groups
        run(jobs.submit_sft, "a", "a2-other-limit")
    run(jobs.submit_sft, "b", "b1")  # another run of the same shape
    run(jobs.submit_sft, "a", "a3")  # the state in memory is b's
    run(jobs.submit_sft, "other-shape", "o1")
    run(jobs.submit_sft, "a", "a4")
    spool.checkpoints.rollback("a", 4)
    run(jobs.submit_rl, "a", "a5")  # makes step 5 again; the state in memory is that of the old step 5
    return made


def test_a_rank_that_stays_makes_the_checkpoints_that_new_ones_make(tmp_path: Path, model: Path) -> None:
    made = {}
    for name, main in (("new", worker.main), ("stays", worker.resident())):
        spool = Spool.create(tmp_path / name)
        for run in ("a", "b"):
            jobs.make_run(spool, model, run)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jobs, "LORA", LoraShape(rank=2, alpha=4, targets=("q_proj", "o_proj")))
            jobs.make_run(spool, model, "other-shape")
        made[name] = chain(spool, main)
        parallel.destroy()
    assert made["stays"] == made["new"]
    assert len({files["adapter_model.safetensors"] for files in made["new"].values()}) == 8


def test_the_state_in_memory_is_used_and_its_checkpoint_is_verified(spool: Spool, monkeypatch) -> None:
    sources = []
    check = RankState.check_checkpoint

    def listening(self, *arguments):
        checked = check(self, *arguments)
        if not checked.exception():
            sources.append("memory" if checked.result() is None else "files")
        return checked

    monkeypatch.setattr(RankState, "check_checkpoint", listening)
    main = partial(worker.main, state=RankState())
    for job_id in ("first", "second"):
        made = jobs.run_here(spool, jobs.submit_sft(spool, job_id=job_id), main)
    assert sources == ["files", "memory"]
    path = made / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    error = jobs.fail_here(spool, jobs.submit_sft(spool, job_id="third"), main)
    assert (error.type, error.retriable, "altered" in error.message) == ("checkpoint_damaged", False, True)


def test_another_base_model_under_the_same_name_is_built(tmp_path: Path) -> None:
    """It has the same weights, which are read for every job, and another configuration, which is not."""
    model = jobs.make_model(tmp_path / "model")
    losses = []
    main = worker.resident()
    for name in ("before", "after"):
        spool = Spool.create(tmp_path / name)
        jobs.make_run(spool, model)
        jobs.run_here(spool, jobs.submit_sft(spool), main)
        losses.append(jobs.steps_of(spool, "sft")[0]["loss"])
        jobs.write_random_model(model, seed=1, rms_norm_eps=0.1)
    assert losses[0] != losses[1]
