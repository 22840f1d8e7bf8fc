from collections.abc import Callable, Iterator

import pytest

from supervise.tandem_up import Up


@pytest.fixture
def up(tmp_path) -> Iterator[Callable[..., Up]]:
    """Starts a `tandem up` on this test's spool."""
    started: list[Up] = []

    def start(**options) -> Up:
        started.append(Up(tmp_path, **options))
        return started[-1]

    yield start
    for stack in started:
        stack.close()
