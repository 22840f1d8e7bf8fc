from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from supervise.tandem_up import Up


@pytest.fixture
def up(tmp_path) -> Iterator[Callable[..., Up]]:
    """Starts a `tandem up` on this test's spool."""
    with ExitStack() as stacks:
        yield lambda **options: stacks.enter_context(closing(Up(tmp_path, **options)))
