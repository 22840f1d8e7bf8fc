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
        "Jobs that were queued; several submissions with the same id count as one job.",
        "controller",
        "counter",
        labels={"kind": JOB_KINDS},
    ),
    _of_controller(
        "tandem_http_requests_total",
        "Requests that the controller answered. The label route is the template of the path, or "
        '"other".',
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
        "Seconds from the arrival of a request at the controller to the end of the answer; event "
        "streams are not counted.",
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
            "Jobs that have not ended, by state.",
            "jobs/live, jobs/active",
            perishable=True,
            labels={"state": ("queued", "running")},
        ),
        _of_controller(
            "tandem_runs", "Number of runs on the shared volume.", "runs/", perishable=True
        ),
        _of_controller(
            "tandem_spool_damaged",
            "Number of damaged entries that lists leave out: jobs that were set aside, invalid "
            "names among the jobs' directories, and runs. `tandem doctor` names each entry.",
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
