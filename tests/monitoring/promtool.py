"""promtool: the one on PATH, else the one in the Prometheus image, else the test is skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROMETHEUS = ROOT / "images" / "prometheus"
RULES = PROMETHEUS / "rules"
IMAGE = "prom/prometheus:stand-in"


def promtool(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run promtool on files below `cwd`, named relative to it. Skips (fails, with TANDEM_REQUIRE_DOCKER=1) without."""
    command = ["promtool"]
    if shutil.which("promtool") is None:
        if not _image():
            message = f"neither promtool on PATH nor an engine with the image {IMAGE}"
            if os.environ.get("TANDEM_REQUIRE_DOCKER") == "1":
                pytest.fail(message)
            pytest.skip(message)
        command = ["docker", "run", "--rm", "--user", str(os.getuid()), "--network", "none", "-v", f"{cwd}:/files:ro",
                   "-w", "/files", "--entrypoint", "promtool", IMAGE]  # fmt: skip
    return subprocess.run([*command, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def _image() -> bool:
    if shutil.which("docker") is None:
        return False
    found = subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True, timeout=60, check=False)
    return found.returncode == 0
