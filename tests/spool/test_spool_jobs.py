"""The life of a job."""

import json
import os
import re
import time
from itertools import pairwise

import pytest

from spool.spool_tools import (
    LOST,
    add_run,
    commit,
    failed,
    job_path,
    maker,
    stage,
    start,
    submit,
    succeeded,
)
from spool.volume_tools import refused, temporary_names, tree
from tandem.errors import Conflict, InvalidInput, NotFound, SpoolUnusable
from tandem.spool import Spool, fs, paths, recovery
from tandem.spool.attempt import Attempt
from tandem.spool.events import Events
from tandem.spool.recovery import recover
from tandem.spool.removal import delete_run
from tandem.spool.schema import JobError, JobResult, RLLoss

RUNNING = ["attempts", "data", "events.jsonl", "job.json", "lease.json"]


def types(spool: Spool, job_id: str) -> list[str]:
    return [event.type for event in spool.events.read(job_id)]


def places(spool: Spool, job_id: str) -> list[str]:
    """The place of the job's directory below jobs/, and the directory's content."""
    (directory,) = [path for path in spool.paths.jobs.rglob(f"*,{job_id}*") if path.is_dir()]
    found = [directory.relative_to(spool.paths.jobs).parts[0]]
    found += sorted(path.name for path in directory.iterdir())
    return found + ["active"] * len([*spool.paths.active.glob(f"*,{job_id}")])


def test_the_whole_way(spool):
    job, new = spool.queue.submit(maker(), run="r", job_id="j", fingerprint="f", base_step=0)
    assert new
    assert spool.jobs.get("j") == ("queued", job)
    assert spool.root / job.spec.data.path == spool.paths.data_dir("j")
    assert (spool.paths.data_dir("j") / "tokens.npy").read_bytes() == b"tokens of j"
    claimed = spool.queue.claim("me")
    assert (claimed.attempt, claimed.spec) == (1, job.spec)
    assert spool.jobs.get("j") == ("running", claimed)
    assert spool.paths.work_dir("j", 1).is_dir()
    lease = spool.leases.get("j")
    assert (lease.runner, lease.pid, lease.host, lease.attempt) == (
        "me",
        os.getpid(),
        os.uname().nodename,
        1,
    )
    assert places(spool, "j") == ["live", *RUNNING, "active"]
    commit(spool, claimed)
    spool.paths.log_file("j").write_text("a log")
    assert spool.queue.finish(claimed, succeeded(claimed)) == "succeeded"
    state, done = spool.jobs.get("j")
    assert (state, done.result.step) == ("succeeded", 1)
    assert places(spool, "j") == ["ended", "events.jsonl", "job.json", "log"]
    assert [(event.type, event.data.get("step")) for event in spool.events.read("j")] == [
        ("claimed", None),
        ("succeeded", 1),
    ]
    assert temporary_names(spool.root) == []


@pytest.mark.parametrize("name", ["log", "events"])
def test_a_reader_finds_the_file_of_a_job_that_ends_meanwhile(spool, name):
    """The job's directory moves after the reader has computed the file's path."""
    spool.queue.submit(maker(), run="r", job_id="j", fingerprint="f", base_step=0)
    claimed = spool.queue.claim("me")
    commit(spool, claimed)
    spool.paths.log_file("j").write_text("a log\n")
    locate, found = getattr(spool.paths, f"{name}_file"), []

    def locate_then_end(job_id):
        found.append(locate(job_id))
        if len(found) == 1:
            assert spool.queue.finish(claimed, succeeded(claimed)) == "succeeded"
        return found[-1]

    with spool.paths.open_file(locate_then_end, "j") as file:
        last_line = file.read().splitlines()[-1].decode()
    assert [path.exists() for path in found] == [False, True]
    assert ("a log" if name == "log" else '"type": "succeeded"') in last_line
    with pytest.raises(FileNotFoundError):  # an ended job has no lease
        spool.paths.open_file(spool.paths.lease_file, "j")


def test_the_same_id_twice_is_one_job(spool):
    add_run(spool, "q")

    def again(**changed):
        arguments = {"run": "r", "job_id": "j", "fingerprint": "f", "base_step": 0} | changed
        return spool.queue.submit(
            lambda *_: pytest.fail("nothing must be packed again"), **arguments
        )

    first = submit(spool, "j")
    assert again() == (first, False)
    claimed = spool.queue.claim("me")
    assert again() == (claimed, False)
    spool.queue.finish(claimed, failed())
    assert again() == (spool.jobs.get("j")[1], False)
    before = tree(spool.root)
    for changed in ({"fingerprint": "g"}, {"run": "q"}):
        with refused(Conflict, "id", match="in use"):
            again(**changed)
    assert tree(spool.root) == before


