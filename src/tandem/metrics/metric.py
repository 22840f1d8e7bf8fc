"""The type of a metric, and `Samples`, which stores values between their collection and a scrape.

Each collector's file lists the metrics that the collector collects; `catalogue.py` joins these
lists.

No metric has the labels for the origin of a series (job, instance, namespace, pod, role), because
Prometheus adds these labels at the scrape. Devices are named by UUID, because indices restart at 0
in each container. "cpu" stands for a machine without a GPU.
"""

import bisect
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from tandem.spool.schema import JobKind

Kind = Literal["gauge", "counter", "histogram"]
Exporter = Literal["trainer", "inference", "controller"]
BOTH: tuple[Exporter, ...] = ("trainer", "inference")
ALL: tuple[Exporter, ...] = ("trainer", "inference", "controller")

OPEN: tuple[str, ...] = ()
"""Stands for the values of a label if the values are not known in advance."""
JOB_KINDS: tuple[str, ...] = get_args(JobKind)
PHASES = (
    "rendezvous",
    "data",
    "build",
    "rehearsal",
    "base_weights",
    "state",
    "probe",
    "old_logprobs",
    "reference",
    "forward_backward",
    "optimizer",
    "evaluate",
    "checkpoint",
    "offload",
)
"""The phases of a rank, in this order. "old_logprobs" to "optimizer" repeat for each optimizer
step. `offload` occurs only in resident ranks; `rehearsal` only on a GPU with a model that is new to
the process."""

STALE_SECONDS = 60.0
"""A rank without a new heartbeat for this many seconds is not up. The perishable metrics of a
collector that has failed for this long are no longer exported."""


@dataclass(frozen=True)
class Metric:
    """A metric. `name` is the name in PromQL: counters end in `_total`; histograms add `_bucket`,
    `_sum` and `_count`."""

    name: str
    help: str
    source: str
    """The origin of the value, for docs/metrics.md."""
    kind: Kind = "gauge"
    exporters: tuple[Exporter, ...] = ("trainer",)
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Label -> its values, or OPEN. Counters and histograms without open labels exist from the
    start, at 0."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without +Inf."""
    perishable: bool = False
    """Whether the value is no longer exported once it is STALE_SECONDS old."""


_Series = dict[tuple[str, ...], tuple[float, ...]]
"""Label values, in the order of the metric's labels -> the value. A histogram's value is the number
of observations in each bucket (the last bucket is above all bounds), followed by the sum of the
observed values."""


class Samples:
    """The series of a set of metrics.

    A counter or histogram starts with all its series at 0 if the values of all its labels are known
    in advance. PromQL's increase() does not count the event with which a series begins. Every
    method raises KeyError for an unknown metric, and for labels that the metric does not have.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._lock = threading.Lock()
        self._metrics = {metric.name: metric for metric in metrics}
        self._series: dict[str, _Series] = {name: {} for name in self._metrics}
        for metric in self._metrics.values():
            if metric.kind != "gauge":
                for values in itertools.product(*metric.labels.values()):
                    self._series[metric.name][values] = _zero(metric)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Sets a gauge, or a counter whose total is known from elsewhere.

        Args:
            name: the metric's name in PromQL.
            labels: all labels of the metric.
        """
        key = self._key(name, labels)
        with self._lock:
            self._series[name][key] = (float(value),)

    def inc(self, name: str, by: float = 1.0, /, **labels: str) -> None:
        """Adds to a counter.

        Args:
            name, labels: the metric's name in PromQL, and all its labels.
            by: the increment, at least 0; 0 creates the series.
        """
        key = self._key(name, labels)
        with self._lock:
            (before,) = self._series[name].get(key, (0.0,))
            self._series[name][key] = (before + by,)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Adds an observed value to a histogram.

        Args:
            name, labels: the metric's name in PromQL, and all its labels.
            value: the observed value, in the unit with which the metric's name ends.
        """
        key, metric = self._key(name, labels), self._metrics[name]
        with self._lock:
            *counts, total = self._series[name].get(key, _zero(metric))
            counts[bisect.bisect_left(metric.buckets, value)] += 1
            self._series[name][key] = (*counts, total + value)

    def families(self, *, perishable: bool = True) -> Iterator[Family]:
        """The metrics that have at least one series, in prometheus_client's form.
        `perishable=False` leaves out perishable metrics."""
        for metric in self._metrics.values():
            with self._lock:
                series = dict(self._series[metric.name])
            if series and (perishable or not metric.perishable):
                yield _family(metric, series)

    def _key(self, name: str, labels: Mapping[str, str]) -> tuple[str, ...]:
        metric = self._metrics[name]
        if labels.keys() != metric.labels.keys():
            raise KeyError(
                f"{name} has the labels {', '.join(metric.labels)}, not {', '.join(labels)}"
            )
        return tuple(labels[label] for label in metric.labels)


def _zero(metric: Metric) -> tuple[float, ...]:
    return (0.0,) * (len(metric.buckets) + 2 if metric.kind == "histogram" else 1)


def _family(metric: Metric, series: _Series) -> Family:
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=tuple(metric.labels))
        bounds = [*(str(float(bound)) for bound in metric.buckets), "+Inf"]
        for key, (*counts, total) in series.items():
            histogram.add_metric(
                key, list(zip(bounds, itertools.accumulate(counts), strict=True)), total
            )
        return histogram
    cls = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = cls(metric.name, metric.help, labels=tuple(metric.labels))
    for key, (value,) in series.items():
        family.add_metric(key, value)
    return family


def number(values: Any, key: str) -> float | None:
    """`values[key]` if it is a number, else None. Events have null in place of numbers that are not
    finite."""
    value = values.get(key) if isinstance(values, dict) else None
    return float(value) if isinstance(value, int | float) else None
