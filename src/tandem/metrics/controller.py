"""The controller's own metrics: the queue, and its HTTP requests."""

from functools import partial

from tandem.metrics.collector import SpoolCollector
from tandem.metrics.metric import JOB_KINDS, OPEN, Metric, Samples
from tandem.spool.schema import PENDING

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "other")

_of_controller = partial(Metric, exporters=("controller",))
HTTP_METRICS = (
    _of_controller(
        "tandem_jobs_submitted_total",
        "Jobs that were queued; the same id twice is one job.",
        "controller",
        "counter",
        labels={"kind": JOB_KINDS},
    ),
    _of_controller(
        "tandem_http_requests_total",
        'Answered requests. Route is the template, or "other".',
        "controller",
        "counter",
        labels={
            "route": OPEN,
            "method": METHODS,
            "status_class": ("1xx", "2xx", "3xx", "4xx", "5xx"),
        },
    ),
    _of_controller(
        "tandem_http_request_duration_seconds",
        "From the request's first byte to the answer's last; event streams are not counted.",
        "controller",
        "histogram",
        labels={"route": OPEN},
        buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    ),
)


class QueueCollector(SpoolCollector):
    name = "queue"
    metrics = (
        _of_controller(
            "tandem_jobs",
            "Jobs that are not done.",
            "jobs/live, jobs/active",
            perishable=True,
            labels={"state": ("queued", "running")},
        ),
        _of_controller("tandem_runs", "Runs on the volume.", "runs/", perishable=True),
        _of_controller(
            "tandem_spool_damaged",
            "What is damaged and left out: jobs that were set aside, names "
            "among the jobs' directories that are no job's, runs. `tandem doctor` names each.",
            "jobs/, runs/",
            perishable=True,
            labels={"kind": ("job", "name", "run")},
        ),
    )

    def collect(self, gauges: Samples) -> None:
        spool = self.spool()
        for state in PENDING:
            gauges.set("tandem_jobs", spool.jobs.index.count(state), state=state)
        for kind, found in spool.damage().items():
            gauges.set("tandem_spool_damaged", len(found), kind=kind)
        gauges.set("tandem_runs", len(spool.runs.names()))
