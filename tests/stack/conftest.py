from collections.abc import Iterator

import pytest

from local_stack import LocalStack


@pytest.fixture(scope="session")
def resident_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A stack whose ranks stay between jobs, for every file of the group that uses it."""
    with LocalStack(tmp_path_factory.mktemp("resident"), TANDEM_LAUNCH="resident") as stack:
        yield stack
