from collections.abc import Iterator

import pytest
import tiny_model

from local_stack import LocalStack


@pytest.fixture(scope="package")
def resident_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A stack whose ranks stay between jobs, for all test files that use the fixture."""
    with LocalStack(tmp_path_factory.mktemp("resident"), TANDEM_LAUNCH="resident") as stack:
        yield stack


@pytest.fixture(scope="package")
def loops_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A stack for the loops of `tandem rl` and of Tinker's package. The stack's model is large
    enough to learn the examples."""
    root = tmp_path_factory.mktemp("loops") / "spool"
    tiny_model.write_tiny_qwen3(root / "models" / "tiny")
    variables = {"TANDEM_KEEP_SERVED": "3", "TANDEM_SESSION_IDLE_SECONDS": "2"}
    with LocalStack(root, **variables) as stack:
        yield stack
