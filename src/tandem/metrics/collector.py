"""Each collector runs in its own thread and keeps its last results. A scrape only reads the
collectors' last results.

`tandem_collector_success` shows whether a collector fails or hangs (on a network volume or in a
driver). A collector that hangs delays neither the scrape nor the other collectors. For users,
docs/metrics.md describes the collectors' metrics.
"""

import abc
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector as PrometheusCollector

from tandem.errors import TandemError
from tandem.metrics.metric import ALL, STALE_SECONDS, Metric, Samples
from tandem.spool import Spool
from tandem.system.logs import Log

COLLECTORS = (
    "build",
    "nvml",
    "ranks",
    "jobs",
    "policy",
    "publish",
    "merged",
    "replicas",
    "checkpoints",
    "supervisor",
    "volumes",
    "queue",
)
OpenSpool = Callable[[], Spool]
"""A function that opens the spool. It returns the same object each time, because a spool caches the
listings of directories that have not changed."""

_about_collector = partial(
    Metric, source="exporter", exporters=ALL, labels={"collector": COLLECTORS}
)
COLLECTOR_METRICS = (
    _about_collector(
        "tandem_collector_success",
        "1 if the collector's last collection succeeded; 0 if the last collection failed, or if a "
        "collection has run for more than a minute.",
    ),
    _about_collector(
        "tandem_collector_duration_seconds",
        "Duration of the collector's last finished collection in seconds.",
    ),
    _about_collector(
        "tandem_collector_last_success_timestamp_seconds",
        "Unix time of the collector's last successful collection; 0 if no collection has "
        "succeeded.",
    ),
)

log = Log("exporter")


class Collector(abc.ABC):
    """Collects `metrics` every `interval` seconds in its own thread, and keeps the last gauges."""

    name: ClassVar[str]  # one of COLLECTORS
    metrics: ClassVar[Sequence[Metric]]
    interval: ClassVar[float] = 5.0

    def __init__(self) -> None:
        self.counts = Samples(metric for metric in self.metrics if metric.kind != "gauge")
        self.errors: list[str] = []  # errors of the parts that this collection could not collect
        self._gauges = Samples(())
        self._gauges_at = 0.0  # monotonic time of the last gauges
        self._began: float | None = None  # monotonic start of a running collection; None: none runs
        self._failure: str | None = None  # error of the last collection; "" if it succeeded
        self._seconds: float | None = None
        self._last_success = 0.0  # Unix seconds

    @abc.abstractmethod
    def collect(self, gauges: Samples) -> None:
        """Sets `gauges`, which has no values yet, and adds to `self.counts`.

        A collection has failed if this method raises an exception or adds entries to `self.errors`.
        After an exception, the gauges of the previous collection are kept; perishable gauges are
        kept only for STALE_SECONDS.
        """

    def try_each[T](self, items: Iterable[T], action: Callable[[T], None]) -> None:
        """Calls `action` for every item. Records exceptions of `action`, so that a bad file does
        not prevent the collection of other files."""
        for item in items:
            with self.part(item):
                action(item)

    @contextmanager
    def part(self, what: object) -> Iterator[None]:
        """Records an exception of the `with` block as an error of this collection, so that the
        collection's other parts continue."""
        try:
            yield
        except Exception as error:
            self.errors.append(
                f"{what}: {error if isinstance(error, TandemError) else repr(error)}"
            )

    def start(self, stop: threading.Event) -> None:
        """Collects in a thread until `stop` is set. The thread is never joined, because a
        collection may hang."""

        def run() -> None:
            while not stop.is_set():
                self.collect_once()
                stop.wait(self.interval)

        threading.Thread(target=run, name=f"collect-{self.name}", daemon=True).start()

    def collect_once(self) -> None:
        """Makes one collection, and never raises an error."""
        self._began = begin = time.monotonic()
        gauges = Samples(metric for metric in self.metrics if metric.kind == "gauge")
        self.errors = []
        try:
            self.collect(gauges)
            self._gauges, self._gauges_at = gauges, time.monotonic()
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")
        failure = "; ".join(self.errors)
        if not failure:
            self._last_success = time.time()
        self._seconds, self._began = time.monotonic() - begin, None
        # One line is logged when the collector begins to fail, and one when it works again.
        if failure and not self._failure:
            log.warning("can't collect", collector=self.name, error=failure)
        elif self._failure and not failure:
            log.info("collects again", collector=self.name)
        self._failure = failure

    def families(self) -> Iterator[Family]:
        """The collected metrics, without perishable metrics that are too old."""
        yield from self._gauges.families(
            perishable=time.monotonic() - self._gauges_at <= STALE_SECONDS
        )
        yield from self.counts.families()

    def describe(self, gauges: Samples) -> None:
        """Sets the metrics COLLECTOR_METRICS for this collector."""
        # `_began` is read once, because another thread may end the collection and clear `_began`.
        began = self._began
        hangs = began is not None and time.monotonic() - began > STALE_SECONDS
        gauges.set(
            "tandem_collector_success",
            float(self._failure == "" and not hangs),
            collector=self.name,
        )
        gauges.set(
            "tandem_collector_last_success_timestamp_seconds",
            self._last_success,
            collector=self.name,
        )
        if self._seconds is not None:
            gauges.set("tandem_collector_duration_seconds", self._seconds, collector=self.name)


class SpoolCollector(Collector):
    """The base class of collectors that read the spool. The spool may be missing for a while."""

    def __init__(self, open_spool: OpenSpool) -> None:
        super().__init__()
        self._open_spool = open_spool

    def spool(self) -> Spool:
        """The spool. Raises SpoolUnusable while the volume is missing."""
        spool = self._open_spool()
        spool.check()
        return spool


class Page(PrometheusCollector):
    """All metrics of this process, in the form that prometheus_client asks for at each scrape.

    `counts`: counters and histograms that belong to no collector.
    """

    def __init__(self, collectors: Sequence[Collector], counts: Samples | None = None) -> None:
        self._collectors = collectors
        self._counts = counts
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Family]:
        about = Samples(COLLECTOR_METRICS)
        for collector in self._collectors:
            collector.describe(about)
            yield from collector.families()
        yield from about.families()
        if self._counts is not None:
            yield from self._counts.families()
        yield from self._process.collect()
