"""`make demo` teaches what it claims, on the real parts."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tandem.system import ports

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_learns(tmp_path):
    with ExitStack() as held:
        controller, inference = (held.enter_context(ports.reserve()).port for _ in range(2))
    out = tmp_path / "demo"
    run = subprocess.run(
        [sys.executable, "examples/demo.py", "--out", str(out), "--controller-port", str(controller),
         "--inference-port", str(inference)],
        cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False,
    )  # fmt: skip
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    report = json.loads((out / "report.json").read_text())
    assert report["samples"] == 200
    assert abs(report["sft_reward"] - 0.75) <= 0.05
    assert report["rl_reward"] >= 0.95
    rewards = [row["reward"] for row in report["steps"]]
    assert rewards[-1] > rewards[0] + 0.1
    assert (out / "reward.png").stat().st_size > 10_000
    # Two programs that ought to compute the same did: the sampler's log-probs are the trainer's.
    assert max(row["metrics"]["kl_sampler"] for row in report["steps"]) < 1e-3
