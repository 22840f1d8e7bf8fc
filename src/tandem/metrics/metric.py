"""What a metric is. The file of each collector lists the metrics that it collects; `catalogue.py` joins these lists.

No metric has the labels that say where a series comes from (job, instance, namespace, pod, role): the scrape adds them.
Devices are named by UUID, because an index restarts at 0 in each container; "cpu" is the machine without a GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from tandem.spool.schema import JobKind

Kind = Literal["gauge", "counter", "histogram"]
Exporter = Literal["trainer", "inference", "controller"]
BOTH: tuple[Exporter, ...] = ("trainer", "inference")
ALL: tuple[Exporter, ...] = ("trainer", "inference", "controller")

OPEN: tuple[str, ...] = ()
"""The values of a label whose values are not known beforehand."""
JOB_KINDS: tuple[str, ...] = get_args(JobKind)
PHASES = (
    "rendezvous", "data", "build", "rehearsal", "base_weights", "state", "probe",
    "old_logprobs", "reference", "forward_backward", "optimizer", "evaluate",
    "checkpoint", "offload",
)  # fmt: skip
"""What a rank does, in this order. "old_logprobs" to "optimizer" repeat for each optimizer step. Only resident ranks
offload, and only ranks on a GPU rehearse a new model's first pass."""

STALE_SECONDS = 60.0
"""A rank without a new heartbeat for this long is not up. Perishable metrics of a collector that has failed for this
long are no longer exported."""


@dataclass(frozen=True)
class Metric:
    """One metric. `name` is PromQL's: counters end in `_total`; histograms add `_bucket`, `_sum` and `_count`."""

    name: str
    help: str
    source: str
    """Where the value comes from, for docs/metrics.md."""
    kind: Kind = "gauge"
    exporters: tuple[Exporter, ...] = ("trainer",)
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Label -> its values, or OPEN. Counters and histograms without open labels exist from the start, at 0."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without +Inf."""
    perishable: bool = False
    """A measurement, which says nothing about now once it is STALE_SECONDS old."""
