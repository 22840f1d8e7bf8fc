"""A short round of `python -m tests.fuzz.files`, which runs for as long as one likes."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.sample(1, of="fuzz")
@pytest.mark.slow
def test_no_damaged_file_stops_a_program_or_trains_other_weights() -> None:
    """The fuzzer runs in a process of its own, because the fuzzer ends without waiting for its
    threads."""
    command = [sys.executable, "-m", "tests.fuzz.files", "--seed=1", "--rounds=12"]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "12 rounds with seed 1; 0 problems" in done.stdout
