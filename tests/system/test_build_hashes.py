"""All inputs of the images' builds are pinned by hash. The test needs no Docker engine."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_everything_that_builds_the_images_has_a_hash():
    """uv.lock has the hashes of the installed packages. `images/build.txt` has the hashes of uv and
    hatchling."""
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


def test_every_image_of_others_can_be_pinned_by_digest():
    """Each image of another project is named by a variable, with or without the image's digest.
    Tandem's own images are built from this repository."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE)
    bases = set(re.findall(r"^FROM (\S+) AS", dockerfile, re.MULTILINE)) - set(stages)
    assert bases == {"${BASE}", "torch-${DEVICE}"}  # torch-cuda and torch-cpu are stages
    found = set()
    for compose in ROOT.glob("docker-compose*.yml"):
        for image in re.findall(r"^ +image: (\S+)$", compose.read_text(), re.MULTILINE):
            if "TANDEM_IMAGE_PREFIX" in image or image == "scratch":
                continue
            found.add(image.partition(":-")[0])
    assert found == {"${PROMETHEUS_IMAGE", "${GRAFANA_IMAGE"}
    for file, pinned in ("Dockerfile", "BASE"), ("docker-compose.yml", "PROMETHEUS_IMAGE"):
        assert f"{pinned}=" in (text := (ROOT / file).read_text())
        assert "@sha256:" in text