def test_the_chain_of_base_steps(spool):
    assert submit(spool, "a", base_step=0).spec.base_step == 0
    assert submit(spool, "b").spec.base_step == 1
    for wrong in (0, 1, 3):
        before = tree(spool.root)
        with refused(Conflict, "base_step", match="goes on from step 2"):
            submit(spool, "c", base_step=wrong)
        assert tree(spool.root) == before
    assert submit(spool, "c", base_step=2).spec.base_step == 2
    a = spool.queue.claim("me")
    commit(spool, a)  # job `a` still runs although its checkpoint exists; it must not count twice
    assert spool.queue.next_base("r") == 3
    spool.queue.finish(a, succeeded(a))
    assert spool.queue.next_base("r") == 3
    b = spool.queue.claim("me")
    assert b.spec.id == "b"
    spool.queue.finish(b, failed())
    # Job `c` can't start from step 2, because no job makes step 2. The next job starts from the end
    # of the chain.
    assert [job.spec.id for _, job in spool.jobs.pending("r")] == ["c"]
    assert spool.queue.next_base("r") == 1


def test_a_reference_may_be_a_step_that_queued_jobs_make(spool):
    submit(spool, "a")
    submit(spool, "b")
    assert submit(spool, "c", loss=RLLoss(kl_coef=0.1, kl_reference=2)).spec.base_step == 2
    with refused(InvalidInput, "loss.kl_reference", match="step 4 will not exist"):
        submit(spool, "d", loss=RLLoss(kl_coef=0.1, kl_reference=4))


def test_a_submission_that_fails_leaves_no_trace(spool):
    before = tree(spool.root)

    def make(job_id, base_step, directory):
        maker()(job_id, base_step, directory)
        raise RuntimeError("packing failed")

    with pytest.raises(RuntimeError):
        spool.queue.submit(make, run="r", job_id=None, fingerprint="f", base_step=None)
    assert tree(spool.root) == before


def test_claims_are_oldest_first_and_one_per_run(spool):
    """In a run the job with the lower base step counts as older, even if a second controller's
    clock is an hour behind."""
    add_run(spool, "q")
    now = time.time()
    for job_id, run, at in (
        ("r1", "r", now),
        ("r2", "r", now - 3600),
        ("q1", "q", now + 1),
        ("q2", "q", now + 2),
    ):
        submit(spool, job_id, run=run, created=at)
    first, second = spool.queue.claim("me"), spool.queue.claim("me")
    assert (first.spec.id, second.spec.id, spool.queue.claim("me")) == ("r1", "q1", None)
    spool.queue.finish(second, failed())
    assert spool.queue.claim("me").spec.id == "q2"
    assert [job.spec.id for _, job in spool.jobs.list("r", ["queued"])] == ["r2"]


def test_jobs_of_a_run_are_created_in_the_order_in_which_they_are_queued(spool):
    """`tandem track` reads a run's jobs in the order of their creation times. `fast` is submitted
    and queued while `slow` is packed."""

    def packs_long(job_id, base_step, directory):
        spec = maker()(job_id, base_step, directory)
        submit(spool, "fast")
        return spec

    slow, new = spool.queue.submit(
        packs_long, run="r", job_id="slow", fingerprint="f", base_step=None
    )
    # Another controller, whose clock is behind, submits the next job.
    last = submit(spool, "behind", created=slow.spec.created - 3600)
    jobs = [job for _, job in spool.jobs.list("r")]
    assert [(job.spec.id, job.spec.base_step) for job in jobs] == [
        ("fast", 0),
        ("slow", 1),
        ("behind", 2),
    ]
    assert jobs[1:] == [slow, last]
    assert all(
        a.spec.created < b.spec.created and a.key.created < b.key.created for a, b in pairwise(jobs)
    )
    again = spool.queue.submit(packs_long, run="r", job_id="slow", fingerprint="f", base_step=None)
    assert (new, again) == (True, (slow, False))


