"""The variables that every launcher starts ranks with."""

import pytest

from tandem.config import Settings
from tandem.trainer.launch.launcher import rank_environment


@pytest.mark.parametrize(
    ("ranks", "given", "expected"),
    [
        (3, {}, {"OMP_NUM_THREADS": "5", "GOMP_SPINCOUNT": "1000"}),  # 16 cores are divided
        (32, {}, {"OMP_NUM_THREADS": "1"}),
        (1, {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": None}),
        (1, {"GOMP_SPINCOUNT": "7"}, {}),
    ],
)
def test_cores_are_divided_and_threads_wait_briefly_unless_the_operator_sets_it(monkeypatch, ranks, given, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    environment = rank_environment(Settings(trainer_ranks=ranks))
    for name, value in (given | expected).items():
        assert environment.get(name) == value
