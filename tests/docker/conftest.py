"""Tests on a real Docker Engine: skipped where there is none, failed where TANDEM_REQUIRE_DOCKER=1 says that one is."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from compose_stack import CPU, MAIN, Compose, ComposeStack, no_engine


@pytest.fixture(scope="session", autouse=True)
def engine() -> None:
    why = no_engine()
    if why is None:
        return
    if os.environ.get("TANDEM_REQUIRE_DOCKER") == "1":
        pytest.fail(f"TANDEM_REQUIRE_DOCKER=1, but {why}")
    pytest.skip(f"needs a Docker engine: {why}")


@pytest.fixture(scope="session")
def images(engine: None) -> None:
    """The CPU images of this checkout."""
    Compose(MAIN, CPU, project="tandem").run("build", timeout=3000)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What the containers said stands in the report of a test that failed."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, ComposeStack):
                report.sections.append(("containers", value.tails()))
    return report
