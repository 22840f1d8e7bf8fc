"""What builds the images is known by hash; no engine is needed to read that."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_everything_that_builds_the_images_has_a_hash():
    """uv.lock has those of what is installed. `images/build.txt` has those of uv and hatchling."""
    dockerfile = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
    for installer in ("pip install", "uv build"):
        lines = [line for line in dockerfile.splitlines() if f"/uv/bin/{installer}" in line]
        assert lines
        for line in lines:
            assert "--require-hashes" in line
            assert "/build.txt" in line
    for line in dockerfile.splitlines():
        if "uv pip install" in line:
            assert "--no-deps /wheel/*.whl" in line
    pinned = (ROOT / "images/build.txt").read_text().replace("\\\n", "").splitlines()
    packages = [line for line in pinned if not line.startswith("#")]
    assert {"uv", "hatchling"} <= {line.partition("==")[0] for line in packages}
    assert all("--hash=sha256:" in line for line in packages)
