"""The program that keeps a base model's files in a node's page cache."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Event

import pytest

from tandem.errors import InvalidInput
from tandem.system.processes import read_process
from tandem.trainer.warm import read_model

SIZE = 24 * 2**20 + 5


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The directory of a model, `m` in the spool's root `tmp_path`. The directory also has a file
    that does not belong to the model."""
    (model := tmp_path / "m").mkdir()
    for name in ("model.safetensors", "notes.bin"):
        (model / name).write_bytes(os.urandom(SIZE))
    (model / "config.json").write_text("{}")
    return model


def cached(path: Path) -> int:
    """The number of the file's bytes in the page cache."""
    command = ["fincore", "--bytes", "--noheadings", "--raw", "--output", "RES", path]
    return int(subprocess.run(command, capture_output=True, check=True).stdout)


def drop(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(path):
        pytest.skip("this file system keeps its pages")


def test_a_models_files_and_no_others_are_read(model: Path) -> None:
    assert read_model(str(model), Event()) == SIZE + 2
    stopped = Event()
    stopped.set()
    assert read_model(str(model), stopped) == 0
    with pytest.raises(InvalidInput, match="neither a directory nor a model"):
        read_model("absent/model", Event())


def test_files_come_into_the_page_cache_when_they_are_there_until_sigterm(model: Path) -> None:
    weights, others, later = model / "model.safetensors", model / "notes.bin", model.parent / "late"
    for path in (weights, others):
        drop(path)
    environment = os.environ | {"TANDEM_ROOT": str(model.parent), "TANDEM_BASE_MODEL": "m"}
    command = [sys.executable, "-m", "tandem.trainer.warm"]
    program = subprocess.Popen(command, env=environment, stderr=later.open("wb"))
    try:
        end = time.monotonic() + 60
        # The kernel may take some pages back at once if memory is short.
        while (now := cached(weights)) < SIZE // 2:
            assert time.monotonic() < end, (now, later.read_text())
            assert program.poll() is None, later.read_text()
            time.sleep(0.1)
        assert cached(others) == 0
        assert read_process(program.pid) is not None
        program.send_signal(signal.SIGTERM)
        assert program.wait(30) == 0
    finally:
        program.kill()
        program.wait(30)
