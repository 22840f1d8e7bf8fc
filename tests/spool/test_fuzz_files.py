"""A few rounds of `bench.fuzz_files`, which runs for as long as one likes. In a process of its own, as the bench is: it
has a publisher, a controller and a runner with ranks in one process, and ends without waiting for their threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_no_damaged_file_stops_a_program_or_trains_other_weights() -> None:
    command = [sys.executable, "-m", "bench.fuzz_files", "--seed=1", "--rounds=12"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "12 rounds with seed 1; 0 problems" in done.stdout
