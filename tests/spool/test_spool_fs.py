"""The tests of files on the volume check ids, atomic writes, the order of syncs, locks, stale
caches of NFS clients, and memory."""

import errno
import gc
import os
import re
import shutil
import sys
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spool.spool_tools import commit, spool_with_run, start, submit
from spool.volume_tools import full_disk, in_child, tree
from tandem.errors import SpoolUnusable
from tandem.spool import fs, locks
from tandem.spool.locks import LockHeldError, file_lock
from tandem.spool.paths import listing
from tandem.spool.schema import Event, Hold, Job


def test_ulids_are_unique_and_sort_by_time():
    earlier = [fs.new_ulid() for _ in range(1000)]
    time.sleep(0.003)
    later = fs.new_ulid()
    assert len(set(earlier)) == 1000
    assert max(earlier) < later
    assert all(re.fullmatch(r"[0-7][0-9A-HJKMNP-TV-Z]{25}", ulid) for ulid in earlier)
    # The first ten characters are the milliseconds (the ULID specification).
    digits = ["0123456789ABCDEFGHJKMNPQRSTVWXYZ".index(character) for character in later[:10]]
    value = sum(digit * 32**place for place, digit in enumerate(reversed(digits)))
    assert abs(value / 1000 - time.time()) < 5


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_write_atomic_replaces_whole_and_cleans_up(tmp_path, monkeypatch, failing):
    path = tmp_path / "file"
    fs.write_atomic(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, failing, full_disk)
        with pytest.raises(SpoolUnusable, match="full"):
            fs.write_atomic(path, b"new" * 1000)
    assert tree(tmp_path) == {"file": b"old"}
    fs.write_atomic(path, b"new")
    assert tree(tmp_path) == {"file": b"new"}


def test_what_is_renamed_was_synced_first_and_its_directory_after(tmp_path, monkeypatch):
    """A rename commits a file only if the file's content is synced before the rename, and the
    directory after it."""
    log = []

    def fsync(fd, real=os.fsync):
        log.append(("fsync", Path(f"/proc/self/fd/{fd}").readlink().name))
        real(fd)

    def moving(real):
        def move(source, target):
            log.append(("rename", Path(target).name))
            real(source, target)

        return move

    for name, logged in (
        ("fsync", fsync),
        ("replace", moving(os.replace)),
        ("rename", moving(os.rename)),
    ):
        monkeypatch.setattr(os, name, logged)
    (tmp_path / "in").mkdir()
    fs.write_atomic(tmp_path / "in/file", b"x")
    assert log[0][1].startswith(".tmp-file")
    assert [log[0][0], *log[1:]] == ["fsync", ("rename", "file"), ("fsync", "in")]

    def committed(name: str, files: set[str]) -> list[tuple[str, str]]:
        """The calls after the rename to `name`. Checks that all `files` were synced before this
        rename."""
        moved = log.index(("rename", name))
        assert {("fsync", file) for file in files} <= set(log[:moved])
        return log[moved + 1 :]

    log.clear()
    spool = spool_with_run(tmp_path / "spool")
    files = {
        "run.json",
        "lock",
        "adapter_model.safetensors",
        "manifest.json",
        "00000000",
        "checkpoints",
    }
    assert committed("r", files) == [("fsync", "runs")]
    job = start(spool, "j")
    log.clear()
    commit(spool, job)
    files = {
        "adapter_model.safetensors",
        "adam.safetensors",
        "manifest.json",
        "optimizer",
        "checkpoint",
    }
    assert committed("00000001", files) == [("fsync", "checkpoints"), ("fsync", "1")]


