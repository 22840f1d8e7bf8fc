from pathlib import Path

import pytest

from spool.spool_tools import spool_with_run
from tandem.spool import Spool


@pytest.fixture
def volume(tmp_path: Path) -> Spool:
    return spool_with_run(tmp_path / "spool")
