"""What every rank's environment holds, whichever way it is started."""

import pytest

from tandem.config import Settings
from tandem.trainer.launch import rank_environment


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)


def test_cores_are_shared_out_and_threads_wait_briefly(monkeypatch, tmp_path):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    environment = rank_environment(Settings(root=tmp_path, trainer_ranks=3))
    assert (environment["OMP_NUM_THREADS"], environment["GOMP_SPINCOUNT"]) == ("5", "1000")
    assert rank_environment(Settings(root=tmp_path, trainer_ranks=32))["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("name", "value", "spins"), [("OMP_WAIT_POLICY", "active", None), ("GOMP_SPINCOUNT", "7", "7")]
)
def test_how_threads_wait_is_the_operators_if_they_say_so(monkeypatch, tmp_path, name, value, spins):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv(name, value)
    environment = rank_environment(Settings(root=tmp_path))
    assert (environment["OMP_NUM_THREADS"], environment[name]) == ("2", value)
    assert environment.get("GOMP_SPINCOUNT") == spins
