"""Every metric that Tandem exports. docs/metrics.md is made from this list."""

from __future__ import annotations

from prometheus_client import ProcessCollector

from tandem.metrics import checkpoints, gpus, jobs, policy, publish, ranks, supervisor, volumes
from tandem.metrics.build import BuildCollector
from tandem.metrics.collector import COLLECTOR_METRICS
from tandem.metrics.controller import HTTP_METRICS, QueueCollector
from tandem.metrics.metric import ALL, Kind, Metric

# prometheus_client makes these, of the exporter's or the controller's own process.
_KINDS: dict[str, Kind] = {"gauge": "gauge", "counter": "counter"}
PROCESS_METRICS = tuple(
    Metric(family.samples[0].name, f"{family.documentation} Of the exporter, or the controller, itself.",
           "prometheus_client", _KINDS[family.type], ALL)
    for family in ProcessCollector(registry=None).collect()
)  # fmt: skip

CATALOGUE: tuple[Metric, ...] = (
    *BuildCollector.metrics,
    *COLLECTOR_METRICS,
    *PROCESS_METRICS,
    *gpus.METRICS,
    *ranks.METRICS,
    *jobs.METRICS,
    *checkpoints.METRICS,
    *policy.METRICS,
    *publish.METRICS,
    *supervisor.METRICS,
    *volumes.METRICS,
    *QueueCollector.metrics,
    *HTTP_METRICS,
)
