"""Fixtures for tests on a real Docker Engine."""

import json
import secrets
from collections.abc import Generator, Iterator

import pytest

from compose_stack import TAG, ComposeStack, build_images, docker, require_engine


@pytest.fixture(scope="session", autouse=True)
def engine() -> None:
    require_engine()


@pytest.fixture(scope="session")
def images(engine: None) -> None:
    """The CPU images of this checkout."""
    build_images()


@pytest.fixture(scope="package")
def stack(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeStack]:
    """One running stack for `test_running_stack` and then `test_stack_faults`, on a data volume of
    1.2 GB in memory.

    A container keeps the volume in use, because the engine empties an unused volume.
    """
    directory = tmp_path_factory.mktemp("stack")
    volume = f"tandem-test-{secrets.token_hex(3)}-data"
    override = directory / "volume.yml"
    override.write_text(json.dumps({"volumes": {"data": {"external": True, "name": volume}}}))
    options = ["type=tmpfs", "device=tmpfs", "o=size=1200m,mode=2775,uid=2000,gid=0"]
    docker("volume", "create", *(word for option in options for word in ("-o", option)), volume)
    holder = docker(
        "run",
        "-d",
        "-v",
        f"{volume}:/data",
        "--entrypoint",
        "sleep",
        "--init",
        "--network",
        "none",
        f"tandem-controller:{TAG}",
        "infinity",
    ).stdout.strip()
    try:
        with ComposeStack(directory, str(override)) as stack:
            print(f"\nup --wait took {stack.up(profiles=['prometheus']):.0f} s")
            yield stack
    finally:
        docker("rm", "-f", holder)
        docker("volume", "rm", volume)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the containers' logs to the report of a failed test."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, ComposeStack):
                report.sections.append(("containers", value.tails()))
    return report
