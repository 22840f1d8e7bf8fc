"""Collects the newest step and the served step of each run, and the newest checkpoint of all
runs."""

from tandem.metrics.collector import OpenSpool, SpoolCollector
from tandem.metrics.metric import BOTH, OPEN, Exporter, Metric, Samples
from tandem.spool import Spool

PARTS = ("copy", "stage", "drain", "swap", "load", "verify", "since_checkpoint")
RUNS = 20
"""The maximum number of exported runs; the runs that changed last are exported. The number is
limited, because each run becomes a label value, and label values stay in Prometheus."""


class PolicyCollector(SpoolCollector):
    """`sides`: "trainer" exports the newest step, "inference" exports the served step."""

    name = "policy"
    metrics = (
        Metric(
            "tandem_policy_version",
            "Step of a run's newest checkpoint (side trainer), or the step that vLLM serves (side "
            "inference). Only the 20 runs that changed last have this metric.",
            "checkpoints, served.json",
            exporters=BOTH,
            labels={"side": BOTH, "run": OPEN},
        ),
        Metric(
            "tandem_policy_refused",
            "1 while a step newer than the served step is refused, else 0. Absent while no step of "
            "the run is served; only for the 20 runs that changed last.",
            "served.json",
            exporters=("inference",),
            labels={"run": OPEN},
        ),
        Metric(
            "tandem_policy_info",
            "1 for each served run of the 20 runs that changed last; the labels show how vLLM "
            "serves the run.",
            "served.json",
            exporters=("inference",),
            labels={"run": OPEN, "weights": ("adapter", "merged"), "transport": OPEN},
        ),
        Metric(
            "tandem_publish_seconds",
            "Seconds that each part of serving the run's step took, for the 20 runs that changed "
            "last. For merged weights, load includes stage (vLLM reads the adapter), drain (the "
            "swap waits for running requests, if it must) and swap (no request is computed). "
            "since_checkpoint is the time from the checkpoint's commit until the step is served, "
            "even if a new vLLM loads an old step.",
            "served.json",
            exporters=("inference",),
            labels={"run": OPEN, "part": PARTS},
        ),
        Metric(
            "tandem_run_bytes",
            "Bytes of the run's checkpoints on the volume, including discarded ones, and of its "
            "complete merged weights; only for the 20 runs that changed last.",
            "checkpoints/, discarded/, merged/",
            exporters=("trainer",),
            labels={"run": OPEN},
        ),
    )

    def __init__(self, open_spool: OpenSpool, sides: tuple[Exporter, ...]) -> None:
        super().__init__(open_spool)
        self._sides = sides

    def collect(self, gauges: Samples) -> None:
        spool = self.spool()
        changed: dict[str, float] = {}  # run -> time of its last change, Unix seconds

        def read_change(run: str) -> None:
            changed[run] = max(spool.checkpoints.changed(run), spool.served.changed(run) or 0.0)

        self.try_each(spool.runs.names(), read_change)
        latest = sorted(changed, key=lambda run: (-changed[run], run))[:RUNS]
        self.try_each(latest, lambda run: self._set_run(spool, gauges, run))

    def _set_run(self, spool: Spool, gauges: Samples, run: str) -> None:
        if "trainer" in self._sides:
            gauges.set(
                "tandem_policy_version", spool.checkpoints.newest(run), side="trainer", run=run
            )
            gauges.set("tandem_run_bytes", spool.checkpoints.size(run), run=run)
        served = spool.served.get(run)
        if served is not None and "inference" in self._sides:
            gauges.set("tandem_policy_version", served.step, side="inference", run=run)
            gauges.set("tandem_policy_refused", float(served.refused_step is not None), run=run)
            gauges.set(
                "tandem_policy_info", 1, run=run, weights=served.weights, transport=served.transport
            )
            for part, seconds in served.seconds.items():
                gauges.set("tandem_publish_seconds", seconds, run=run, part=part)


class CheckpointsCollector(SpoolCollector):
    name = "checkpoints"
    metrics = (
        Metric(
            "tandem_checkpoint_last_success_timestamp_seconds",
            "Unix time of the newest checkpoint that a job made; absent before the first such "
            "checkpoint.",
            "manifests",
        ),
        Metric(
            "tandem_checkpoint_size_bytes",
            "Size in bytes of the newest checkpoint that a job made.",
            "manifests",
        ),
    )

    def __init__(self, open_spool: OpenSpool) -> None:
        super().__init__(open_spool)
        # Each run's newest step.
        self._newest_step: dict[str, int] = {}
        # Time (Unix seconds) and size (bytes) of the newest checkpoint of all runs.
        self._newest: tuple[float, int] | None = None

    def collect(self, gauges: Samples) -> None:
        spool = self.spool()
        self.try_each(spool.runs.names(), lambda run: self._read_run(spool, run))
        if self._newest is not None:
            gauges.set("tandem_checkpoint_last_success_timestamp_seconds", self._newest[0])
            gauges.set("tandem_checkpoint_size_bytes", self._newest[1])

    def _read_run(self, spool: Spool, run: str) -> None:
        step = spool.checkpoints.newest(run)
        if self._newest_step.get(run) == step:
            return
        manifest = spool.checkpoints.manifest(run, step)
        self._newest_step[run] = step
        if manifest.job is not None:  # no job makes step 0 of a run
            size = sum(entry.size for entry in manifest.files.values())
            self._newest = max(self._newest or (0.0, 0), (manifest.created, size))
