import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_vllm import FakeVllm
from inference.stage import Stage


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # for the publisher's copies of adapters
    vllm = FakeVllm()
    vllm.start()
    yield Stage(tmp_path, vllm)
    vllm.stop()
