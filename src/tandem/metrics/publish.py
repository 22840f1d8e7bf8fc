"""Collects the publisher's work since the exporter's start, the state of merged weights, and the
state of the inference servers."""

from contextlib import suppress
from typing import get_args

from tandem.config import Settings
from tandem.errors import NotFound
from tandem.metrics.collector import OpenSpool, SpoolCollector
from tandem.metrics.metric import OPEN, Metric, Samples, number
from tandem.spool import Spool
from tandem.spool.schema import Served
from tandem.supervise.supervisord import inference_ports
from tandem.system.ports import local_url
from tandem.vllm_client.client import InferenceUnavailable, VllmClient
from tandem.vllm_client.names import MergedPhase

PHASES: tuple[str, ...] = get_args(MergedPhase)
STAGES = ("copy", "load", "verify", "since_checkpoint")


class PublishCollector(SpoolCollector):
    name = "publish"
    metrics = (
        Metric(
            "tandem_publish_total",
            "Steps that were verified and served (outcome served), and steps that were refused "
            "(outcome refused).",
            "served.json",
            "counter",
            ("inference",),
            {"outcome": ("served", "refused")},
        ),
        Metric(
            "tandem_publish_duration_seconds",
            "Seconds of each stage of serving a step; since_checkpoint is the time from the "
            "checkpoint's commit until the step is served.",
            "served.json, event served",
            "histogram",
            ("inference",),
            {"stage": STAGES},
            (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300),
        ),
        Metric(
            "tandem_publish_logprob_error_nats",
            "Mean absolute difference between the trainer's and vLLM's log-probs in nats, in the "
            "last verification after which a step was served.",
            "served.json",
            exporters=("inference",),
        ),
        Metric(
            "tandem_publish_logprob_error_allowed_nats",
            "Limit in nats on the mean log-prob difference of the 90 % of tokens with the "
            "smallest differences, in the last verification after which a step was served.",
            "served.json",
            exporters=("inference",),
        ),
    )
    interval = 2.0

    def __init__(self, open_spool: OpenSpool) -> None:
        super().__init__(open_spool)
        # For each run, the modification time and the content of served.json.
        self._records: dict[str, tuple[float, Served | None]] = {}
        # The last verification: its time in Unix seconds, its error and the allowed error in nats.
        self._error: tuple[float, float, float] | None = None
        self._caught_up = False

    def collect(self, gauges: Samples) -> None:
        spool = self.spool()
        self.try_each(spool.runs.names(), lambda run: self._read_run(spool, run))
        self._caught_up = True
        if self._error is not None:
            gauges.set("tandem_publish_logprob_error_nats", self._error[1])
            gauges.set("tandem_publish_logprob_error_allowed_nats", self._error[2])

    def _read_run(self, spool: Spool, run: str) -> None:
        written = spool.served.changed(run)
        last_written, before = self._records.get(run, (0.0, None))
        if written is None or written == last_written:
            return
        record = spool.served.get(run)
        if record is None:
            return
        self._records[run] = written, record
        errors = record.mean_abs_logprob_error, record.allowed_logprob_error
        self._error = max(self._error or (0.0, 0.0, 0.0), (record.verified, *errors))
        if self._caught_up:
            self._count(spool, run, before, record)

    def _count(self, spool: Spool, run: str, before: Served | None, record: Served) -> None:
        if record.refused_step is not None and (
            before is None or before.refused_step != record.refused_step
        ):
            self.counts.inc("tandem_publish_total", outcome="refused")
        if before is not None and before.step == record.step:
            return
        # Several steps may have been served since the last collection. After a rollback, an older
        # step may be served.
        first = record.step if before is None or before.step > record.step else before.step + 1
        for step in [step for step in spool.checkpoints.steps(run) if first <= step < record.step]:
            with suppress(NotFound):  # the step's record was removed meanwhile
                job = spool.checkpoints.manifest(run, step).job
                events = [] if job is None else spool.events.read(job)
                if event := next((event for event in events if event.type == "served"), None):
                    self._count_served(event.data.get("seconds"))
        if record.step in spool.checkpoints.steps(run):
            self._count_served(record.seconds)

    def _count_served(self, seconds: object) -> None:
        self.counts.inc("tandem_publish_total", outcome="served")
        for stage in STAGES:
            if (value := number(seconds, stage)) is not None:
                self.counts.observe("tandem_publish_duration_seconds", value, stage=stage)