def test_a_lease_lasts_while_the_job_runs(spool):
    job = start(spool, "j")
    before = spool.leases.get("j")
    spool.leases.write(job, "me", "training")
    lease = spool.leases.get("j")
    assert lease == before.model_copy(update={"phase": "training", "beat": lease.beat})
    assert lease.beat > before.beat
    # A newer version may write a record with an additional field.
    spool.paths.lease_file("j").write_text(json.dumps(lease.model_dump() | {"new": 1}))
    assert spool.leases.get("j") == lease
    spool.queue.finish(job, failed())
    assert spool.leases.get("j") is None


def test_heartbeats_are_read_while_ranks_write_the_next_ones(spool):
    start(spool, "j")
    attempt = Attempt(spool, "j", 1)
    for rank in range(8):
        for name in sorted((f"beat.{rank}", f"beat.{rank}.tmp"), reverse=rank % 2 == 0):
            (attempt.work / name).write_text(
                "{" if name.endswith("tmp") else '{"time": 1.0, "phase": "train"}'
            )
    assert list(attempt.beats()) == list(range(8))


def test_a_job_that_does_not_exist_is_not_found(spool):
    job = submit(spool, "j")
    unknown = job.model_copy(update={"spec": job.spec.model_copy(update={"id": "nope"})})
    for call in (lambda: spool.queue.cancel("nope"), lambda: spool.queue.finish(unknown, failed())):
        with refused(NotFound, "id"):
            call()


def test_requeue_until_an_error_lasts(spool):
    job = start(spool, "j")
    (spool.paths.work_dir("j", 1) / "staged").write_text("x")
    for _ in range(2):
        assert spool.queue.requeue(job, LOST) == "queued"
        state, waiting = spool.jobs.get("j")
        assert (state, waiting.attempt, waiting.last_error) == ("queued", 1, LOST)
        assert places(spool, "j") == ["live", "data", "events.jsonl", "job.json"]
    again = spool.queue.claim("me")
    assert again.attempt == 2
    for end in (lambda: spool.queue.requeue(job, LOST), lambda: spool.queue.finish(job, failed())):
        with pytest.raises(Conflict, match="the end of attempt 1 is ignored"):
            end()
    lasting = JobError(type="checkpoint_damaged", message="adapter missing", log_tail="tail")
    for _ in range(2):
        assert spool.queue.requeue(again, lasting) == "failed"
        assert spool.jobs.get("j")[1].result.error == lasting
    assert types(spool, "j") == ["claimed", "requeued", "claimed", "failed"]
    assert places(spool, "j") == ["ended", "events.jsonl", "job.json"]


def test_each_lost_attempt_has_its_event_and_a_request_to_cancel_goes_with_the_job(spool):
    submit(spool, "j")
    for _ in range(2):
        assert spool.queue.requeue(spool.queue.claim("me"), LOST) == "queued"
    assert [event.attempt for event in spool.events.read("j") if event.type == "requeued"] == [1, 2]
    job = spool.queue.claim("me")
    spool.queue.cancel("j")
    assert spool.jobs.cancel_requested("j")
    assert spool.queue.requeue(job, LOST) == "cancelled"
    assert not spool.jobs.cancel_requested("j")  # another job may get this id later


def test_finish_needs_a_running_job_and_its_first_result_stands(spool):
    with pytest.raises(Conflict, match="queued"):
        spool.queue.finish(submit(spool, "j"), failed())
    job = spool.queue.claim("me")
    assert spool.queue.finish(job, failed("first")) == "failed"
    before = tree(spool.root)
    assert spool.queue.finish(job, succeeded(job)) == spool.queue.cancel("j") == "failed"
    assert tree(spool.root) == before


def test_recover_says_what_was_lost(spool):
    """(Random histories with deaths at each call check that `recover` repairs every job.)"""
    add_run(spool, "q")
    lost, other = start(spool, "lost"), start(spool, "other", "q")
    spool.leases.write(lost, "dead", "training")
    # This commit does not count for job `other`, because another job made the checkpoint.
    spool.checkpoints.commit(stage(spool, other), "q", 1, "somebody-else")
    assert {job.spec.id: state for state, job in recover(spool, "new")} == {
        "lost": "queued",
        "other": "queued",
    }
    error = spool.jobs.get("lost")[1].last_error
    assert re.search("dead .*'training'", error.message)
    assert error.type == "runner_lost"
    assert recover(spool, "new") == []


