from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_model

from fake_vllm import FakeVllm
from inference.stage import Stage
from tiny import write_random_model
from vllm_server import VllmServer


@pytest.fixture(scope="session", autouse=True)
def loading_vllm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A vLLM with a mixture of experts, for test_real_vllm.py. It loads while the other tests of this directory run."""
    if not any("vllm" in getattr(item, "fixturenames", ()) for item in request.session.items):
        yield None
        return
    directory = tmp_path_factory.mktemp("vllm")
    tiny_model.write_tokenizer(directory / "model")
    write_random_model(directory / "model", family="qwen3_moe", vocab_size=320, hidden_size=64, head_dim=32,
                       moe_intermediate_size=32, max_position_embeddings=4096)  # fmt: skip
    server = VllmServer(directory, directory / "model")
    yield server
    server.close()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # for the publisher's copies of adapters
    vllm = FakeVllm()
    vllm.start()
    yield Stage(tmp_path, vllm)
    vllm.stop()
