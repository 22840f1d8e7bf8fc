import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_vllm import FakeVllm
from inference.stage import Stage
from inference.worker_models import Model
from tiny import MERGED_SIZES, write_random_model


def write_model(family: str, factory: pytest.TempPathFactory) -> Path:
    return write_random_model(factory.mktemp(family), family=family, **MERGED_SIZES[family])


@pytest.fixture(scope="module", params=list(MERGED_SIZES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model, for each family in `MERGED_SIZES`."""
    return write_model(request.param, tmp_path_factory)


@pytest.fixture
def model(directory: Path) -> Model:
    return Model(directory)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(write_model("qwen3", tmp_path_factory))


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(write_model("qwen3_moe", tmp_path_factory))


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    # The publisher puts its copies of adapters into this directory.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    vllm = FakeVllm()
    vllm.start()
    yield Stage(tmp_path, vllm)
    vllm.stop()
