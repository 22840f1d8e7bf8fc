"""Fixtures of the ranks' tests."""

from pathlib import Path

import pytest

from rank import jobs
from tandem.spool import Spool


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def spool(tmp_path: Path, model: Path) -> Spool:
    """A spool with the run `r`."""
    spool = Spool.create(tmp_path / "spool")
    jobs.make_run(spool, model)
    return spool
