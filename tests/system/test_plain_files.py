"""Files that others wrote are opened in one way, which accepts no link, no FIFO and no more bytes
than expected."""

import ast
import os
import threading
from pathlib import Path

import pytest

from tandem.system.plain_files import NotPlainError, copy_plain, descriptor, open_plain, read_plain

SOURCE = Path(__file__).parents[2] / "src" / "tandem"

OWN = "a file that the user of the command names"
WRITTEN = "writes a file of its own"
PRIVATE = "in a private directory of this user"
EXCEPTIONS = {
    "cli/common.py read_toml": OWN,
    "cli/train.py job": OWN,
    "client/chain.py _digest": OWN,
    "client/http.py connection": OWN,
    "client/rl/record.py RunRecord.__init__": OWN,
    "client/rl/record.py RunRecord._write": OWN,
    "client/rl/samples.py SampleFile.add": OWN,
    "client/rl/samples.py read_samples": OWN,
    "client/track/rows.py open_alone": OWN,
    "client/track/wandb.py records": OWN,
    "config.py Settings.secret": OWN,
    "data/records.py _Lines.__init__": OWN,
    "data/records.py _elements": OWN,
    "data/records.py _of_directory": OWN,
    "data/records.py open_records": OWN,
    "inference/server/middleware/guard.py AdminGuard.__init__": OWN,
    "cli/smoke.py read": PRIVATE,
    "data/stopping.py _json": "the base model, which is trusted",
    "client/api.py Api.download": WRITTEN,
    "client/download.py unpack": "unpacked by itself, without links, in a new directory",
    "data/packed_format.py PackedBatch.open": "mapped right after `sha256_file` opened it",
    "inference/merged_model.py write_merged_model": WRITTEN,
    "families/identity_adapter.py write_identity_adapter": WRITTEN,
    "inference/publisher/replica.py Member._leaves": PRIVATE,
    "inference/publisher/usage.py Usage.__init__": PRIVATE,
    "inference/server/plugin.py _give_up_the_port": "/dev/null",
    "inference/server/serve.py wait_for_gpu": PRIVATE,
    "model/transfer/channel.py make_meeting": "made here, exclusively",
    "model/compiled.py Compiled._digest": "Tandem's own source",
    "model/compiled.py Compiled._load": PRIVATE,
    "model/device/memory.py stats": "/proc",
    "supervise/up.py Stack._start": WRITTEN,
    "system/plain_files.py _through_no_link": "the opener itself",
    "system/plain_files.py descriptor": "the opener itself",
    "spool/fs.py fsync_dir": "a directory",
    "spool/fs.py open_dir": "a directory",
    "system/liveness.py reported": PRIVATE,
    "system/network.py interface_addresses": "/proc",
    "system/network.py lost_data": "/proc",
    "system/network.py network_name": "/proc",
    "system/processes.py marked": "/proc",
    "system/processes.py read_process": "/proc",
    "trainer/executor/manifest.py JobTemplate.__init__": "the chart's, which is trusted",
    "trainer/launch/bootstrap.py redirect": WRITTEN,
    "trainer/launch/forkserver.py main": "/proc",
    "trainer/launch/torchrun.py ResidentRanks.poll": PRIVATE,
    "trainer/launch/torchrun.py Torchrun.__init__": WRITTEN,
    "trainer/rank/checkpoint.py _write_and_sync": WRITTEN,
    "trainer/rank/model_files.py ModelFiles.create": "the base model",
    "trainer/rank/model_files.py ModelFiles.write": WRITTEN,
}
"""Functions that open files in another way, and the reason why this is safe."""

OPENERS = {"open", "read_text", "read_bytes", "copyfile", "copy2", "copytree", "memmap"}
OPENERS |= {"open_memmap", "safe_open", "load_file"}
NO_OPENERS = {"PackedBatch.open", "launch.open", "_OPENER.open", "fs.read_bytes", "read_bytes"}
"""Functions of these names that open nothing by themselves."""


