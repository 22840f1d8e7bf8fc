"""Every metric that Tandem exports. The file docs/metrics.md is made from this list."""

from prometheus_client import ProcessCollector

from tandem.metrics.collector import COLLECTOR_METRICS
from tandem.metrics.container import BuildCollector, SupervisorCollector, VolumesCollector
from tandem.metrics.controller import HTTP_METRICS, QueueCollector
from tandem.metrics.gpus import NvmlCollector
from tandem.metrics.jobs import JobsCollector
from tandem.metrics.metric import ALL, Kind, Metric
from tandem.metrics.policy import CheckpointsCollector, PolicyCollector
from tandem.metrics.publish import MergedCollector, PublishCollector, ReplicasCollector
from tandem.metrics.ranks import RanksCollector

# Maps prometheus_client's metric types to Tandem's kinds. The metrics about the exporter's and the
# controller's own processes need these kinds.
_KINDS: dict[str, Kind] = {"gauge": "gauge", "counter": "counter"}
PROCESS_METRICS = tuple(
    Metric(
        family.samples[0].name,
        f"{family.documentation} The measured process is the exporter or the controller.",
        "prometheus_client",
        _KINDS[family.type],
        ALL,
    )
    for family in ProcessCollector(registry=None).collect()
)

CATALOGUE: tuple[Metric, ...] = (
    *BuildCollector.metrics,
    *COLLECTOR_METRICS,
    *PROCESS_METRICS,
    *NvmlCollector.metrics,
    *RanksCollector.metrics,
    *JobsCollector.metrics,
    *CheckpointsCollector.metrics,
    *PolicyCollector.metrics,
    *PublishCollector.metrics,
    *MergedCollector.metrics,
    *ReplicasCollector.metrics,
    *SupervisorCollector.metrics,
    *VolumesCollector.metrics,
    *QueueCollector.metrics,
    *HTTP_METRICS,
)
