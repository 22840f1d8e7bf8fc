"""Fixtures of the spool's tests."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from spool.spool_tools import spool_with_run
from tandem.spool import Spool


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A temporary directory in memory, where fsync costs nothing; on disk where there is no /dev/shm."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tandem-test-") as directory:
        yield Path(directory)


@pytest.fixture
def spool(memory_path: Path) -> Spool:
    """A spool with the run `r`."""
    return spool_with_run(memory_path / "spool")