def test_rename_dir_refuses_an_existing_target(tmp_path, monkeypatch):
    for name in ("a", "b", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "b/file").write_text("precious")
    for target in ("b", "empty"):
        with pytest.raises(FileExistsError):
            fs.rename_dir(tmp_path / "a", tmp_path / target)
    monkeypatch.setattr(fs, "exists", lambda _: False)  # as if the target appeared after the check
    with pytest.raises(FileExistsError):
        fs.rename_dir(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").is_dir()
    assert (tmp_path / "b/file").read_text() == "precious"


def test_a_volume_that_syncs_no_directories_is_taken(tmp_path, monkeypatch):
    """CIFS answers EINVAL to fsync of a directory."""

    def fsync(fd, real=os.fsync):
        if Path(f"/proc/self/fd/{fd}").is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    commit(spool := spool_with_run(tmp_path), start(spool, "j"))
    assert spool.checkpoints.verify("r", 1).step == 1


def test_a_directory_that_others_remove_while_it_is_empty_is_made_again(tmp_path):
    directory, removed = tmp_path / "a/b", iter([True] * 9 + [False])

    def put():
        if next(removed):
            directory.rmdir()
        (directory / "file").touch()

    fs.in_made_dir(directory, put)
    assert (directory / "file").is_file()


def test_locks_exclude_processes_and_die_with_their_holder(tmp_path):
    """(`test_spool_events` has processes with threads that all need one lock.)"""
    lock = tmp_path / "lock"

    def held_elsewhere():
        with pytest.raises(LockHeldError), file_lock(lock, blocking=False):
            pass

    with file_lock(lock):
        assert in_child(held_elsewhere) == 0
        # The process opens and closes the locked file again through file_lock. The process keeps
        # the lock.
        (tmp_path / "alias").symlink_to(tmp_path)
        for name in (lock, tmp_path / "alias/lock"):
            with file_lock(name):
                pass
            assert in_child(held_elsewhere) == 0

    def die_with_it():
        with file_lock(lock):
            os.kill(os.getpid(), 9)

    assert in_child(die_with_it) == -9
    with file_lock(lock, blocking=False):
        pass


def test_a_lock_that_can_not_be_asked_is_no_dead_runner(tmp_path, monkeypatch):
    """If the live runner counted as dead, vLLM would wake on the GPUs of a job."""
    spool, now = spool_with_run(tmp_path), time.time()
    spool.hold.put(
        Hold(
            runner="r",
            job="j",
            attempt=1,
            phase="training",
            since=now,
            beat=now,
            lease=60,
            deadline=now,
        )
    )
    with spool.runner_lock("r"):
        pass

    def no_locks(_: Path) -> bool:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(locks, "is_locked", no_locks)
    with pytest.raises(OSError, match="no locks"):
        spool.hold.live()


@pytest.mark.parametrize(("writer", "live"), [("r", True), ("an earlier runner", False)])
def test_a_hold_is_its_runners_also_after_the_clock_was_set_back(tmp_path, writer, live):
    spool = spool_with_run(tmp_path)
    ends, told = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:  # the process that checks must not hold the lock itself
        with spool.runner_lock("r"):
            os.write(told[1], b"x")
            os.read(ends[0], 1)
        os._exit(0)
    os.read(told[0], 1)
    earlier = time.time() - 3600
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: earlier)
        spool.hold.put(
            Hold(
                runner=writer,
                job="j",
                attempt=1,
                phase="training",
                since=earlier,
                beat=earlier,
                lease=60,
                deadline=earlier,
            )
        )
        assert (spool.hold.live() is not None) == live
    os.write(ends[1], b"x")
    os.waitpid(pid, 0)


