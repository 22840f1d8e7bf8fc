from collections.abc import Iterator

import pytest

from local_stack import LocalStack


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """One stack for the client programs of all test files in this package. The turns of a game fill
    a context of 4,096 tokens."""
    variables = {"TANDEM_KEEP_SERVED": "3", "TANDEM_MAX_MODEL_LEN": "4096"}
    with LocalStack(tmp_path_factory.mktemp("clients"), **variables) as stack:
        yield stack
