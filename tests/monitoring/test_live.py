"""A real Prometheus scrapes the made-up deployment with our configuration: every query of every dashboard shows
something, every rule is evaluated, and no alert fires."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from monitoring.dashboards import queries, resolved, rules
from monitoring.prometheus_tools import ROOT, command
from tandem.system import ports

pytestmark = pytest.mark.slow

# Queries that rightly show nothing on a healthy stack that has run for seconds.
EMPTY = {
    "overview: Firing alerts A",
    "jobs: Full in A",  # the volume does not shrink
    "jobs: Attempts that failed A",  # only intervals with a failure
    *(f"{name}: {note}" for name in ("overview", "gpu-memory", "training", "inference", "jobs")
      for note in ("Jobs that ended", "Steps served")),  # annotations
}  # fmt: skip


@contextmanager
def _running(run: list[str], log: Path, directory: Path) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(run, cwd=directory, stdout=out, stderr=out)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Prometheus:
    def __init__(self, url: str, log: Path) -> None:
        self.url = f"{url}/api/v1"
        self.log = log

    def get(self, path: str, **parameters: str) -> dict:
        return httpx.get(f"{self.url}/{path}", params=parameters, timeout=30).json()

    def query(self, expr: str) -> list:
        """The series; raises AssertionError for PromQL that Prometheus refuses."""
        answer = self.get("query", query=expr)
        assert answer["status"] == "success", f"{answer['error']}: {expr}"
        return answer["data"]["result"]

    def wait_until_empty[T](self, still_wrong: Callable[[], T]) -> None:
        end = time.monotonic() + 60
        while wrong := self._try(still_wrong):
            assert time.monotonic() < end, f"{wrong}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.5)

    def _try[T](self, still_wrong: Callable[[], T]) -> T | str:
        try:
            return still_wrong()
        except (httpx.TransportError, ValueError) as error:  # it is starting: no answer, or one that is no JSON
            return str(error) or type(error).__name__


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory) -> Iterator[Prometheus]:
    directory = tmp_path_factory.mktemp("prometheus")
    with ports.reserve() as held:
        port = held.port
    run = command("prometheus", f"--web.listen-address=127.0.0.1:{port}", "--config.file=prometheus.yml",
                  "--storage.tsdb.path=data", cwd=directory)  # fmt: skip
    log, demo_log = directory / "prometheus.log", directory / "demo.log"
    demo = [sys.executable, "-m", "images.grafana.demo", str(directory), "--interval", "1s"]
    with ExitStack() as running:
        running.enter_context(_running(demo, demo_log, ROOT))
        end = time.monotonic() + 60
        while "&& prometheus" not in demo_log.read_text():
            assert time.monotonic() < end, demo_log.read_text()
            time.sleep(0.1)
        running.enter_context(_running(run, log, directory))
        started = Prometheus(f"http://127.0.0.1:{port}", log)
        started.wait_until_empty(lambda: "targets are missing" if len(started.query("up == 1")) < 4 else "")
        yield started


def test_every_query_of_every_dashboard_shows_something(prometheus):
    missing = [(where, resolved(expr, window="30s")) for where, expr in queries()]

    def still_missing() -> list[tuple[str, str]]:
        missing[:] = [(where, expr) for where, expr in missing if not prometheus.query(expr) and where not in EMPTY]
        return missing

    prometheus.wait_until_empty(still_missing)


def test_every_rule_is_evaluated_and_nothing_fires(prometheus):
    def loaded() -> dict[str, dict]:
        groups = prometheus.get("rules")["data"]["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    own = [rule for rule in rules() if "kube_" not in rule["expr"]]
    assert set(loaded()) == {rule.get("alert") or rule["record"] for rule in own}
    prometheus.wait_until_empty(lambda: [f"{name}: {rule.get('lastError')}" for name, rule in loaded().items()
                                         if rule["health"] != "ok"])  # fmt: skip
    assert not [name for name, rule in loaded().items() if rule.get("state") == "firing"]


def test_what_is_dropped_is_dropped(prometheus):
    for pattern in ("vllm:lora_requests_info", ".*_created", "python_gc_.*"):
        assert prometheus.query(f'{{__name__=~"{pattern}",job="tandem-vllm"}}') == []
