"""The volume itself: made and opened, full, read-only, a file, moved; names; atomic writes; locks."""

import errno
import os
import re
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from spool.spool_tools import (
    LOST,
    commit,
    in_child,
    maker,
    mounted,
    read_only,
    run_spec,
    spool_with_run,
    submit,
    succeeded,
    temporary_names,
    train_one,
    tree,
    write_adapter,
)  # fmt: skip
from tandem.errors import InvalidInput, SpoolUnusable
from tandem.spool import Spool, fs
from tandem.spool.locks import LockHeldError, file_lock
from tandem.spool.recovery import recover


def test_ulids_are_unique_and_sort_by_time():
    earlier = [fs.new_ulid() for _ in range(1000)]
    time.sleep(0.003)
    later = fs.new_ulid()
    assert len(set(earlier)) == 1000
    assert max(earlier) < later
    assert all(re.fullmatch(r"[0-7][0-9A-HJKMNP-TV-Z]{25}", ulid) for ulid in earlier)
    # The first ten characters are the milliseconds (the ULID specification).
    value = 0
    for character in later[:10]:
        value = value * 32 + "0123456789ABCDEFGHJKMNPQRSTVWXYZ".index(character)
    assert abs(value / 1000 - time.time()) < 5


def test_create_is_idempotent_and_open_needs_a_spool(tmp_path):
    with pytest.raises(SpoolUnusable, match="not a spool"):
        Spool(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    Spool.create(tmp_path / "a/b")
    before = tree(tmp_path)
    Spool.create(tmp_path / "a/b")
    Spool(tmp_path / "a/b")
    assert tree(tmp_path) == before


def test_a_root_that_is_a_file_is_refused(tmp_path):
    root = tmp_path / "root"
    root.write_text("precious")
    for make in (Spool, Spool.create):
        for path in (root, root / "below"):
            with pytest.raises(SpoolUnusable, match=r"(?s)root.*TANDEM_ROOT"):
                make(path)
    assert tree(tmp_path) == {"root": b"precious"}


@pytest.mark.parametrize("content", ["{}", "nonsense", '{"schema_version": 2}'])
def test_another_version_is_refused(tmp_path, content):
    Spool.create(tmp_path)
    (tmp_path / "spool.json").write_text(content)
    with pytest.raises(SpoolUnusable, match=r"spool\.json|version 2"):
        Spool(tmp_path)


def operations(spool: Spool):
    """Everything that writes, each with a state in which it does; gives (name, call)."""
    running = spool.queue.claim("runner")
    return [
        ("open", lambda: Spool(spool.root)),
        ("create run", lambda: spool.runs.create(run_spec("new"), write_adapter)),
        ("submit", lambda: submit(spool, "one-more")),
        ("cancel queued", lambda: spool.queue.cancel("other")),
        ("cancel running", lambda: spool.queue.cancel(running.spec.id)),
        ("claim", lambda: spool.queue.claim("runner")),
        ("beat", lambda: spool.leases.renew(running.spec.id, "runner", "training")),
        ("event", lambda: spool.events.append(running.spec.id, "step", loss=1.0)),
        ("finish", lambda: spool.queue.finish(running, succeeded(running))),
        ("requeue", lambda: spool.queue.requeue(running, LOST)),
        ("fork", lambda: spool.checkpoints.fork("r", 0, run_spec("fork"))),
        ("commit", lambda: commit(spool, running)),
    ]


def two_jobs(root: Path) -> Spool:
    spool = spool_with_run(root)
    submit(spool, "first")
    spool.runs.create(run_spec("q"), write_adapter)
    submit(spool, "other", run="q")
    return spool


NAMES = ["open", "create run", "submit", "cancel queued", "cancel running", "claim", "beat", "event", "finish",
         "requeue", "fork", "commit"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_disk_full_at_any_write_loses_nothing(tmp_path, monkeypatch, name, after):
    """`os.write` fails with ENOSPC from its `after`-th call on, having written half of that one."""
    spool = two_jobs(tmp_path)
    call = dict(operations(spool))[name]
    before = tree(tmp_path)
    real, calls = os.write, 0

    def full(fd, data):
        nonlocal calls
        calls += 1
        if calls <= after:
            return real(fd, data)
        if calls == after + 1 and len(data) > 1:
            return real(fd, bytes(data)[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    refusal = ""
    try:
        call()
    except SpoolUnusable as error:
        refusal = str(error)
    monkeypatch.undo()
    assert bool(refusal) is (calls > after)
    assert not refusal or all(part in refusal for part in ("full", str(tmp_path), "free space"))
    assert temporary_names(tmp_path) == []
    now = tree(tmp_path)
    if name in ("open", "create run", "submit", "claim", "beat", "event", "fork", "cancel running") and now != before:
        assert calls <= after  # it was done
    if name == "submit" and calls > after:
        assert now == before
    # Whatever was refused can be done once there is space; both jobs are still to be had.
    if calls > after and name != "commit":
        call()
    for job in ("first", "other"):
        spool.jobs.get(job)
    for event_file in (tmp_path / "jobs/events").iterdir():
        assert [event.seq for event in spool.events.read(event_file.stem)] == list(
            range(len(event_file.read_bytes().splitlines()))
        )


@pytest.mark.parametrize("name", NAMES)
def test_read_only_is_refused(tmp_path, name):
    root = tmp_path / "root"
    spool = two_jobs(root)
    call = dict(operations(spool))[name]
    before = tree(root)
    with read_only(root):
        with pytest.raises((SpoolUnusable, OSError), match=r"(?i)read-only"):
            call()
        with pytest.raises(SpoolUnusable, match="mount it read-write"):
            Spool(root)
        with pytest.raises(SpoolUnusable, match="mount it read-write"):
            Spool.create(root / "below")
        if name != "commit":
            with pytest.raises(SpoolUnusable, match="mount it read-write"):
                call()
    assert tree(root) == before


def test_a_really_full_volume(tmp_path):
    root = tmp_path / "volume"
    with mounted(root, "-t", "tmpfs", "-o", "size=512k", "tmpfs"):
        spool = two_jobs(root)
        running = spool.queue.claim("runner")
        filler = root / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass
        before = tree(root)
        for call in (
            lambda: Spool(root),
            lambda: Spool.create(root / "below"),
            lambda: submit(spool, "one-more"),
            lambda: spool.runs.create(run_spec("new"), write_adapter),
            lambda: spool.queue.claim("runner"),
            lambda: spool.queue.finish(running, succeeded(running)),
            lambda: spool.checkpoints.fork("r", 0, run_spec("fork")),
        ):
            with pytest.raises(SpoolUnusable, match=r"(?s)full.*free space"):
                call()
        assert tree(root) == before
        filler.unlink()
        commit(spool, running)
        assert spool.queue.finish(running, succeeded(running)) == "succeeded"
        assert submit(spool, "one-more").spec.base_step == 1
        assert spool.queue.claim("runner").spec.id == "other"


def test_numpys_full_disk_has_no_errno(tmp_path, monkeypatch):
    spool = spool_with_run(tmp_path)
    before = tree(tmp_path)

    def make(job_id, base_step, directory):
        def full(fd, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        raise OSError("4096 requested and 0 written")

    with pytest.raises(SpoolUnusable, match="full"):
        spool.queue.submit(make, run="r", job_id=None, fingerprint="f", base_step=None)
    monkeypatch.undo()
    assert tree(tmp_path) == before


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
        assert moved.absolute(job.spec.data.path) == moved.paths.data_dir("j") == root / "jobs/data/j"
        assert (moved.paths.data_dir("j") / "tokens.npy").read_bytes() == b"tokens of j"
        commit(moved, job)
        assert moved.queue.finish(job, succeeded(job)) == "succeeded"
        for name, content in tree(root).items():
            assert content is None or str(tmp_path).encode() not in content, name


def test_paths_do_not_leave_the_root(tmp_path):
    spool = spool_with_run(tmp_path / "root")
    assert spool.relative(spool.root / "runs/r") == "runs/r"
    assert spool.absolute("runs/r") == spool.root / "runs/r"
    for bad in ("../x", "/etc/passwd", "runs/../../x"):
        with pytest.raises(InvalidInput):
            spool.absolute(bad)
    for bad in (tmp_path / "x", tmp_path / "root/../x", Path("/etc")):
        with pytest.raises(InvalidInput):
            spool.relative(bad)


BAD_NAMES = ["", ".", "..", "../r", "a/b", "/etc", "a\n", "a\0", "-a", ".a", "a" * 65, "é", " a"]


@pytest.mark.parametrize("bad", BAD_NAMES)
def test_names_cannot_lead_elsewhere(tmp_path, bad):
    spool = spool_with_run(tmp_path)
    before = tree(tmp_path)
    for call in (
        lambda: spool.runs.get(bad),
        lambda: spool.runs.lock(bad),
        lambda: spool.checkpoints.steps(bad),
        lambda: spool.served.get(bad),
        lambda: spool.queue.submit(maker(bad), run=bad, job_id=None, fingerprint="f", base_step=None),
    ):
        with pytest.raises(InvalidInput) as caught:
            call()
        assert caught.value.field == "run"
    for call in (
        lambda: spool.jobs.get(bad),
        lambda: spool.queue.cancel(bad),
        lambda: spool.paths.data_dir(bad),
        lambda: spool.paths.work_dir(bad, 1),
        lambda: spool.paths.log_file(bad),
        lambda: spool.paths.events_file(bad),
        lambda: spool.leases.get(bad),
        lambda: spool.jobs.cancel_requested(bad),
        lambda: spool.events.append(bad, "step"),
        lambda: spool.events.read(bad),
        lambda: submit(spool, bad),
    ):
        with pytest.raises(InvalidInput) as caught:
            call()
        assert caught.value.field == "id"
    assert tree(tmp_path) == before


def test_write_atomic_replaces_whole_and_cleans_up(tmp_path, monkeypatch):
    path = tmp_path / "file"
    fs.write_atomic(path, b"old")
    for name in ("write", "fsync", "replace"):

        def refuse(*args, **kwargs):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            with pytest.raises(SpoolUnusable, match="quota"):
                fs.write_atomic(path, b"new" * 1000)
        assert tree(tmp_path) == {"file": b"old"}
    fs.write_atomic(path, b"new")
    assert tree(tmp_path) == {"file": b"new"}


def test_what_is_renamed_was_synced_first_and_its_directory_after(tmp_path, monkeypatch):
    """The order that makes a rename a commit: content, rename, directory."""
    log = []
    real = {name: getattr(os, name) for name in ("fsync", "replace", "rename")}

    def fsync(fd):
        log.append(("fsync", Path(f"/proc/self/fd/{fd}").readlink().name))
        real["fsync"](fd)

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("replace", "rename"):

        def move(source, target, name=name):
            log.append(("rename", Path(target).name))
            real[name](source, target)

        monkeypatch.setattr(os, name, move)
    (tmp_path / "in").mkdir()
    fs.write_atomic(tmp_path / "in/file", b"x")
    assert [kind for kind, _ in log] == ["fsync", "rename", "fsync"]
    assert log[0][1].startswith(".tmp-file")
    assert log[1:] == [("rename", "file"), ("fsync", "in")]

    spool = spool_with_run(tmp_path / "spool")
    submit(spool, "j")
    job = spool.queue.claim("runner")
    log.clear()
    commit(spool, job)
    moved = log.index(("rename", "00000001"))
    assert {("fsync", "adapter_model.safetensors"), ("fsync", "adam.safetensors"), ("fsync", "manifest.json"),
            ("fsync", "optimizer"), ("fsync", "checkpoint")} <= set(log[:moved])  # fmt: skip
    assert log[moved + 1 :] == [("fsync", "checkpoints"), ("fsync", "1")]


def test_rename_dir_refuses_an_existing_target(tmp_path):
    for name in ("a", "b", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "b/file").write_text("precious")
    for target in ("b", "empty"):
        with pytest.raises(FileExistsError):
            fs.rename_dir(tmp_path / "a", tmp_path / target)
    assert (tmp_path / "a").is_dir()
    assert (tmp_path / "b/file").read_text() == "precious"


def test_locks_exclude_threads_and_processes_and_die_with_their_holder(tmp_path):
    lock = tmp_path / "lock"
    counter = tmp_path / "counter"
    counter.write_text("0")

    def count():
        for _ in range(50):
            with file_lock(lock), file_lock(lock):
                counter.write_text(str(int(counter.read_text()) + 1))

    def two_threads():
        threads = [threading.Thread(target=count) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    children = []
    for _ in range(3):
        if (pid := os.fork()) == 0:
            two_threads()
            os._exit(0)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    assert counter.read_text() == "300"

    def held_elsewhere():
        with pytest.raises(LockHeldError), file_lock(lock, blocking=False):
            pass

    with file_lock(lock):
        assert in_child(held_elsewhere) == 0
        # Another descriptor closed by this process doesn't give the lock away, as long as it goes through file_lock.
        with file_lock(lock):
            pass
        assert in_child(held_elsewhere) == 0

    def die_with_it():
        with file_lock(lock):
            os.kill(os.getpid(), 9)

    assert in_child(die_with_it) == -9
    with file_lock(lock, blocking=False):
        pass


def test_absence_is_judged_by_listing_the_directory(tmp_path, monkeypatch):
    """An NFS client may remember that a name was absent; a listing is asked again."""
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(Path, "exists", lambda self, **_: False)
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert fs.exists(tmp_path / "file")
    assert not fs.exists(tmp_path / "none")
    assert not fs.exists(tmp_path / "none/file")
    spool = spool_with_run(tmp_path / "spool")
    submit(spool, "j")
    real, forgotten = Path.read_bytes, []

    def forgetful(self):
        if self.name == "j.json" and self not in forgotten and "queued" in self.parts:
            forgotten.append(self)
            raise FileNotFoundError(2, "stale", str(self))
        return real(self)

    monkeypatch.setattr(Path, "read_bytes", forgetful)
    assert spool.jobs.get("j")[0] == "queued"
    assert forgotten


def test_two_runners_on_one_spool(tmp_path):
    spool = spool_with_run(tmp_path)

    def refused():
        with pytest.raises(SpoolUnusable) as caught, Spool(tmp_path).runner_lock("second"):
            pass
        for part in ("first", str(parent), os.uname().nodename, time.strftime("%Y-%m-%d", time.gmtime()), "stop"):
            assert part in str(caught.value)

    parent = os.getpid()
    with spool.runner_lock("first"):
        before = sorted(tmp_path.rglob("*"))  # names only: reading the lock file here would free the lock
        assert in_child(refused) == 0
        refused()
        thread = threading.Thread(target=refused)
        thread.start()
        thread.join()
        assert sorted(tmp_path.rglob("*")) == before
        assert in_child(refused) == 0  # the refusals did not free the lock
    with spool.runner_lock("third"):
        pass

    def die():
        with Spool(tmp_path).runner_lock("dying"):
            os.kill(os.getpid(), 9)

    assert in_child(die) == -9
    with spool.runner_lock("fourth"):
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
        spool = Spool.create(directory)

        def write(checkpoint):
            write_adapter(checkpoint)
            # As safetensors' own writer leaves it.
            (checkpoint / "adapter_model.safetensors").chmod(0o600)

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
