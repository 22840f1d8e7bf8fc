"""A short round of `python -m tests.fuzz.api`, which runs for as long as one likes."""

from pathlib import Path

import pytest

from fuzz.api import fuzz


@pytest.mark.sample(1, of="fuzz")
@pytest.mark.slow
def test_no_answer_is_a_fault_and_each_is_as_documented(tmp_path: Path) -> None:
    report = fuzz(tmp_path, seed=1, seconds=20, arguments=("--max-examples=10",))
    assert not report, report
