"""Fixtures of the spool's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from spool.spool_tools import memory_directory, spool_with_run
from tandem.spool import Spool


@pytest.fixture
def memory_path() -> Iterator[Path]:
    with memory_directory() as directory:
        yield Path(directory)


@pytest.fixture
def spool(memory_path: Path) -> Spool:
    """A spool with the run `r`."""
    return spool_with_run(memory_path / "spool")
