"""The publisher's actions after two kinds of removal: a run is deleted, or a run's old checkpoints
and jobs are removed."""

import shutil

import pytest

from inference.stage import Stage, make_run
from tandem.config import Settings
from tandem.spool.removal import delete_run, prune


def delete(stage: Stage) -> None:
    shutil.rmtree(delete_run(stage.spool, "run"))


@pytest.mark.parametrize("restarted", [False, True])
def test_the_steps_of_a_deleted_run_are_unloaded_and_no_others(
    stage: Stage, restarted: bool
) -> None:
    make_run(stage.spool, "other", stage.model)
    stage.vllm.adapters["run@x"] = stage.vllm.adapters["of-another-spool@3"] = ("/somewhere", 0.0)
    publisher = stage.publisher()
    stage.step(0.3)
    publisher.once()
    assert stage.listed() == ["of-another-spool@3", "other@0", "run@0", "run@1", "run@x"]
    delete(stage)
    (stage.publisher() if restarted else publisher).once()
    assert stage.listed() == ["of-another-spool@3", "other@0", "run@x"]


def test_a_run_that_cannot_be_read_is_not_deleted(stage: Stage) -> None:
    publisher = stage.publisher()
    publisher.once()
    root, away = stage.spool.root, stage.spool.root.with_name("away")
    root.rename(away)
    root.mkdir()  # The mount point of a volume that is not mounted is an empty directory.
    publisher.once()
    assert stage.listed() == ["run@0"]
    root.rmdir()
    away.rename(root)
    publisher.once()
    assert stage.served() == (0, None)
    (stage.spool.paths.run_dir("run") / "run.json").write_text("{")
    stage.publisher().once()
    assert stage.listed() == ["run@0"]


def test_a_new_run_of_the_same_name_is_served_and_the_old_one_is_not(stage: Stage) -> None:
    publisher = stage.publisher()
    stage.step(0.3)
    publisher.once()
    delete(stage)
    make_run(stage.spool, "run", stage.model)
    stage.effects = [0.0]
    publisher.once()
    assert (stage.served(), stage.listed()) == ((0, None), ["run@0"])
    stage.step(0.7)
    publisher.once()
    assert stage.served() == (1, None)
    assert stage.vllm.adapters["run@1"][1] == pytest.approx(0.7)


def test_a_step_that_was_removed_by_age_is_not_taken_from_those_who_sample_from_it(
    stage: Stage,
) -> None:
    publisher = stage.publisher(grace=60.0)
    stage.step(0.3)
    publisher.once()
    stage.step(0.5)
    stage.step(0.7)
    prune(stage.spool, Settings(keep_checkpoints=1))  # step 1 stays because it is served
    assert stage.spool.checkpoints.steps("run") == [0, 1, 3]
    publisher.once()
    prune(stage.spool, Settings(keep_checkpoints=1))
    assert stage.spool.checkpoints.steps("run") == [0, 3]
    publisher.once()
    assert "run@1" in stage.listed(), "a conversation may go on within the grace"
    stage.publisher(grace=0.0).once()
    assert stage.listed() == ["run@0", "run@3"]


def test_no_events_come_back_for_a_job_that_was_removed(stage: Stage) -> None:
    stage.step(0.3, job="job-1")
    shutil.rmtree(stage.spool.paths.job_dir("job-1"))
    stage.publisher().once()
    assert stage.served() == (1, None)
    assert not stage.spool.paths.events_file("job-1").exists()
