import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_vllm import FakeVllm
from inference.stage import Stage
from tiny import MERGED_SIZES, write_random_model


@pytest.fixture(scope="module", params=list(MERGED_SIZES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each family in `MERGED_SIZES`."""
    path = tmp_path_factory.mktemp(request.param)
    return write_random_model(path, family=request.param, **MERGED_SIZES[request.param])


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # for the publisher's copies of adapters
    vllm = FakeVllm()
    vllm.start()
    yield Stage(tmp_path, vllm)
    vllm.stop()
