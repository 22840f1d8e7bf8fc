"""Runs are deleted, and old checkpoints and ended jobs are removed. Files that are still needed
stay, and a death leaves no half-removed directory."""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spool.spool_tools import (
    add_run,
    commit,
    failed,
    maker,
    run_spec,
    serve,
    start,
    submit,
    succeeded,
    train_one,
)
from spool.volume_tools import DiedError, refused, tree
from tandem.config import Settings
from tandem.errors import Conflict, InvalidInput, NotFound
from tandem.spool import Spool, fs, recovery, removal
from tandem.spool.removal import delete_checkpoint, delete_run, prune
from tandem.spool.schema import RLJob, RLLoss

NEWEST = Settings(keep_checkpoints=1)
NOW_OLD = Settings(keep_days=1e-9)  # all ended jobs are too old


@pytest.fixture(autouse=True)
def remains_are_stale(monkeypatch):
    monkeypatch.setattr(recovery, "STALE_SECONDS", -1.0)


def train_logged(spool: Spool, run: str = "r") -> str:
    job = train_one(spool, run)
    spool.paths.log_file(job.spec.id).write_text("printed")
    return job.spec.id


def hours_ago(spool: Spool, job_id: str, hours: float) -> None:
    """Makes an ended job `hours` old."""
    path = spool.paths.job_file(job_id)
    os.utime(path, (time.time() - hours * 3600,) * 2)


def steps_after(spool: Spool, settings: Settings, run: str = "r") -> list[int]:
    prune(spool, settings)
    return spool.checkpoints.steps(run)


def jobs_left(spool: Spool) -> set[str]:
    """The ids of all jobs that have a file on the volume."""
    names = [path.parent.name for path in spool.paths.jobs.rglob("job.json")]
    return {name.split(",")[3].split(".")[0] for name in names}


def test_the_newest_every_mth_and_step_0_stay(spool):
    for _ in range(10):
        train_logged(spool)
    spool.checkpoints.rollback("r", 9)
    before = tree(spool.root)
    for settings in (Settings(), Settings(keep_days=1e6)):
        prune(spool, settings)
        assert tree(spool.root) == before
    assert steps_after(spool, Settings(keep_checkpoints=20)) == list(range(10))
    assert steps_after(spool, Settings(keep_checkpoints=2, keep_every=3)) == [0, 3, 6, 8, 9]
    assert steps_after(spool, Settings(keep_checkpoints=2)) == [0, 8, 9]
    with refused(NotFound, "step", "0 to 9 without those that were removed"):
        spool.checkpoints.path("r", 3)
    assert train_one(spool).spec.base_step == 9
    assert steps_after(spool, NEWEST) == [0, 10]
    spool.checkpoints.rollback("r", 0)
    assert train_one(spool).spec.base_step == 0


def queue_with_reference(spool: Spool, step: int = 2) -> None:
    submit(spool, "j", loss=RLLoss(kl_coef=0.1, kl_reference=step))


def stale_base(spool: Spool) -> None:
    """A queued job whose base step is not the newest step, as after a restore of a backup."""
    job = submit(spool, "j")
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"base_step": 2})})
    spool.paths.job_file("j").write_text(job.model_dump_json())
    directory = spool.paths.job_dir("j")
    directory.rename(directory.with_name(job.key.name))


@pytest.mark.parametrize(
    ("need", "stays"),
    [
        (lambda spool: serve(spool, 2), {2}),
        (lambda spool: spool.checkpoints.pin("r", 2), {2}),
        (queue_with_reference, {2}),
        (lambda spool: queue_with_reference(spool) or spool.queue.claim("me"), {2}),
        (stale_base, {2, 3}),
    ],
    ids=["served", "pinned", "queued reference", "running reference", "base"],
)
def test_what_something_needs_stays(spool: Spool, need: Callable[[Spool], object], stays: set[int]):
    for _ in range(5):
        train_one(spool)
    need(spool)
    before = tree(spool.root)
    for step in {0, 5} | stays:
        with refused(Conflict, "step"):
            delete_checkpoint(spool, "r", step)
    with refused(NotFound, "step"):
        delete_checkpoint(spool, "r", 7)
    assert tree(spool.root) == before
    assert delete_checkpoint(spool, "r", 1).name.startswith(".tmp-")
    assert spool.checkpoints.steps("r") == [0, 2, 3, 4, 5]
    assert steps_after(spool, NEWEST) == sorted({0, 5} | stays)


