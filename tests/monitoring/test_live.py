"""A real Prometheus scrapes the demo backend with our configuration: every query of every dashboard shows something."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from monitoring.dashboards import queries, resolved, rules
from monitoring.promtool import IMAGE, PROMETHEUS

pytestmark = pytest.mark.slow

SCRAPED_SECONDS = 20
# Queries that rightly show nothing on a healthy stack that has run for seconds.
EMPTY = {
    "overview: Firing alerts A": "nothing fires",
    "inference: Steps served": "an annotation, only when a step is served",
    "jobs: Full in A": "the volume does not shrink",
    "jobs: Attempts that failed A": "only intervals with a failure",
} | {f"{name}: {note}": "an annotation, only when it happens"
     for name in ("overview", "gpu-memory", "training", "inference", "jobs")
     for note in ("Jobs that ended", "Steps served")}  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _running(command: list[str], log: Path, **variables: str) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | variables)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _get(url: str, log: Path, **parameters: str) -> dict:
    end = time.monotonic() + 60
    while True:
        try:
            answer = httpx.get(url, params=parameters, timeout=10)
            if answer.status_code != 503:  # it is starting
                return answer.json() | {"http": answer.status_code}
        except httpx.TransportError:
            pass
        assert time.monotonic() < end, f"no answer from {url}:\n{log.read_text()[-3000:]}"
        time.sleep(0.2)


def _configuration(directory: Path, exporter: int) -> None:
    """prometheus.yml as it is shipped, but for where the targets are and how often they are asked."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    for job in config["scrape_configs"]:
        job.pop("scrape_interval", None)
        job["metrics_path"] = "/metrics/" + job["job_name"].removeprefix("tandem-")
        job["static_configs"][0]["targets"] = [f"127.0.0.1:{exporter}"]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copytree(PROMETHEUS / "rules", directory / "rules")


def _prometheus(directory: Path, port: int) -> list[str]:
    arguments = [f"--web.listen-address=127.0.0.1:{port}", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    if shutil.which("prometheus"):
        return ["sh", "-c", 'cd "$0" && exec prometheus "$@"', str(directory), *arguments]
    if shutil.which("docker"):
        found = subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True, timeout=60, check=False)
        if found.returncode == 0:
            return ["docker", "run", "--rm", "--network", "host", "--user", str(os.getuid()), "-v", f"{directory}:/w",
                    "-w", "/w", "--entrypoint", "prometheus", IMAGE, *arguments]  # fmt: skip
    message = f"neither prometheus on PATH nor an engine with the image {IMAGE}"
    if os.environ.get("TANDEM_REQUIRE_DOCKER") == "1":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory) -> Iterator[str]:
    """URL of a Prometheus that has scraped the demo for a while; its log is beside."""
    directory = tmp_path_factory.mktemp("prometheus")
    exporter, port = _free_port(), _free_port()
    _configuration(directory, exporter)
    command = _prometheus(directory, port)
    demo = {"TANDEM_METRICS_BACKEND": "demo", "TANDEM_METRICS_PORT": str(exporter), "TANDEM_ROOT": str(directory)}
    with (
        _running([sys.executable, "-m", "tandem.metrics.exporter"], directory / "exporter.log", **demo),
        _running(command, log := directory / "prometheus.log"),
    ):
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 60
        while len(_get(f"{url}/api/v1/query", log, query="up == 1")["data"]["result"]) < 4:
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.5)
        time.sleep(SCRAPED_SECONDS)
        yield url


def test_every_query_of_every_dashboard_shows_something(prometheus, tmp_path):
    wrong = []
    for where, expr in queries():
        answer = _get(f"{prometheus}/api/v1/query", tmp_path, query=resolved(expr, window="30s"))
        if answer["status"] != "success":
            wrong.append(f"{where}: {answer['error']}")
        elif not answer["data"]["result"] and where not in EMPTY:
            wrong.append(f"{where}: nothing: {expr}")
    assert not wrong, "\n".join(wrong)


def test_every_rule_is_evaluated_and_nothing_fires(prometheus, tmp_path):
    groups = _get(f"{prometheus}/api/v1/rules", tmp_path)["data"]["groups"]
    loaded = {rule["name"]: rule for group in groups for rule in group["rules"]}
    own = [rule for rule in rules() if "kube_" not in rule["expr"]]
    assert set(loaded) == {rule.get("alert") or rule["record"] for rule in own}
    assert not [f"{name}: {rule['lastError']}" for name, rule in loaded.items() if rule["health"] != "ok"]
    assert not [name for name, rule in loaded.items() if rule.get("state") == "firing"]


def test_what_is_dropped_is_dropped(prometheus, tmp_path):
    for pattern in ("vllm:lora_requests_info", ".*_created", "python_gc_.*"):
        answer = _get(f"{prometheus}/api/v1/query", tmp_path, query=f'{{__name__=~"{pattern}",job="tandem-vllm"}}')
        assert answer["data"]["result"] == []
