"""A real Prometheus scrapes the made-up deployment with our configuration: every query of every
dashboard shows something, every rule is evaluated, and no alert fires."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from free_ports import free_ports
from monitoring.dashboards import DASHBOARDS, metrics, panels, queries, resolved, rules
from monitoring.prometheus_tools import ROOT, command
from monitoring.test_names import exported
from tandem.metrics.catalogue import CATALOGUE
from waiting import until

pytestmark = pytest.mark.slow

GPUS = 8  # 8 GPUs train, and 8 others serve.
# Queries whose result may be empty on a healthy stack that has run for seconds.
EMPTY = {
    "overview: Firing alerts A",
    "jobs: Full in A",  # the free space of the volume does not shrink
    "jobs: Attempts that failed A",  # the panel shows only intervals with a failure
    *(
        f"{name}: {annotation}"
        for name in DASHBOARDS
        for annotation in ("Jobs that ended", "Steps served")
    ),
}


@contextmanager
def _running(run: list[str], log: Path, directory: Path) -> Iterator[None]:
    with (
        log.open("wb") as out,
        subprocess.Popen(run, cwd=directory, stdout=out, stderr=out) as process,
    ):
        try:
            yield
        finally:
            process.terminate()


class Prometheus:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/{path}", params=parameters, timeout=30)
        # Prometheus answers 503 while it starts, and 400 to PromQL that it refuses.
        return answer.raise_for_status().json()["data"]

    def query(self, expr: str) -> list:
        return self.get("query", query=expr)["result"]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory) -> Iterator[Prometheus]:
    directory = tmp_path_factory.mktemp("prometheus")
    [port] = free_ports(1)
    run = command(
        "prometheus",
        f"--web.listen-address=127.0.0.1:{port}",
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        cwd=directory,
    )
    demo = [
        sys.executable,
        "-m",
        "images.grafana.demo",
        str(directory),
        "--interval",
        "1s",
        "--gpus",
        str(GPUS),
    ]
    with ExitStack() as running:
        running.enter_context(_running(demo, directory / "demo.log", ROOT))
        until("the demo serves", lambda: "&& prometheus" in (directory / "demo.log").read_text())
        running.enter_context(_running(run, directory / "prometheus.log", directory))
        started = Prometheus(port)
        # The targets are three exporters and two vLLM servers.
        until("it has scraped all targets", lambda: len(started.query("up == 1")) == 5)
        yield started


def test_every_query_of_every_dashboard_shows_something(prometheus):
    missing = [(where, resolved(expr, window="30s")) for where, expr in queries()]

    def all_shown() -> bool:
        missing[:] = [
            (where, expr)
            for where, expr in missing
            if not prometheus.query(expr) and where not in EMPTY
        ]
        return not missing

    until(missing, all_shown, 180)  # the demo's jobs are slow on a busy machine


def test_panels_tell_eight_gpus_apart(prometheus):
    """If a panel does not add up GPUs or ranks, each GPU or rank has a curve and a name of its
    own."""
    by_gpu = {
        name
        for metric in CATALOGUE
        if metric.labels.keys() & {"uuid", "rank"}
        for name in exported(metric)
    }
    names: dict[str, list[str]] = {}
    few: dict[str, int] = {}

    def all_shown() -> bool:
        names.clear()
        few.clear()
        asked = 0
        for dashboard, panel in panels():
            where, repeated = f"{dashboard}: {panel['title']}", panel.get("repeat") == "uuid"
            for target in panel["targets"]:
                expr = (
                    target["expr"].replace("$uuid", ".*0000003.*") if repeated else target["expr"]
                )
                found = [
                    series["metric"] for series in prometheus.query(resolved(expr, window="30s"))
                ]
                if panel["type"] == "timeseries":
                    names.setdefault(where, []).extend(
                        _legend(target["legendFormat"], labels) for labels in found
                    )
                one_each = not repeated and not re.search(r"\b(sum|max)\b", expr)
                if (
                    metrics(expr) & by_gpu
                    and one_each
                    and where + f" {target['refId']}" not in EMPTY
                ):
                    asked += 1
                    if len(found) < GPUS:
                        few[where] = len(found)
        assert asked >= 20
        return not few

    until(few, all_shown, 180)  # between two jobs there are no ranks
    assert not {where: found for where, found in names.items() if len(set(found)) < len(found)}


def _legend(template: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda name: labels.get(name[1], ""), template)


def test_every_rule_is_evaluated_and_nothing_fires(prometheus):
    def loaded() -> dict[str, dict]:
        return {
            rule["name"]: rule
            for group in prometheus.get("rules")["groups"]
            for rule in group["rules"]
        }

    own = [rule for rule in rules() if "kube_" not in rule["expr"]]
    assert set(loaded()) == {rule.get("alert") or rule["record"] for rule in own}
    until(
        "every rule is evaluated", lambda: all(rule["health"] == "ok" for rule in loaded().values())
    )
    assert not [name for name, rule in loaded().items() if rule.get("state") == "firing"]


def test_what_is_dropped_is_dropped(prometheus):
    for pattern in ("vllm:lora_requests_info", ".*_created", "python_gc_.*"):
        assert prometheus.query(f'{{__name__=~"{pattern}",job="tandem-vllm"}}') == []
