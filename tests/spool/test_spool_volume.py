"""The tests create and open volumes. Some volumes are full, read-only, moved, or shared by two
users, and one is a plain file. The tests also check names and the runner's lock."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from spool.spool_tools import (
    LOST,
    add_run,
    commit,
    failed,
    run_spec,
    spool_with_run,
    submit,
    succeeded,
    train_one,
)
from spool.volume_tools import (
    full_disk,
    in_child,
    mounted,
    read_only,
    refused,
    temporary_names,
    tree,
)
from tandem.errors import InvalidInput, SpoolUnusable
from tandem.spool import Spool
from tandem.spool.recovery import recover


def test_create_is_idempotent_and_open_needs_a_spool(tmp_path):
    with pytest.raises(SpoolUnusable, match="not a spool"):
        Spool(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    Spool.create(tmp_path / "a/b")
    before = tree(tmp_path)
    Spool.create(tmp_path / "a/b")
    Spool(tmp_path / "a/b")
    assert tree(tmp_path) == before
    (root := tmp_path / "root").write_text("precious")
    for make in (Spool, Spool.create):
        for path in (root, root / "below"):
            with pytest.raises(SpoolUnusable, match=r"(?s)root.*TANDEM_ROOT"):
                make(path)
    assert tree(tmp_path) == before | {"root": b"precious"}


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "nonsense",
        '{"schema_version": 3}',
        "[" * 100_000,
        '{"schema_version": 1e400}',
        '{"schema_version": []}',
    ],
)
def test_another_version_is_refused(tmp_path, content):
    Spool.create(tmp_path)
    (tmp_path / "spool.json").write_text(content)
    with pytest.raises(
        SpoolUnusable, match=r"version 3, this" if "3}" in content else r"spool\.json is damaged"
    ):
        Spool(tmp_path)


def test_a_volume_of_the_format_before_is_refused_and_its_runs_stay(tmp_path):
    spool = spool_with_run(tmp_path)
    train_one(spool)
    shutil.rmtree(tmp_path / "jobs")
    (tmp_path / "jobs/queued/r").mkdir(parents=True)
    (tmp_path / "spool.json").write_text('{"schema_version": 1}')
    before = tree(tmp_path)
    for opened in (Spool, Spool.create):
        with pytest.raises(SpoolUnusable, match=r"version 1, .*remove spool\.json and jobs/"):
            opened(tmp_path)
    assert tree(tmp_path) == before
    shutil.rmtree(tmp_path / "jobs")
    (tmp_path / "spool.json").unlink()
    again = Spool.create(tmp_path)
    assert again.checkpoints.verify("r", 1).step == 1
    assert train_one(again).spec.base_step == 1


def two_jobs(root: Path) -> Spool:
    spool = spool_with_run(root)
    submit(spool, "first")
    add_run(spool, "q")
    submit(spool, "other", run="q")
    return spool


# All operations that write, on a spool in which the job `first` runs and the job `other` is queued.
# On a full volume the operations in LATER may do a part of their work.
OPERATIONS: dict[str, Callable[[Spool], object]] = {
    "create": lambda spool: Spool.create(spool.root / "below"),
    "create run": lambda spool: add_run(spool, "new"),
    "submit": lambda spool: submit(spool, "one-more"),
    "cancel queued": lambda spool: spool.queue.cancel("other"),
    "cancel running": lambda spool: spool.queue.cancel("first"),
    "claim": lambda spool: spool.queue.claim("runner"),
    "renew lease": lambda spool: spool.leases.write(
        spool.jobs.get("first")[1], "runner", "training"
    ),
    "event": lambda spool: spool.events.append("first", "step", loss=1.0),
    "finish": lambda spool: spool.queue.finish(
        first := spool.jobs.get("first")[1], succeeded(first)
    ),
    "requeue": lambda spool: spool.queue.requeue(spool.jobs.get("first")[1], LOST),
    "fork": lambda spool: spool.checkpoints.fork("r", 0, run_spec("fork")),
    "commit": lambda spool: commit(spool, spool.jobs.get("first")[1]),
}
LATER = ("create", "cancel queued", "finish", "requeue", "commit")


@pytest.mark.parametrize("name", OPERATIONS)
def test_disk_full_at_any_write_loses_nothing(memory_path, monkeypatch, name):
    """The first `after` calls of `os.write` succeed. The next call writes half of its data, and all
    later calls fail with ENOSPC."""
    for after in range(5):
        root = memory_path / str(after)
        spool = two_jobs(root)
        spool.queue.claim("runner")
        before = tree(root)
        calls = 0

        def full(fd, data, real=os.write, after=after):
            nonlocal calls
            calls += 1
            if calls <= after:
                return real(fd, data)
            if calls == after + 1 and len(data) > 1:
                return real(fd, bytes(data)[: len(data) // 2])
            return full_disk()

        refusal = ""
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            try:
                OPERATIONS[name](spool)
            except SpoolUnusable as error:
                refusal = str(error)
        assert bool(refusal) is (calls > after)
        assert temporary_names(root) == []
        if refusal:
            assert all(part in refusal for part in ("full", str(root), "free space"))
            assert name in LATER or tree(root) == before
            if name != "commit":
                OPERATIONS[name](spool)  # the volume has space again
        for job in ("first", "other"):
            spool.jobs.get(job)
        for file in (root / "jobs").rglob("events.jsonl"):
            seqs = [event.seq for event in spool.events.read(file.parent.name.split(",")[3])]
            assert seqs == list(range(len(file.read_bytes().splitlines())))
        if not refusal:
            return
    pytest.fail("it never succeeded")


def test_read_only_is_refused(tmp_path):
    root = tmp_path / "root"
    spool = two_jobs(root)
    spool.queue.claim("runner")
    before = tree(root)
    with read_only(root):
        assert Spool(root).jobs.get("first")[0] == "running"  # read operations still succeed
        for name, operate in OPERATIONS.items():
            with pytest.raises((SpoolUnusable, OSError), match=r"(?i)read-only") as caught:
                operate(spool)
            assert name == "commit" or "mount it read-write" in str(caught.value), name
    assert tree(root) == before


def test_a_really_full_volume(tmp_path):
    root = tmp_path / "volume"
    with mounted(root, "-t", "tmpfs", "-o", "size=512k", "tmpfs"):
        spool = two_jobs(root)
        first = spool.queue.claim("runner")
        filler = root / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass
        before = tree(root)
        # Programs start while the volume is full, and wait.
        assert Spool.create(root).jobs.get("other")[0] == "queued"
        for name in ("submit", "create run", "claim", "finish", "fork"):
            with pytest.raises(SpoolUnusable, match=r"(?s)full.*free space"):
                OPERATIONS[name](spool)
        assert tree(root) == before
        filler.unlink()
        commit(spool, first)
        assert spool.queue.finish(first, succeeded(first)) == "succeeded"
        assert submit(spool, "one-more").spec.base_step == 1
        assert spool.queue.claim("runner").spec.id == "other"


def test_how_often_each_change_of_a_job_syncs_the_volume(spool, monkeypatch):
    for number in range(3):
        submit(spool, f"j{number}", created=1e9)
    spool.queue.finish(spool.queue.claim("me"), failed())  # all directories exist from here on
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd, real=os.fsync: synced.append(fd) or real(fd))
    submit(spool, "new", created=1e9)
    # The submission syncs the data and the job, each with its directory, and the directory of jobs.
    assert len(synced) == 5
    job = spool.queue.claim("me")
    # The claim syncs the job and its first event, each with its directory.
    assert len(synced) == 5 + 4
    commit(spool, job)
    synced.clear()
    spool.queue.finish(job, succeeded(job))
    # The job's end syncs the result with its directory, the event, and the directories between
    # which the job moves.
    assert len(synced) == 5
    job = spool.queue.claim("me")
    synced.clear()
    spool.queue.finish(job, failed())
    # The fence syncs three things: the file `ended`, its directory, and the directory above.
    assert len(synced) == 5 + 3


def test_the_root_can_be_moved_while_jobs_are_in_it(tmp_path):
    spool = spool_with_run(tmp_path / "here")
    train_one(spool)
    submit(spool, "j")
    shutil.copytree(tmp_path / "here", tmp_path / "copy")
    (tmp_path / "here").rename(tmp_path / "there")
    for root in (tmp_path / "there", tmp_path / "copy"):
        moved = Spool(root)
        assert moved.checkpoints.verify("r", 1).step == 1
        job = moved.queue.claim("runner")
        assert root / job.spec.data.path == moved.paths.data_dir("j")
        assert (moved.paths.data_dir("j") / "tokens.npy").read_bytes() == b"tokens of j"
        commit(moved, job)
        assert moved.queue.finish(job, succeeded(job)) == "succeeded"
        for name, content in tree(root).items():
            assert content is None or str(tmp_path).encode() not in content, name


@pytest.mark.parametrize(
    "bad", ["", ".", "..", "../r", "a/b", "/etc", "a\n", "a\0", "-a", ".a", "a" * 65, "é", " a"]
)
def test_names_cannot_lead_elsewhere(spool, bad):
    paths, jobs = spool.paths, spool.jobs
    before = tree(spool.root)
    for call in (
        spool.runs.get,
        lambda name: spool.runs.lock(name).__enter__(),
        spool.checkpoints.steps,
        spool.served.get,
        lambda name: submit(spool, run=name),
    ):
        with refused(InvalidInput, "run"):
            call(bad)
    for call in (
        jobs.get,
        jobs.cancel_requested,
        spool.queue.cancel,
        spool.leases.get,
        spool.events.read,
        spool.job_lock,
        paths.data_dir,
        paths.log_file,
        paths.events_file,
        lambda name: paths.work_dir(name, 1),
        lambda name: spool.events.append(name, "step"),
        lambda name: submit(spool, name),
    ):
        with refused(InvalidInput, "id"):
            call(bad)
    assert tree(spool.root) == before


def test_two_runners_on_one_spool(spool):
    parent = os.getpid()

    def second_is_refused():
        with pytest.raises(SpoolUnusable) as caught, Spool(spool.root).runner_lock("second"):
            pass
        for part in (
            "first",
            str(parent),
            os.uname().nodename,
            time.strftime("%Y-%m-%d", time.gmtime()),
            "stop",
        ):
            assert part in str(caught.value)

    with spool.runner_lock("first"):
        # The test compares names only, because reading the lock file in this process would free the
        # lock.
        before = sorted(spool.root.rglob("*"))
        for _ in range(2):  # the refusal does not free the lock
            assert in_child(second_is_refused) == 0
        assert sorted(spool.root.rglob("*")) == before
    with spool.runner_lock("third"):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_two_users_of_one_group_share_a_spool():
    directory = Path(tempfile.mkdtemp(dir="/tmp", prefix="tandem-test-"))
    directory.chmod(0o2770)

    def as_user(uid, action):
        def child():
            os.setgroups([])
            os.setgid(0)
            os.setuid(uid)
            os.umask(0o002)
            action()

        assert in_child(child) == 0

    def begin():
        def write(checkpoint):
            # The file has the mode that safetensors' own writer sets.
            (checkpoint / "adapter_model.safetensors").touch(0o600)

        spool = Spool.create(directory)
        spool.runs.create(run_spec(), write)
        submit(spool, "a")
        submit(spool, "b")
        claimed = spool.queue.claim("runner")
        spool.events.append("a", "started")
        commit(spool, claimed)

    def go_on():
        spool = Spool.create(directory)
        for path in directory.rglob("*"):
            assert path.stat().st_mode & 0o060 == 0o060, path
        with spool.runner_lock("other"):
            recover(spool, "other")
            claimed = spool.queue.claim("other")
            assert claimed.spec.id == "b"
            commit(spool, claimed)
            spool.queue.finish(claimed, succeeded(claimed))
        spool.checkpoints.rollback("r", 1)

    try:
        as_user(12345, begin)
        as_user(54321, go_on)
    finally:
        shutil.rmtree(directory)
