"""A loss of power right after an operation undoes no part of the operation. In the tests of this
file, everything that was not synced is lost."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spool.spool_tools import add_run, serve, submit
from spool.test_spool_crash import CASES, summary
from tandem.spool import Spool, recovery
from tandem.spool.recovery import recover
from tandem.system.logs import Log


class Disk:
    """The content of the disk: each file and directory as of its last sync."""

    def __init__(self) -> None:
        # Inode of a directory -> name in the directory -> the name's inode, and whether this inode
        # is a directory.
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}
        self._contents: dict[int, bytes] = {}

    def sync(self, path: Path) -> None:
        inode = path.stat().st_ino
        if path.is_dir():
            self._names[inode] = {
                entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(path)
            }
        else:
            self._contents[inode] = path.read_bytes()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        def fsync(fd: int, real=os.fsync) -> None:
            real(fd)
            self.sync(Path(f"/proc/self/fd/{fd}").readlink())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            yield

    def write(self, directory: int, target: Path) -> None:
        """Write the remaining content of a directory (inode)."""
        target.mkdir()
        for name, (inode, is_directory) in self._names.get(directory, {}).items():
            if is_directory:
                self.write(inode, target / name)
            else:
                (target / name).write_bytes(self._contents.get(inode, b""))


def settled(root: Path) -> dict:
    """The state after a new runner has completed the operations that the loss of power
    interrupted."""
    spool = Spool.create(root)
    recover(spool, "new")
    return summary(spool)


def after_power_loss(disk: Disk, root: Path) -> Path:
    disk.write(root.stat().st_ino, lost := root.with_name("lost"))
    return lost


@pytest.mark.parametrize("name", CASES)
def test_an_operation_is_on_the_disk_when_it_returns(memory_path, monkeypatch, name):
    monkeypatch.setattr(recovery, "STALE_SECONDS", -1.0)
    monkeypatch.setattr(Log, "info", lambda *_, **__: None)
    case, disk, root = CASES[name], Disk(), memory_path / "spool"
    spool = Spool.create(root)
    add_run(spool, "r")
    case.prepare(spool)
    for path in (root, *root.rglob("*")):
        disk.sync(path)
    with disk.in_use():
        case.operate(Spool(root))
    lost = after_power_loss(disk, root)
    assert settled(lost) == settled(root)


def test_what_is_removed_does_not_come_back(memory_path):
    disk, root = Disk(), memory_path / "spool"
    with disk.in_use():
        spool = Spool.create(root)
        add_run(spool, "r")
        spool.checkpoints.pin("r", 0)
        serve(spool, 0)
        spool.checkpoints.unpin("r", 0)
        spool.served.withdraw("r")
    lost = Spool(after_power_loss(disk, root))
    assert (lost.checkpoints.pinned("r"), lost.served.get("r")) == ([], None)


def test_the_first_job_of_a_new_spool_is_on_the_disk(memory_path):
    disk, root = Disk(), memory_path / "spool"
    with disk.in_use():
        spool = Spool.create(root)
        add_run(spool, "r")
        submit(spool, "j")
    assert settled(after_power_loss(disk, root)) == summary(spool)