def test_absence_is_believed_only_after_the_directory_was_opened(tmp_path, monkeypatch):
    """An NFS client caches that a name is absent. When the client opens the directory, it asks the
    server again."""
    (tmp_path / "file").write_text("x")
    opened = set()
    real_open, real_stat = os.open, os.stat

    def noted(path, *arguments, **more):
        opened.add(str(path))
        return real_open(path, *arguments, **more)

    def forgetful_stat(path, *arguments, dir_fd=None, **more):
        if dir_fd is None or str(tmp_path) not in opened:
            raise FileNotFoundError(2, "stale", str(path))
        return real_stat(path, *arguments, dir_fd=dir_fd, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", noted)
        patch.setattr(os, "stat", forgetful_stat)
        assert fs.exists(tmp_path / "file")
    assert not fs.exists(tmp_path / "none")
    assert not fs.exists(tmp_path / "none/file")
    spool = spool_with_run(tmp_path / "spool")
    submit(spool, "j")
    real, forgotten = fs.read_plain, []

    def forgetful(path, *, most):
        if path.name == "job.json" and path not in forgotten:
            forgotten.append(path)
            raise FileNotFoundError(2, "stale", str(path))
        return real(path, most=most)

    monkeypatch.setattr(fs, "read_plain", forgetful)
    assert spool.jobs.get("j")[0] == "queued"
    assert forgotten


def test_a_stale_handle_is_not_an_absent_file(tmp_path, monkeypatch):
    """If a stale handle counted as an absent file, the runner would remove queued jobs, and vLLM
    would wake during a hold."""
    (path := tmp_path / "file").write_text("x")
    real, stale = fs.read_plain, [3]

    def read_plain(path, *, most):
        if stale[0]:
            stale[0] -= 1
            raise OSError(errno.ESTALE, "stale")
        return real(path, most=most)

    monkeypatch.setattr(fs, "read_plain", read_plain)
    assert fs.read_bytes(path) == b"x"
    stale[0] = 100
    with pytest.raises(OSError, match="stale"):
        fs.read_bytes(path)


def test_no_number_of_settled_directories_is_too_many(memory_path, monkeypatch):
    """A year of ended jobs has 8,760 directories in each of three states."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    directories = [memory_path / str(number) for number in range(5000)]
    for directory in directories:
        directory.mkdir()
    for _ in range(2):
        assert {listing(directory) for directory in directories} == {()}
        now += 3
    monkeypatch.setattr(os, "listdir", None)
    assert {listing(directory) for directory in directories} == {()}


def test_a_listing_is_remembered_only_once_its_directory_has_settled(tmp_path, monkeypatch):
    """Two changes within one tick of the file system's clock leave the same mtime."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    (tmp_path / "a").touch()
    assert listing(tmp_path) == ("a",)
    at = tmp_path.stat().st_mtime_ns

    def add(name):
        (tmp_path / name).touch()
        os.utime(tmp_path, ns=(at, at))

    add("b")
    assert listing(tmp_path) == ("a", "b")
    now += 3
    settled = listing(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", None)
        assert listing(tmp_path) is settled
    (tmp_path / "c").touch()
    (tmp_path / ".tmp-d").touch()
    assert listing(tmp_path) == ("a", "b", "c")
    assert listing(tmp_path / "none") == listing(tmp_path / "a") == ()


NAME = "a-name-that-no-other-job-has"


@pytest.mark.parametrize("kind", ["job", "event"])
def test_records_leave_nothing(tmp_path: Path, kind: str) -> None:
    spool = spool_with_run(tmp_path)
    job = submit(spool, NAME)
    event = spool.events.append(NAME, "step", attempt=1, of=NAME)
    text, parse = (
        (job.model_dump_json(), Job.model_validate_json)
        if kind == "job"
        else (event.model_dump_json(), Event.model_validate_json)
    )
    assert growth(lambda number: parse(text.replace(NAME, f"{kind}-{number:026d}"))) < 20_000


def test_threads_list_directories_while_others_come_and_go(tmp_path: Path) -> None:
    def comes_and_goes(name: str) -> None:
        parent = tmp_path / name
        parent.mkdir()
        for number in range(150):
            (child := parent / str(number)).mkdir()
            assert listing(parent) == (str(number),)
            assert listing(child) == ()
            child.rmdir()
            assert listing(parent) == ()

    for number in range(500):  # with these listings the search of all known records takes a while
        (known := tmp_path / "known" / str(number)).mkdir(parents=True)
        listing(known)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(comes_and_goes, "abcd"))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.slow
def test_listings_of_directories_that_are_gone_leave_nothing(memory_path: Path) -> None:
    spool = spool_with_run(memory_path)
    top = str(spool.paths.live)

    def list_a_run(number: int) -> None:
        os.makedirs(directory := f"{top}/run-{number}/00000")  # noqa: PTH103 (pathlib keeps names)
        for job in range(5):
            name = f"{job:016d},00000000,run-{number},job-{number}-{job}"
            os.mkdir(f"{directory}/{name}")  # noqa: PTH102
        assert spool.jobs.index.count("queued") == 5
        shutil.rmtree(f"{top}/run-{number}")

    assert growth(list_a_run, 400) < 200_000


def growth(read: Callable[[int], object], records: int = 2000) -> int:
    """Bytes that stay in memory after `records` calls with different numbers."""
    for number in range(200):
        read(number)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(200, 200 + records):
            read(number)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