def opens(node: ast.AST, where: tuple[str, ...] = ()) -> set[str]:
    """The names of the functions that open files by a path."""
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        inside = where
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = (*where, child.name)
        elif isinstance(child, ast.Call) and _opens(child):
            found.add(".".join(where))
        found |= opens(child, inside)
    return found


def _opens(call: ast.Call) -> bool:
    called = ast.unparse(call.func)
    if called in NO_OPENERS or called.rpartition(".")[2] not in OPENERS:
        return False
    if called == "np.memmap":  # a memmap of an open file opens no path
        return ast.unparse(call.args[0]) != "file"
    modes = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    return "xb" not in modes  # the mode "xb" opens no file that exists


def test_every_other_way_to_open_a_file_has_a_reason():
    found = {
        f"{path.relative_to(SOURCE).as_posix()} {function}"
        for path in SOURCE.rglob("*.py")
        for function in opens(ast.parse(path.read_text()))
    }
    assert found - set(EXCEPTIONS) == set(), "use tandem.system.plain_files"
    assert set(EXCEPTIONS) - found == set(), "opens nothing any more; remove it"


def link(path: Path) -> None:
    (path.parent / "secret").write_text("secret")
    path.symlink_to(path.parent / "secret")


def directory_link(path: Path) -> None:
    (path.parent.parent / "elsewhere").mkdir()
    (path.parent.parent / "elsewhere" / path.name).write_text("secret")
    path.parent.rmdir()
    path.parent.symlink_to(path.parent.parent / "elsewhere")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**31)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [link, directory_link, sparse, device, os.mkfifo, Path.mkdir])
def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path, make) -> None:
    (path := tmp_path / "directory" / "file").parent.mkdir()
    make(path)
    for action in (
        lambda: read_plain(path, most=100),
        lambda: open_plain(path, most=100),
        lambda: copy_plain(path, tmp_path / "copy", most=100),
    ):
        with pytest.raises(NotPlainError, match="file"):
            action()
    assert not (tmp_path / "copy").exists()
    if make is not sparse:
        with pytest.raises(NotPlainError):
            descriptor(path, os.O_RDWR | os.O_CREAT)


@pytest.mark.parametrize("flag", [os.O_CREAT, os.O_TRUNC])
def test_a_file_behind_a_directory_link_is_neither_made_nor_emptied(
    tmp_path: Path, flag: int
) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "old").write_text("kept")
    (tmp_path / "link").symlink_to(elsewhere)
    for name in ("old", "new"):
        with pytest.raises((NotPlainError, FileNotFoundError)):
            descriptor(tmp_path / "link" / name, os.O_WRONLY | flag)
    assert {path.name: path.read_text() for path in elsewhere.iterdir()} == {"old": "kept"}


def test_links_that_are_allowed_are_followed(tmp_path: Path) -> None:
    (path := tmp_path / "directory" / "file").parent.mkdir()
    directory_link(path)
    assert read_plain(path, most=100, links="above") == b"secret"
    (path.parent / "link").symlink_to(path)
    assert read_plain(path.parent / "link", most=100, links="any") == b"secret"
    with pytest.raises(NotPlainError):
        read_plain(path.parent / "link", most=100, links="above")
    (tmp_path / "fifo").symlink_to(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotPlainError):
        read_plain(tmp_path / "fifo", most=100, links="any")


def test_a_file_that_is_renamed_while_it_is_opened_is_absent_or_read(tmp_path: Path) -> None:
    path, other, stop = tmp_path / "file", tmp_path / "other", threading.Event()
    path.write_text("x")

    def rename() -> None:
        while not stop.is_set():
            path.rename(other)
            other.rename(path)

    (thread := threading.Thread(target=rename)).start()
    found = set()
    try:
        for _ in range(3000):
            try:
                found.add(read_plain(path, most=10))
            except FileNotFoundError:
                found.add(None)
    finally:
        stop.set()
        thread.join()
    assert found <= {b"x", None}
    assert b"x" in found