def test_sweep_of_old_remains_only(spool):
    submit(spool, "queued")
    spool.checkpoints.pin("r", 0)
    for name in ("runs/r/merged", "runs/r/served", "replicas"):
        (spool.root / name).mkdir()
    bucket = spool.paths.bucket("r", 0).relative_to(spool.root)
    remains = []
    for name in (
        "jobs/live/.tmp-01ABC/",
        f"{bucket}/.tmp-01ABC/",
        "jobs/ended/0/.tmp-gone.01ABC/",
        "jobs/damaged/.tmp-01ABC/",
        "runs/.tmp-01ABC/",
        "jobs/.tmp-hold.json.01ABC",
        ".tmp-probe.01ABC",
        "runs/r/.tmp-x",
        "runs/r/checkpoints/.tmp-x",
        "runs/r/pinned/.tmp-x",
        "runs/r/merged/.tmp-x",
        "runs/r/served/.tmp-0.json.01ABC",
        "replicas/.tmp-0.json.01ABC",
    ):
        remains.append(path := spool.root / name)
        if name.endswith("/"):
            path.mkdir()
            (path / "file").write_text("x")
        else:
            path.write_text("x")
    for age in (0, 3000, 3700):
        for path in [
            *remains,
            *(path / "file" for path in remains if path.is_dir()),
            spool.paths.data_dir("queued"),
        ]:
            os.utime(path, (time.time() - age,) * 2)
        recover(spool, "me")
        assert [path.exists() for path in remains] == [age < 3600] * len(remains)
    # These data are old, and stay because their job still exists.
    assert (spool.paths.data_dir("queued") / "tokens.npy").exists()
    assert temporary_names(spool.root) == []


def test_what_a_dead_process_left_in_a_job_goes_with_its_end(spool):
    job = start(spool, "j")
    for name in (".tmp-job.json.01ABC", "cancel"):
        (spool.paths.job_dir("j") / name).touch()
    (spool.paths.job_dir("j") / ".tmp-attempts.01ABC").mkdir()
    spool.queue.finish(job, failed())
    assert places(spool, "j") == ["ended", "events.jsonl", "job.json"]


@pytest.mark.parametrize("complete", [lambda spool: spool.queue.claim("me"), recover])
@pytest.mark.parametrize("named", [True, False])
def test_a_cancellation_that_died_half_way_is_completed_by_the_runner(spool, named, complete):
    """`named`: whether the job's name in active/ exists. A loss of power may remove this name."""
    job = submit(spool, "j")
    result = JobResult(state="cancelled", finished=time.time())
    decided = job.model_copy(update={"state": "cancelled", "result": result})
    job_path(spool, "j").write_text(decided.model_dump_json())
    if named:
        spool.paths.active_file(job.key).touch()
    assert spool.jobs.get("j")[0] == "queued"  # the job has a result and no terminal event
    assert spool.queue.next_base("r") == (0 if named else 1)
    complete(spool) if complete is not recover else recover(spool, "me")
    assert types(spool, "j") == ["cancelled"]
    assert places(spool, "j") == ["ended", "events.jsonl", "job.json"]
    assert spool.queue.next_base("r") == 0


def test_a_running_job_whose_name_a_loss_of_power_took_is_not_claimed_again(spool):
    job = start(spool, "j")
    submit(spool, "next")
    spool.paths.active_file(job.key).unlink()
    assert spool.queue.claim("me") is None
    assert places(spool, "j") == ["live", *RUNNING, "active"]
    spool.paths.active_file(job.key).unlink()
    assert [(state, job.spec.id) for state, job in recover(spool, "new")] == [("queued", "j")]


def test_paging_through_the_jobs_of_all_states(spool):
    add_run(spool, "q")
    now = time.time()
    for i in range(12):
        submit(spool, f"j{i:02d}", run="rq"[i % 2], created=now - 7200 * (12 - i))
    for result in (failed(), failed()):
        spool.queue.finish(spool.queue.claim("me"), result)
    spool.queue.claim("me")

    def ids(**more):
        return [job.spec.id for _, job in spool.jobs.list(**more)]

    everything = [f"j{i:02d}" for i in range(12)]
    assert ids() == everything
    assert ids(limit=5) == everything[-5:]
    assert ids(limit=5, before="j07") == everything[2:7]
    assert ids(limit=5, before="j02") == everything[:2]
    assert ids(run="q", limit=2, before="j05") == ["j01", "j03"]
    assert ids(states=["failed"]) == ["j00", "j01"]
    assert ids(states=["failed"], limit=1, before="j01") == ["j00"]
    with refused(NotFound, "before"):
        ids(before="nope")