def test_a_pin_ends_by_hand_and_by_a_rollback(spool):
    for _ in range(4):
        train_one(spool)
    for step in (1, 2, 3):
        spool.checkpoints.pin("r", step)
    spool.checkpoints.unpin("r", 1)
    spool.checkpoints.unpin("r", 1)
    with refused(NotFound, "step"):
        spool.checkpoints.pin("r", 7)
    assert steps_after(spool, NEWEST) == [0, 2, 3, 4]
    spool.checkpoints.rollback("r", 2)
    assert spool.checkpoints.pinned("r") == [2]


def test_a_reference_that_was_removed_is_refused_at_the_door(spool):
    for _ in range(3):
        train_one(spool)
    prune(spool, NEWEST)
    before = tree(spool.root)
    with refused(InvalidInput, "loss.kl_reference", "step 1"):
        queue_with_reference(spool, 1)
    assert tree(spool.root) == before


def test_discarded_checkpoints_go_by_the_age_of_the_rollback(spool):
    for _ in range(3):
        train_one(spool)
    spool.checkpoints.rollback("r", 1)
    prune(spool, Settings(keep_days=1.0))
    old, young = spool.checkpoints.discarded("r")
    old.rename(old.with_name("00000002-" + "0" * 26))
    old.with_name("by-hand").mkdir()
    prune(spool, Settings(keep_days=1.0))
    assert [path.name for path in spool.checkpoints.discarded("r")] == [young.name, "by-hand"]
    assert spool.checkpoints.steps("r") == [0, 1]


def test_whole_weights_of_the_two_newest_and_the_served_step_stay(spool):
    for _ in range(5):
        train_one(spool)
    alone = spool.checkpoints.size("r")
    for step in range(1, 6):
        directory = spool.root / f"runs/r/merged/{step:08d}-0123456789ab"
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(b"x" * 100)
    assert spool.checkpoints.size("r") == alone + 500
    serve(spool, 2)
    prune(spool, Settings())
    assert list(spool.merged.steps("r").values()) == [2, 4, 5]
    spool.served.withdraw("r")
    spool.checkpoints.rollback("r", 3)  # the run's newest steps are 2 and 3
    prune(spool, Settings())
    assert list(spool.merged.steps("r").values()) == [2]
    assert not list(spool.root.glob("runs/r/merged/.*"))
    for _ in range(2):
        train_one(spool)  # by another transport
    prune(spool, Settings())
    assert spool.merged.steps("r") == {}


def test_the_age_of_a_job_counts_from_its_end(spool):
    long_ago = time.time() - 72 * 3600
    for job_id in ("old", "young"):
        job = start(spool, job_id, created=long_ago)
        commit(spool, job)
        spool.queue.finish(job, succeeded(job))
    hours_ago(spool, "old", 30)
    prune(spool, Settings(keep_days=1.0))
    assert [job.spec.id for _, job in spool.jobs.list()] == ["young"]
    with refused(NotFound, "id"):
        spool.jobs.get("old")


def test_a_directory_that_can_not_be_removed_yet_keeps_its_name(spool, monkeypatch):
    """If each attempt at a removal made the name longer, the name would become too long."""
    left = spool.root / "runs" / f"{fs.TEMPORARY}{fs.new_ulid()}"
    left.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        for _ in range(12):
            recovery.sweep(spool)
            assert left.exists()
    recovery.sweep(spool)
    assert not left.exists()


@pytest.mark.parametrize("name", ["uploads", "tunings"])
def test_what_a_dead_request_of_openais_api_left_is_swept_away(spool, name):
    left = spool.root / name / f"{fs.TEMPORARY}{fs.new_ulid()}"
    left.mkdir(parents=True)
    recovery.sweep(spool)
    assert not left.exists()


def test_what_can_not_be_removed_keeps_nothing_of_the_others(spool, monkeypatch):
    for job_id in ("first", "second"):
        spool.queue.finish(start(spool, job_id, created=time.time() - 72 * 3600), failed())
        hours_ago(spool, job_id, 48)
    monkeypatch.setattr(
        removal, "_set_aside_before", lambda *_: (_ for _ in ()).throw(OSError(errno.EACCES, "no"))
    )
    (spool.paths.damaged / "one").mkdir()
    with pytest.raises(OSError, match="no"):
        prune(spool, Settings(keep_days=1.0))
    assert jobs_left(spool) == set()


