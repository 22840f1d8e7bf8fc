"""If a session's ranks are killed at any moment, the session computes the same bytes as an
undisturbed session, on one rank and on two."""

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import SEED
from rank import jobs
from ranks import run_program

pytestmark = pytest.mark.sample(1, of="processes of jobs")

CASES: dict[str, tuple[str | None, int]] = {
    "one": (None, 10),
    "dp": ("dp", 1),
    "tp": ("tp", 1),
    "cp": ("cp", 1),
    "pp": ("pp", 1),
}
"""Topology and number of kills, by the case's name."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("killed")
    model = jobs.make_model(directory / "model")
    script = Path(__file__).with_name("kill_sessions.py")
    printed = run_program(str(script), str(model), str(directory), json.dumps(CASES), seconds=550)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return {one["name"]: one for one in found}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_killed_ranks_leave_no_trace(results: dict[str, dict[str, Any]], case: str) -> None:
    found = results[case]
    print(f"SAMPLE_SEED={SEED}: {found['killed']}")
    assert found["compared"] > 20
    assert len(found["killed"]) == CASES[case][1]
    assert found["differ"] == []
    assert found["from_one_rank"] < 2e-4