def test_a_claim_and_a_submission_do_not_read_the_queue(spool, monkeypatch):
    """The test compares a spool of a few jobs with a spool of 2,500 queued and 2,500 ended jobs. On
    the larger spool, a claim and a submission read at most 2 more files, and list at most 1,600
    more names."""
    add_run(spool, "q")

    def cost() -> tuple[int, int]:
        listed, read = [], []
        with monkeypatch.context() as patch:
            real_listdir, real_read = os.listdir, fs.read_plain
            patch.setattr(
                os, "listdir", lambda path: listed.extend(names := real_listdir(path)) or names
            )
            patch.setattr(
                fs,
                "read_plain",
                lambda path, *, most: read.append(path) or real_read(path, most=most),
            )
            submit(spool, f"more-{time.time()}", run="q")
            job = spool.queue.claim("me")
            spool.leases.write(job, "me", "training")
            spool.queue.requeue(job, LOST, counts=False)
        return len(listed), len(read)

    first, ended = submit(spool, "first"), submit(spool, "ended", run="q")
    cost()
    few = cost()
    for step in range(1, 2500):
        for state, job in (("queued", first), ("failed", ended)):
            spec = job.spec.model_copy(update={"id": f"{state}-{step}", "base_step": step})
            key = job.model_copy(update={"spec": spec}).key
            paths = spool.paths
            directory = paths.live_dir(key) if state == "queued" else paths.ended_dir(key, "failed")
            directory.mkdir(parents=True)
    assert spool.queue.next_base("r") == 2500
    cost()
    time.sleep(2.6)  # a directory that has just changed is listed each time
    cost()
    many = cost()
    assert many[1] <= few[1] + 2
    # The listed names are a sixteenth of the ended jobs, and the names in the run's first directory
    # of live jobs. The first directory of live jobs is listed several times.
    assert many[0] <= few[0] + 1600, many


def test_base_steps_across_directories_of_the_queue(spool, monkeypatch):
    monkeypatch.setattr(paths, "BUCKET", 3)
    monkeypatch.setattr("tandem.spool.jobs.BUCKET", 3)
    jobs = [submit(spool) for _ in range(10)]
    assert [job.spec.base_step for job in jobs] == list(range(10))
    assert [job.spec.base_step for _, job in spool.jobs.pending("r")] == list(range(10))
    spool.queue.cancel(jobs[4].spec.id)
    assert submit(spool).spec.base_step == 4
    assert submit(spool).spec.base_step == 10
    for step in range(4):
        job = spool.queue.claim("me")
        assert job.spec.base_step == step
        commit(spool, job)
        spool.queue.finish(job, succeeded(job))
    assert sorted(path.name for path in (spool.root / "jobs/live/r").iterdir()) == [
        "00001",
        "00002",
        "00003",
    ]


def test_a_damaged_queued_job_is_set_aside_with_its_end_and_the_rest_goes_on(spool, monkeypatch):
    add_run(spool, "q")
    submit(spool, "j")
    submit(spool, "k", run="q")
    (file := job_path(spool, "j")).write_text("{")

    def full(*arguments, **data):
        raise SpoolUnusable("the volume is full")

    with monkeypatch.context() as patch:
        patch.setattr(Events, "append", full)
        assert spool.jobs.locate("j") is None
        assert file.exists()  # no terminal event can be written, so the file stays
    assert spool.queue.claim("me").spec.id == "k"
    assert not file.exists()
    (aside,) = spool.paths.damaged.iterdir()
    assert (aside / "job.json").read_text() == "{"
    (event,) = spool.events.read("j")  # waiting clients get the event of the job's end
    assert (event.type, event.data["error"]["type"]) == ("failed", "job_damaged")
    with refused(NotFound, "id", match="damaged"):
        spool.jobs.get("j")
    assert [job.spec.id for _, job in spool.jobs.list()] == ["k"]
    assert submit(spool, "j").spec.base_step == 0  # the job can be submitted again
    assert spool.damage()["job"] == [str(aside)]
    assert types(spool, "j") == []