def test_a_fork_that_takes_long_is_not_swept_away(spool, monkeypatch):
    """The directory of a fork keeps the time at which its first file was made. So the times of
    newer files in the directory count as well."""
    monkeypatch.setattr(recovery, "STALE_SECONDS", 3600.0)
    staged = spool.root / "runs" / f"{fs.TEMPORARY}{fs.new_ulid()}"
    (staged / "checkpoints").mkdir(parents=True)
    (staged / "checkpoints" / "model").touch()
    for path in (staged / "checkpoints", staged):
        os.utime(path, (time.time() - 4000,) * 2)
    recovery.sweep(spool)
    assert staged.exists()
    os.utime(staged / "checkpoints" / "model", (time.time() - 4000,) * 2)
    recovery.sweep(spool)
    assert not staged.exists()


def test_a_fork_whose_files_take_long_to_hash_is_not_swept_away(spool, monkeypatch):
    """In this test each file takes 50 minutes to hash."""
    train_one(spool)
    monkeypatch.setattr(recovery, "STALE_SECONDS", 3600.0)
    sha256_file = fs.sha256_file

    def hash_slowly(path: Path) -> str:
        for staged in spool.root.glob(f"runs/{fs.TEMPORARY}*"):
            for entry in (staged, *staged.rglob("*")):
                os.utime(entry, (0, entry.stat().st_mtime - 3000))
            recovery.sweep(spool)
        return sha256_file(path)

    monkeypatch.setattr(fs, "sha256_file", hash_slowly)
    spool.checkpoints.fork("r", 1, run_spec("copy"))
    assert spool.checkpoints.verify("copy", 0).origin is not None


def damage(spool: Spool, job_id: str, hours: float) -> None:
    """Damages a job's file, as if the job had been set aside `hours` ago."""
    directory = spool.paths.job_dir(job_id)
    spool.paths.job_file(job_id).write_text("{")
    spool.jobs.list()
    assert not directory.exists()
    set_aside_hours_ago(spool, job_id, hours)


def set_aside_hours_ago(spool: Spool, job_id: str, hours: float) -> None:
    (path,) = spool.paths.damaged.glob(f"*,{job_id}.*")
    path.rename(path.with_name(path.name[:-26] + fs.new_ulid(time.time() - hours * 3600)))


def test_damaged_jobs_go_by_the_age_of_their_damage(spool):
    for job_id, hours in (("old", 25), ("young", 23)):
        spool.queue.finish(start(spool, job_id), failed())
        spool.paths.log_file(job_id).write_text("printed")
        damage(spool, job_id, hours)
    submit(spool, "waits")
    damage(spool, "waits", 0)
    (spool.paths.damaged / "by-hand").mkdir()
    before = tree(spool.root)
    prune(spool, NEWEST)
    assert tree(spool.root) == before
    prune(spool, Settings(keep_days=1.0))
    assert jobs_left(spool) == {"young", "waits"}
    assert len(spool.damage()["job"]) == 3
    with refused(NotFound, "id", "there is no job 'old'"):
        spool.jobs.get("old")
    set_aside_hours_ago(spool, "waits", 25)
    prune(spool, Settings(keep_days=1.0))
    assert jobs_left(spool) == {"young"}
    assert (spool.paths.damaged / "by-hand").exists()
    assert submit(spool, "old").spec.id == "old"


def test_a_damaged_job_and_the_next_of_its_id_do_not_disturb_one_another(spool):
    spool.queue.finish(start(spool, "again"), failed())
    damage(spool, "again", 25)
    spool.queue.finish(start(spool, "again"), failed())
    assert [event.type for event in spool.events.read("again")] == ["claimed", "failed"]
    prune(spool, Settings(keep_days=1.0))
    assert spool.damage()["job"] == []
    assert spool.jobs.get("again")[0] == "failed"
    prune(spool, NOW_OLD)
    assert spool.jobs.list() == []
    spool.queue.finish(start(spool, "again"), failed())  # a new job has the id of a removed job
    assert [event.type for event in spool.events.read("again")] == ["claimed", "failed"]


def test_a_run_with_jobs_is_not_deleted(spool):
    submit(spool, "j")
    for change in (lambda: None, lambda: spool.queue.claim("me")):
        change()
        before = tree(spool.root)
        with refused(Conflict, "run", "j "):
            delete_run(spool, "r")
        assert tree(spool.root) == before


