"""A resident rank, which stays after a job, makes the same checkpoints as new ranks. A resident
rank reuses its state only if the state is still right."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rank import jobs
from tandem.model import parallel
from tandem.model.weights.base_memory import BaseWeights
from tandem.spool import Spool
from tandem.spool.schema import LoraShape
from tandem.trainer.rank import checkpoint, entry
from tandem.trainer.rank.state import RankState


@pytest.fixture(autouse=True)
def leave() -> Iterator[None]:
    yield
    parallel.destroy()


@pytest.fixture(params=["adapter", "all weights"])
def full(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "all weights":
        monkeypatch.setenv("TANDEM_WEIGHTS", "merged")
        monkeypatch.setenv("TANDEM_TRANSPORT", "volume")
    return bool(request.param == "all weights")


def chain(
    spool: Spool, main: Callable[[Path, str, int], int], full: bool
) -> list[dict[str, bytes]]:
    """Runs jobs. Between two jobs a resident rank must continue with its state, switch to another
    run, or read a checkpoint again. Returns the files of each checkpoint."""
    made = []

    def run(submit: Callable[..., str], name: str, job_id: str, **options: Any) -> None:
        made.append(jobs.files(jobs.run_here(spool, submit(spool, name, job_id, **options), main)))

    run(jobs.submit_sft, "a", "a1", epochs=2)
    # This job continues the run with other settings.
    run(jobs.submit_rl, "a", "a2", learning_rate=3e-3, weight_decay=0.1, beta2=0.9)
    run(jobs.submit_sft, "b", "b1")  # The run `b` has the same shape as the run `a`.
    run(jobs.submit_sft, "a", "a3")  # The state in memory belongs to the run `b`.
    if not full:
        with pytest.MonkeyPatch.context() as patch:
            # This job has another time limit, so it needs new process groups.
            patch.setattr(jobs, "STALL_SECONDS", jobs.STALL_SECONDS + 1)
            run(jobs.submit_sft, "a", "a-other-limit")
        run(jobs.submit_sft, "other-shape", "o1")
    run(jobs.submit_sft, "a", "a4")
    newest = spool.checkpoints.newest("a")
    spool.checkpoints.rollback("a", newest - 1)
    # This job makes the newest step again. The state in memory belongs to the old version of the
    # newest step.
    run(jobs.submit_rl, "a", "a5")
    return made


@pytest.mark.slow
@pytest.mark.sample(1, of="places that train the same bytes")
def test_a_rank_that_stays_makes_the_checkpoints_that_new_ones_make(
    tmp_path: Path, model: Path, full: bool
) -> None:
    made = []
    for name, main in (("new", entry.main), ("stays", entry.resident())):
        spool = Spool.create(tmp_path / name)
        for run in ("a", "b"):
            jobs.make_run(spool, model, run, full=full)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jobs, "LORA", LoraShape(rank=2, alpha=4, targets=("q_proj", "o_proj")))
            jobs.make_run(spool, model, "other-shape")
        made.append(chain(spool, main, full))
        parallel.destroy()
    assert made[0] == made[1]
    assert len({str(files) for files in made[0]}) == len(made[0])


def test_the_state_in_memory_is_used_and_its_checkpoint_is_verified(
    tmp_path: Path, model: Path, full: bool
) -> None:
    """If all weights are trained, ranks exchange weights only for the first job. After the first
    job, ranks have closed the memory through which they share weights."""
    spool, state = Spool.create(tmp_path / "spool"), RankState()
    jobs.make_run(spool, model, full=full)
    main, kept = partial(entry.main, state=state), []
    with (
        mock.patch.object(
            BaseWeights, "exchange", autospec=True, side_effect=BaseWeights.exchange
        ) as exchange,
        mock.patch.object(checkpoint, "load", side_effect=checkpoint.load) as load,
    ):
        for job_id in ("first", "second"):
            made = jobs.run_here(spool, jobs.submit_sft(spool, job_id=job_id), main)
            kept.append(state.model)
    assert kept[0] is kept[1]
    assert (exchange.call_count, load.call_count) == ((1, 0) if full else (2, 1))
    [path, *_] = made.glob("*model*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    error = jobs.fail_here(spool, jobs.submit_sft(spool, job_id="third"), main)
    assert (error.type, error.retriable, "altered" in error.message) == (
        "checkpoint_damaged",
        False,
        True,
    )


def test_another_base_model_under_the_same_name_is_built(tmp_path: Path) -> None:
    """The second model has the first model's name and weights, and another configuration. A
    resident rank reads the weights for every job. A resident rank reads a model's configuration
    only when the rank builds the model."""
    model = jobs.make_model(tmp_path / "model")
    losses = []
    main = entry.resident()
    for name in ("before", "after"):
        spool = Spool.create(tmp_path / name)
        jobs.make_run(spool, model)
        jobs.run_here(spool, jobs.submit_sft(spool), main)
        losses.append(jobs.steps_of(spool, "sft")[0]["loss"])
        jobs.write_random_model(model, seed=1, rms_norm_eps=0.1)
    assert losses[0] != losses[1]
