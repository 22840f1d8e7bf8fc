"""Tools for tests of collectors. The test starts each collection itself, and reads the metrics as
Prometheus parses them."""

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector as PrometheusCollector

from tandem.metrics.collector import Collector, Page
from tandem.spool import Spool


class Scraped:
    """One answer of /metrics."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families
            for sample in family.samples
        }
        self.names = {name for name, _ in self.samples}

    def get(self, name: str, /, **labels: str) -> float | None:
        return self.samples.get((name, frozenset(labels.items())))

    def check(self, labels: Mapping[str, str] | None = None, /, **values: Any) -> None:
        """Asserts the values of `tandem_<name>` with these labels. The value None stands for a
        sample that does not exist."""
        assert {name: self.get(f"tandem_{name}", **(labels or {})) for name in values} == values

    def all(self, name: str, /) -> list[dict[str, str]]:
        """The label sets of the samples with that name."""
        return [dict(labels) for known, labels in self.samples if known == name]

    def by(self, label: str, name: str, /) -> dict[str, float]:
        """Maps the values of the label `label` to the values of the samples with that name."""
        return {
            dict(labels)[label]: value
            for (known, labels), value in self.samples.items()
            if known == name
        }


def scrape(page: PrometheusCollector) -> Scraped:
    return Scraped(generate_latest(page).decode())


class Exported:
    """The page of an exporter with these collectors."""

    def __init__(self, *collectors: Collector) -> None:
        self.collectors = collectors
        self.page = Page(collectors)

    def collect(self) -> Scraped:
        """One collection of each collector, then a scrape."""
        for collector in self.collectors:
            collector.collect_once()
        return self.scrape()

    def scrape(self) -> Scraped:
        return scrape(self.page)

    def works(self, collector: str) -> bool:
        """Whether the next collection of that collector succeeds."""
        return self.collect().get("tandem_collector_success", collector=collector) == 1


def opener(spool: Spool) -> Callable[[], Spool]:
    return lambda: Spool(spool.root)
