"""Collectors: each runs in a thread of its own and leaves what it found; a scrape only reads that.

A collector that fails or hangs (a network volume, a driver) shows in `tandem_collector_success`, and holds up nobody.
"""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector as PrometheusCollector
from pydantic import ValidationError

from tandem.errors import TandemError
from tandem.metrics.catalogue import BY_NAME, CATALOGUE, STALE_SECONDS, CollectorName, Metric
from tandem.metrics.samples import Counts, Gauges, LabelValues, Series, Value, families
from tandem.system.logs import Log

log = Log("exporter")


class PartlyFailed(Exception):
    """Something could not be collected; the gauges that were set are good."""

    def __init__(self, *troubles: str) -> None:
        super().__init__("; ".join(troubles))


class Collector(abc.ABC):
    """Collects the metrics that the catalogue gives to `name`, every `interval` seconds."""

    name: ClassVar[CollectorName]
    interval: ClassVar[float] = 5.0

    def __init__(self) -> None:
        self.counts = Counts(metric for metric in CATALOGUE if metric.collector == self.name)

    @abc.abstractmethod
    def collect(self, gauges: Gauges) -> None:
        """Sets gauges, and counts in `self.counts`. Any exception is a failure: then the gauges found before stay,
        the perishable ones for STALE_SECONDS; with PartlyFailed those found now count."""


def each[T](items: Iterable[T], action: Callable[[T], None]) -> list[str]:
    """`action` for every item, whatever happens to the others; what went wrong with some."""
    troubles = []
    for item in items:
        try:
            action(item)
        except (TandemError, ValidationError, OSError) as error:
            troubles.append(f"{item}: {error}")
    return troubles


class Loop:
    """One collector's thread and what it found last."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self._stop = threading.Event()
        self._gauges: Series = {}
        self._counts: Series = collector.counts.series()
        self._gauges_at = 0.0  # monotonic, as is _began
        self._began: float | None = None  # while a collection is under way
        self._ok = False
        self._seconds: float | None = None
        self._last_success = 0.0
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name=f"collect-{collector.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Doesn't wait: the collection under way may hang."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.once()
            self._stop.wait(self.collector.interval)

    def once(self) -> None:
        """One collection. Never raises."""
        self._began = begin = time.monotonic()
        gauges, trouble = Gauges(), ""
        try:
            self.collector.collect(gauges)
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}" if not isinstance(error, PartlyFailed) else str(error)
            keep = not isinstance(error, PartlyFailed)
        else:
            keep = False
            self._last_success = time.time()
        if not keep:
            self._gauges, self._gauges_at = gauges.series, time.monotonic()
        self._counts = self.collector.counts.series()
        self._ok = not trouble
        self._seconds, self._began = time.monotonic() - begin, None
        self._say(trouble)

    def _say(self, trouble: str) -> None:
        """A trouble is logged once, and its end."""
        if trouble and not self._trouble:
            log.warning("can't collect", collector=self.collector.name, error=trouble)
        elif self._trouble and not trouble:
            log.info("collects again", collector=self.collector.name)
        self._trouble = trouble

    # ---------------------------------------------------------------- read by the scrape

    def series(self) -> Iterator[tuple[str, dict[LabelValues, Value]]]:
        """What was found, without measurements that are too old to be told."""
        fresh = time.monotonic() - self._gauges_at <= STALE_SECONDS
        for name, values in self._gauges.items():
            if fresh or not BY_NAME[name].perishable:
                yield name, dict(values)
        for name, values in self._counts.items():
            yield name, dict(values)

    def health(self, gauges: Gauges) -> None:
        """What is told about the collector itself."""
        began = self._began  # read once: the thread may finish meanwhile
        hangs = began is not None and time.monotonic() - began > STALE_SECONDS
        name = self.collector.name
        gauges.set("tandem_collector_success", float(self._ok and not hangs), collector=name)
        gauges.set("tandem_collector_last_success_timestamp_seconds", self._last_success, collector=name)
        if self._seconds is not None:
            gauges.set("tandem_collector_duration_seconds", self._seconds, collector=name)


class Scrape(PrometheusCollector):
    """Everything that a scrape of this process tells."""

    def __init__(self, loops: Sequence[Loop], counts: Iterable[Counts] = ()) -> None:
        """`counts`: counted without a collector."""
        self._loops = loops
        self._counts = tuple(counts)
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Family]:
        health = Gauges()
        series: dict[str, dict[LabelValues, Value]] = {}
        for loop in self._loops:
            loop.health(health)
            series |= dict(loop.series())
        for counts in self._counts:
            series |= {name: dict(values) for name, values in counts.series().items()}
        yield from families(series | health.series, _without_process())
        yield from self._process.collect()


def _without_process() -> list[Metric]:
    return [metric for metric in CATALOGUE if metric.collector != "process"]
