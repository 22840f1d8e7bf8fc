"""If a job's ranks are killed at any moment, the next attempt makes the same bytes as an
undisturbed job."""

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import SEED
from rank import jobs
from ranks import run_program

pytestmark = pytest.mark.sample(1, of="processes of jobs")

MODELS: dict[str, dict[str, object]] = {
    "lora": {"family": "qwen3"},
    "lora-experts": {"family": "qwen3_moe"},
    "full": {"family": "qwen2", "tie_word_embeddings": True},
    "full-experts": {"family": "qwen3_moe"},
}
CASES = [
    *(("lora", topology) for topology in ("dp", "sp", "cp", "pp")),
    ("lora-experts", "ep"),
    ("lora-experts", "pp"),
    *(("full", topology) for topology in ("dp", "sp", "cp", "pp")),
    ("full-experts", "ep"),
]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Any, dict[str, Any]]:
    """(kind, topology) of each selected case -> the line that `kill_ranks.py` prints about the
    case."""
    directory = tmp_path_factory.mktemp("killed")
    for kind, config in MODELS.items():
        jobs.make_model(directory / kind, **config)
    items = [
        item
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    cases = [(item.callspec.params["kind"], item.callspec.params["topology"]) for item in items]
    script = Path(__file__).with_name("kill_ranks.py")
    # The test takes a minute on two cores, and several minutes if thirty other processes use the
    # cores too.
    printed = run_program(str(script), str(directory), json.dumps(cases), seconds=500)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return dict(zip(cases, found, strict=True))


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "topology"), CASES)
def test_a_job_tried_again_makes_the_same_bytes(results: Any, kind: str, topology: str) -> None:
    found = results[kind, topology]
    print(f"SAMPLE_SEED={SEED}: {found['killed']}")
    assert found["files"] > 4
    assert found["killed"]
    assert found["differ"] == []
