from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tandem.system.environment import omp_waiting

# Before torch is loaded: what computes in this process has neighbours, too.
os.environ.update(omp_waiting(os.environ))


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """One vLLM for the whole session (it takes half a minute to start); tests name their runs apart."""
    import tiny_model

    from vllm_server import VllmServer

    directory = tmp_path_factory.mktemp("vllm")
    server = VllmServer(directory, tiny_model.write_tiny_qwen3(directory / "model", hidden_size=64, layers=2))
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def alone() -> Iterator[object]:
    """This process as the only rank, on the CPU."""
    from tandem.model import parallel
    from tandem.model.device import device

    device.activate("cpu")
    yield parallel.init_parallel()
    parallel.destroy()
