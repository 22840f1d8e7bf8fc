"""Prometheus' programs, from PATH or from Prometheus' image. A test is skipped if there are neither
programs nor an image."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROMETHEUS = ROOT / "images" / "prometheus"
RULES = PROMETHEUS / "rules"
IMAGE = "prom/prometheus:stand-in"


def command(program: str, *arguments: str, cwd: Path) -> list[str]:
    """The command that runs `prometheus` or `promtool` with `cwd` as its directory and the host's
    network.

    Skips the test if neither the program nor its image exists. With TANDEM_REQUIRE_DOCKER=1 the
    test fails instead.
    """
    if shutil.which(program):
        return [program, *arguments]
    if shutil.which("docker"):
        inspect = ["docker", "image", "inspect", IMAGE]
        if subprocess.run(inspect, capture_output=True, timeout=60, check=False).returncode == 0:
            return [
                "docker",
                "run",
                "--rm",
                "-i",
                "--user",
                str(os.getuid()),
                "--network",
                "host",
                "-v",
                f"{cwd}:/w",
                "-w",
                "/w",
                "--entrypoint",
                program,
                IMAGE,
                *arguments,
            ]
    message = f"neither {program} on PATH nor an engine with the image {IMAGE}"
    if os.environ.get("TANDEM_REQUIRE_DOCKER") == "1":
        pytest.fail(message)
    pytest.skip(message)


def promtool(
    *arguments: str, cwd: Path, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs promtool on files below `cwd`. `arguments` name the files relative to `cwd`. `text` is
    promtool's input."""
    cwd.chmod(0o755)
    run = command("promtool", *arguments, cwd=cwd)
    # With Go's default of GOGC, promtool spends a quarter of its time on garbage collection.
    fast = os.environ | {"GOGC": "400"}
    return subprocess.run(
        run, cwd=cwd, env=fast, input=text, capture_output=True, text=True, timeout=300, check=False
    )
