"""A short run of the soak with a random seed. The test prints the seed. The command
`python -m tests.soak --seed N` repeats the plan of the seed N."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.system import processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]


@pytest.mark.sample(1, of="long runs of all programs")
def test_kills_break_no_promise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    kills = 100 if pytestconfig.option.all_cases else 25
    seed = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(2**32)))
    with capsys.disabled():
        print(f"\nsoak: SOAK_SEED={seed}")
    work = tmp_path / "soak"
    command = [
        sys.executable,
        "-m",
        "tests.soak",
        "--kills",
        str(kills),
        "--seed",
        str(seed),
        "--work",
        str(work),
        "--round",
        str(kills),
        "--pace",
        "0.8",
        "--costly",
        "0.03",
    ]
    repository = Path(__file__).parents[2]
    soak = subprocess.Popen(
        command, cwd=repository, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        out, _ = soak.communicate(timeout=600)
    finally:
        if soak.poll() is None:
            soak.send_signal(signal.SIGTERM)  # the soak unmounts its volume
            soak.communicate(timeout=60)
        processes.kill_all(
            lambda: processes.marked("TANDEM_ROOT", str(work / "volume")), timeout=10
        )
    print(out)
    with capsys.disabled():
        for line in out.splitlines():
            if "no tmpfs" in line:
                print(line)
    assert soak.returncode == 0, out
    assert f"soak: {kills} kills, 0 violations" in out