class MergedCollector(SpoolCollector):
    """Collects whether vLLM has complete and verified merged weights, and how many runs on the
    volume have merged weights. The collector asks vLLM's server instead of the publisher. The
    server answers even while the publisher waits for a swap or does not run.
    """

    name = "merged"
    metrics = (
        Metric(
            "tandem_merged_phase",
            "1 for the current phase of vLLM's merged weights, 0 for the other phases. vLLM "
            "answers requests in phase served, holds requests up to a minute in phases swapping "
            "and unverified, and answers 503 in phases empty (no step was served yet) and torn (a "
            "swap failed). The label replica is empty if there is one inference server. Absent "
            "while vLLM does not answer, and with TANDEM_WEIGHTS=adapter.",
            "GET /tandem/merged",
            exporters=("inference",),
            labels={"replica": OPEN, "phase": PHASES},
            perishable=True,
        ),
        Metric(
            "tandem_merged_runs",
            "Number of runs on the volume that are served by merging their weights into vLLM's; "
            "vLLM can serve only one such run. Absent with TANDEM_WEIGHTS=adapter.",
            "run.json",
            exporters=("inference",),
        ),
    )

    def __init__(self, open_spool: OpenSpool, settings: Settings) -> None:
        super().__init__(open_spool)
        ports = inference_ports(settings)
        self._servers = {
            name: settings
            if len(ports) == 1
            else settings.model_copy(
                update={"inference_url": local_url(settings.inference_host, port)}
            )
            for name, port in ports.items()
        }
        self._clients: dict[str, VllmClient] = {}

    def collect(self, gauges: Samples) -> None:
        for replica, settings in self._servers.items():
            if replica not in self._clients:
                self._clients[replica] = VllmClient(settings, timeout=5.0)
            # While vLLM starts or does not run, `tandem_merged_phase` is absent, and Prometheus'
            # metric `up` shows that vLLM does not answer.
            with suppress(InferenceUnavailable):
                current = self._clients[replica].merged()["phase"]
                for phase in PHASES:
                    gauges.set(
                        "tandem_merged_phase", phase == current, replica=replica, phase=phase
                    )
        with self.part("runs"):  # a missing volume does not hide vLLM's phase
            gauges.set(
                "tandem_merged_runs",
                sum(run.weights == "merged" for run in self.spool().runs.list()),
            )


class ReplicasCollector(SpoolCollector):
    """Collects which inference servers are ready, and how many steps each is behind."""

    name = "replicas"
    metrics = (
        Metric(
            "tandem_replica_ready",
            "1 if the inference server serves every announced step and answers requests, else 0. "
            "Absent for a server that has ended, and in a deployment with a single server.",
            "replicas/*.json",
            exporters=("inference",),
            labels={"replica": OPEN},
            perishable=True,
        ),
        Metric(
            "tandem_replica_steps_behind",
            "Largest number of steps, over all runs, by which the step that this inference server "
            "serves is behind the run's newest checkpoint.",
            "served/*.json",
            exporters=("inference",),
            labels={"replica": OPEN},
            perishable=True,
        ),
        Metric(
            "tandem_replica_publish_seconds",
            "Seconds between the commit and the verification of the checkpoint that this "
            "inference server verified last.",
            "served/*.json",
            exporters=("inference",),
            labels={"replica": OPEN},
            perishable=True,
        ),
        Metric(
            "tandem_replicas_wanted",
            "Number of inference servers that this deployment should have "
            "(TANDEM_INFERENCE_REPLICAS).",
            "settings",
            exporters=("inference",),
        ),
    )
    interval = 5.0

    def __init__(self, open_spool: OpenSpool, settings: Settings) -> None:
        super().__init__(open_spool)
        self._settings = settings

    def collect(self, gauges: Samples) -> None:
        gauges.set("tandem_replicas_wanted", self._settings.inference_replicas)
        spool = self.spool()
        runs = [run.name for run in spool.runs.list() if run.weights == self._settings.weights]
        for replica, record in spool.replicas.fresh().items():
            gauges.set("tandem_replica_ready", record.ready, replica=replica)
            behind = [0]
            newest: Served | None = None
            for run in runs:
                with suppress(NotFound):
                    steps = spool.replicas.serves(run, replica).steps
                    first = steps[0].step if steps else -1
                    behind.append(spool.checkpoints.newest(run) - first)
                    newest = max(
                        [one for one in (*steps[:1], newest) if one],
                        key=lambda one: one.verified,
                        default=None,
                    )
            gauges.set("tandem_replica_steps_behind", max(behind), replica=replica)
            if (
                newest is not None
                and (seconds := number(newest.seconds, "since_checkpoint")) is not None
            ):
                gauges.set("tandem_replica_publish_seconds", seconds, replica=replica)
