from collections.abc import Iterator
from itertools import count

import httpx
import pytest

from api_server import KEY, Server, no_jobs_left, root, server  # noqa: F401
from tandem.client import Tandem

_numbers = count()


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:  # noqa: F811
    with server.http() as client:
        yield client


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Tandem]:  # noqa: F811
    with Tandem(server.url, KEY, patience=5) as client:
        yield client


@pytest.fixture
def run(client: Tandem) -> str:
    """A new run."""
    return client.create_run(f"run-{next(_numbers)}", lora={"rank": 2}).spec.name


@pytest.fixture(scope="module")
def idle_run(client: Tandem) -> str:
    """A run that no test changes."""
    return client.create_run("idle", lora={"rank": 2}).spec.name
