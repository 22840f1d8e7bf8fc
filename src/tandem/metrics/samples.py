"""Samples between those who collect them and the scrape: what is measured now, and what only grows.

Every name and label is checked against the catalogue as it is written.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from tandem.metrics.catalogue import BY_NAME, Metric

LabelValues = tuple[str, ...]
"""In the order of the catalogue's labels."""


@dataclass(frozen=True)
class Distribution:
    """One series of a histogram: observations per bucket (the last one is above all bounds), and their sum."""

    counts: tuple[int, ...]
    total: float


Value = float | Distribution
Series = Mapping[str, Mapping[LabelValues, Value]]
"""Metric name -> label values -> value."""


def label_values(metric: Metric, labels: Mapping[str, str]) -> LabelValues:
    """`labels` in the catalogue's order; KeyError if they are not the metric's."""
    if labels.keys() != metric.labels.keys():
        raise KeyError(f"{metric.name} has the labels {', '.join(metric.labels)}, not {', '.join(labels)}")
    return tuple(labels[name] for name in metric.labels)


class Gauges:
    """What one collection found. Made anew each time, so that what is gone is not told any more."""

    def __init__(self) -> None:
        self.series: dict[str, dict[LabelValues, Value]] = {}

    def set(self, name: str, value: float, /, **labels: str) -> None:
        metric = BY_NAME[name]
        if metric.kind != "gauge":
            raise KeyError(f"{name} is a {metric.kind}")
        self.series.setdefault(name, {})[label_values(metric, labels)] = float(value)


class Counts:
    """Counters and histograms. Where all label values are known beforehand the series exist from the start, at 0:
    PromQL's increase() does not see a series' first event."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._lock = threading.Lock()
        self._series: dict[str, dict[LabelValues, Value]] = {}
        for metric in metrics:
            if metric.kind == "gauge":
                continue
            self._series[metric.name] = {}
            for values in itertools.product(*metric.labels.values()):
                self._series[metric.name][values] = _zero(metric)

    def inc(self, name: str, by: float = 1.0, /, **labels: str) -> None:
        """Adds `by` >= 0; 0 makes the series exist."""
        values = label_values(BY_NAME[name], labels)
        with self._lock:
            before = self._series[name].get(values, 0.0)
            assert isinstance(before, float)
            self._series[name][values] = before + by

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """For what is counted elsewhere and read as a total."""
        values = label_values(BY_NAME[name], labels)
        with self._lock:
            self._series[name][values] = float(value)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        metric = BY_NAME[name]
        values = label_values(metric, labels)
        with self._lock:
            before = self._series[name].get(values) or _zero(metric)
            assert isinstance(before, Distribution)
            bucket = bisect.bisect_left(metric.buckets, value)
            counts = tuple(count + (i == bucket) for i, count in enumerate(before.counts))
            self._series[name][values] = Distribution(counts, before.total + value)

    def series(self) -> Series:
        """A copy of everything."""
        with self._lock:
            return {name: dict(values) for name, values in self._series.items()}


def _zero(metric: Metric) -> Value:
    return Distribution((0,) * (len(metric.buckets) + 1), 0.0) if metric.kind == "histogram" else 0.0


def families(series: Series, metrics: Iterable[Metric]) -> Iterator[Family]:
    """The series as prometheus_client encodes them, in the catalogue's order; metrics without a series are left out."""
    for metric in metrics:
        if found := series.get(metric.name):
            yield _family(metric, found)


def _family(metric: Metric, found: Mapping[LabelValues, Value]) -> Family:
    names = tuple(metric.labels)
    # prometheus_client appends a unit that the name does not end with.
    unit = metric.unit if metric.name.removesuffix("_total").endswith(f"_{metric.unit}") else ""
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=names, unit=unit)
        bounds = [*(str(float(bound)) for bound in metric.buckets), "+Inf"]
        for values, value in found.items():
            assert isinstance(value, Distribution)
            cumulative = itertools.accumulate(value.counts)
            histogram.add_metric(values, list(zip(bounds, map(float, cumulative), strict=True)), value.total)
        return histogram
    cls = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = cls(metric.name, metric.help, labels=names, unit=unit)
    for values, value in found.items():
        assert isinstance(value, float)
        family.add_metric(values, value)
    return family