def test_a_start_that_the_volume_refuses_to_undo_is_undone_by_the_next_claim(spool, monkeypatch):
    submit(spool, "j")

    def refuse(*arguments, **data):
        raise SpoolUnusable("read-only")

    # The volume becomes read-only before the job's file is replaced.
    with monkeypatch.context() as patch:
        patch.setattr(Events, "append", refuse)
        patch.setattr(fs, "remove_file", refuse)
        patch.setattr(fs, "remove_tree", lambda _: None)
        with pytest.raises(SpoolUnusable):
            spool.queue.claim("me")
    assert spool.jobs.get("j")[0] == "queued"
    assert spool.jobs.index.running() == []
    assert list(spool.paths.active.iterdir())
    recover(spool, "new")
    assert places(spool, "j") == ["live", "data", "job.json"]
    claimed = spool.queue.claim("me")
    assert claimed is not None
    assert claimed.attempt == 1
    assert places(spool, "j") == ["live", *RUNNING, "active"]
    commit(spool, claimed)
    assert spool.queue.finish(claimed, succeeded(claimed)) == "succeeded"
    assert types(spool, "j") == ["claimed", "succeeded"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(?s).*", ""),
        ("(?s).*", "{"),
        ("(?s).*", "\udcff"),
        ("(?s).*", "[]"),
        ('"id": "j"', '"id": "other"'),
        ('"created": [0-9.]+', '"created": 1e305'),
    ],
)
def test_a_damaged_ended_job_disturbs_no_list(spool, old, new):
    for job_id in ("j", "other"):
        spool.queue.finish(start(spool, job_id), failed())
    content = (file := job_path(spool, "j")).read_text()
    assert re.search(old, content)
    file.write_bytes(re.sub(old, new, content, count=1).encode(errors="surrogateescape"))
    assert [job.spec.id for _, job in spool.jobs.list()] == ["other"]
    assert types(spool, "j") == ["claimed", "failed"]
    assert len(spool.damage()["job"]) == 1


def test_junk_among_the_jobs_is_ignored_and_named(spool):
    submit(spool, "j")
    bucket = spool.paths.bucket("r", 0)
    junk = [
        spool.root / "jobs/live/junk.json",
        spool.root / "jobs/live/r/y",
        bucket / "a.json",
        bucket / "b",
        spool.root / "jobs/active/x.json",
        spool.root / "jobs/ended/0/y",
        spool.root / "jobs/ended/z",
    ]
    for path in junk:
        path.write_text("junk")
    (spool.root / "jobs/live/no-run").mkdir()
    assert submit(spool, "k").spec.base_step == 1
    assert [job.spec.id for _, job in spool.jobs.list()] == ["j", "k"]
    assert sorted(spool.damage()["name"]) == sorted(str(path) for path in junk)
    assert spool.queue.claim("me").spec.id == "j"


def test_a_job_that_ends_while_it_is_read_is_not_missed(spool, monkeypatch):
    job = start(spool, "moving")
    read_record, moved = fs.read_record, []

    def end_between(path, *args, **more):
        if not moved and path.name == "job.json":
            moved.append(path)
            spool.queue.finish(job, failed())
        return read_record(path, *args, **more)

    monkeypatch.setattr(fs, "read_record", end_between)
    assert [state for state, _ in spool.jobs.list()] == ["failed"]
    assert moved
    assert spool.damage()["job"] == []


def test_a_job_of_a_newer_version_waits_for_it(spool):
    submit(spool, "newer")
    path = job_path(spool, "newer")
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"since_then": None}))
    assert spool.queue.claim("old runner") is None
    assert spool.jobs.list() == []
    assert path.exists()
    assert not spool.events.ended("newer")
    path.write_text(json.dumps(content))
    assert spool.queue.claim("new runner").spec.id == "newer"


@pytest.mark.parametrize("state", ["queued", "running"])
def test_nothing_goes_on_beside_a_job_of_a_newer_version(spool, monkeypatch, state):
    """The job's file can't be read, but its name contains the job, the run and the step."""
    monkeypatch.setattr(recovery, "STALE_SECONDS", -1.0)
    submit(spool, "newer") if state == "queued" else start(spool, "newer")
    path = job_path(spool, "newer")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"since_then": None}))
    assert spool.queue.next_base("r") == 1
    recover(spool, "old runner")
    assert list(spool.paths.data_dir("newer").iterdir())
    for field, action in (
        ("step", lambda: spool.checkpoints.rollback("r", 0)),
        ("run", lambda: delete_run(spool, "r")),
    ):
        with refused(Conflict, field, rf"newer \({state}, of a newer version\)"):
            action()
