"""Collectors behind the real HTTP server, scraped and parsed as Prometheus would."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector as PrometheusCollector

from tandem.metrics.collector import Collector, Loop, Scrape
from tandem.metrics.server import MetricsServer

# What Prometheus 3 says it understands.
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;"
    "q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


class Scraped:
    """One answer of /metrics."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families
            for sample in family.samples
        }

    def get(self, name: str, /, **labels: str) -> float | None:
        return self.samples.get((name, frozenset(labels.items())))

    def all(self, name: str, /) -> list[dict[str, str]]:
        """The label sets under which a sample of that name is told."""
        return [dict(labels) for known, labels in self.samples if known == name]


def fetch(url: str, accept: str = "") -> tuple[int, str, str]:
    """(status, content type, body)."""
    request = urllib.request.Request(url, headers={"Accept": accept} if accept else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


class Rig:
    """Collectors whose collections the test makes happen, and their exporter."""

    def __init__(self, *collectors: Collector) -> None:
        self.loops = [Loop(collector) for collector in collectors]
        self.server = MetricsServer("127.0.0.1", 0, {"/metrics": Scrape(self.loops)}, {"what": "a test"})
        self.url = f"http://127.0.0.1:{self.server.port}"

    def collect(self) -> Scraped:
        """One collection each, then a scrape."""
        for loop in self.loops:
            loop.once()
        return self.scrape()

    def scrape(self) -> Scraped:
        return Scraped(fetch(f"{self.url}/metrics")[2])


@contextmanager
def rig(*collectors: Collector) -> Iterator[Rig]:
    made = Rig(*collectors)
    made.server.serve_in_background()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()


@contextmanager
def serving(pages: dict[str, PrometheusCollector]) -> Iterator[str]:
    server = MetricsServer("127.0.0.1", 0, pages, {"what": "a test"})
    server.serve_in_background()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.shutdown()
        server.server_close()


def until[T](what: str, check: Callable[[], T], timeout: float = 10.0) -> T:
    """The first true answer of `check`."""
    end = time.monotonic() + timeout
    while not (answer := check()):
        assert time.monotonic() < end, f"not within {timeout} s: {what}"
        time.sleep(0.02)
    return answer
