from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest

import api_server
from tandem.client import Tandem

_numbers = count()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return api_server.make_root(tmp_path_factory.mktemp("volume") / "spool")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[api_server.Server]:
    """One controller per file; tests keep apart by using runs of their own."""
    with api_server.Server(root) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: api_server.Server) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture(scope="module")
def client(server: api_server.Server) -> Iterator[Tandem]:
    with Tandem(server.url, api_server.KEY, patience=5) as client:
        yield client


@pytest.fixture
def run(client: Tandem) -> str:
    """A new run."""
    return client.create_run(f"run-{next(_numbers)}", lora={"rank": 2}).spec.name


@pytest.fixture(scope="module")
def idle_run(client: Tandem) -> str:
    """A run that no test changes."""
    return client.create_run("alpha", lora={"rank": 2}).spec.name


@pytest.fixture
def no_jobs_left(server: api_server.Server) -> Iterator[None]:
    """Cancels what a test left in the queue, so that the next one claims its own job."""
    yield
    for _, job in server.spool.jobs.list(states=("queued", "running")):
        server.spool.queue.cancel(job.spec.id)
