from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def alone():
    """This process as the only rank, on the CPU."""
    from tandem.model import device, parallel

    device.activate("cpu")
    yield parallel.init_parallel()
    parallel.destroy()