def test_a_deleted_run_leaves_nothing_and_another_of_its_name_is_new(spool):
    add_run(spool, "other")
    ids = [train_logged(spool) for _ in range(2)]
    other = train_logged(spool, "other")
    spool.checkpoints.fork("r", 2, run_spec("copy"))
    spool.checkpoints.rollback("r", 1)
    shutil.rmtree(delete_run(spool, "r"))
    assert spool.runs.names() == ["copy", "other"]
    assert jobs_left(spool) == {other}
    with refused(NotFound, "run"):
        delete_run(spool, "r")
    spool.checkpoints.verify("copy", 0)

    new = add_run(spool, "r")
    assert Spool(spool.root).runs.get("r") == spool.runs.get("r") == new
    assert spool.checkpoints.steps("r") == [0]
    assert start(spool, ids[0]).spec.base_step == 0
    assert [event.type for event in spool.events.read(ids[0])] == ["claimed"]


@pytest.mark.parametrize("dies", [True, False])
def test_a_run_is_deleted_while_a_job_ends(spool, monkeypatch, dies):
    """The job's end is written, and its directory has not moved yet. The process that ends the job
    dies, or moves the directory a moment later."""
    job, moves, goes_on = start(spool, "j"), threading.Event(), threading.Event()
    real = fs.rename_dir

    def rename(source: Path, target: Path) -> None:
        monkeypatch.setattr(fs, "rename_dir", real)
        moves.set()
        if dies:
            raise DiedError
        goes_on.wait(60)
        real(source, target)

    monkeypatch.setattr(fs, "rename_dir", rename)
    with ThreadPoolExecutor(2) as pool:
        ending = pool.submit(spool.queue.finish, job, failed())
        assert moves.wait(60)
        if dies:
            assert isinstance(ending.exception(60), DiedError)
        deleting = pool.submit(delete_run, spool, "r")
        if not dies:
            time.sleep(0.2)
            assert not deleting.done()
            goes_on.set()
        shutil.rmtree(deleting.result(60))
    assert jobs_left(spool) == set()
    assert spool.jobs.index.active() == []


def test_a_job_that_was_packed_for_a_deleted_run_is_not_queued_in_the_next_of_its_name(spool):
    def make(job_id: str, base_step: int, directory: Path) -> RLJob:
        shutil.rmtree(delete_run(spool, "r"))
        add_run(spool, "r", seed=1)
        return maker()(job_id, base_step, directory)

    with refused(Conflict, "run", "deleted"):
        spool.queue.submit(make, run="r", job_id="j", fingerprint="f", base_step=None)
    assert spool.jobs.list() == []
    assert jobs_left(spool) == set()


def test_who_waits_for_the_lock_of_a_run_that_goes_does_not_get_it(spool, monkeypatch):
    from tandem.spool import locks

    real = locks._open_locked

    def deleted_meanwhile(path: Path, blocking: bool) -> int:
        fd = real(path, blocking)
        monkeypatch.setattr(locks, "_open_locked", real)
        (spool.root / "runs/r").rename(spool.root / "runs/.tmp-gone")
        add_run(spool, "r")
        return fd

    monkeypatch.setattr(locks, "_open_locked", deleted_meanwhile)
    with refused(NotFound, "run"), spool.runs.lock("r"):
        pytest.fail("it got the lock of another run")
    with spool.runs.lock("r"):
        pass


def test_the_size_of_a_run_follows_its_files(spool):
    def on_disk() -> int:
        files = [
            path
            for part in ("checkpoints", "discarded")
            for path in (spool.root / "runs/r" / part).rglob("*")
        ]
        return sum(path.stat().st_size for path in files if path.is_file())

    def changes() -> None:
        train_one(spool)
        job = start(spool)
        commit(spool, job, b"longer" * 99)
        spool.queue.finish(job, succeeded(job))

    assert spool.checkpoints.size("r") == on_disk() > 0
    for change in (
        changes,
        lambda: spool.checkpoints.rollback("r", 1),
        changes,
        lambda: prune(spool, NOW_OLD),
    ):
        change()
        assert spool.checkpoints.size("r") == on_disk()
    shutil.rmtree(delete_run(spool, "r"))
    add_run(spool, "r")
    assert spool.checkpoints.size("r") == on_disk()


def test_runs_whose_jobs_share_a_directory_are_deleted_at_once(spool, monkeypatch):
    add_run(spool, "other")
    for run in ("r", "other"):
        for _ in range(20):  # more jobs than there are directories
            train_logged(spool, run)
    aside, deleted = removal._set_aside, []

    def delete_between(directories):
        if not deleted:
            deleted.append("other")
            shutil.rmtree(delete_run(spool, "other"))
        return aside(directories)

    monkeypatch.setattr(removal, "_set_aside", delete_between)
    shutil.rmtree(delete_run(spool, "r"))
    assert spool.runs.names() == []
    assert jobs_left(spool) == set()
