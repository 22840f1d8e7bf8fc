"""The newest checkpoint, from its manifest."""

from tandem.metrics.collector import Collector, OpenSpool
from tandem.metrics.metric import Metric
from tandem.metrics.samples import Samples
from tandem.spool import Spool


class CheckpointsCollector(Collector):
    name = "checkpoints"
    metrics = (
        Metric("tandem_checkpoint_last_success_timestamp_seconds", "When the newest checkpoint of any job was made; "
               "absent before the first one.", "manifests"),
        Metric("tandem_checkpoint_size_bytes", "Size of that checkpoint.", "manifests"),
    )  # fmt: skip

    def __init__(self, open_spool: OpenSpool) -> None:
        super().__init__()
        self._open_spool = open_spool
        self._newest_step: dict[str, int] = {}  # of each run
        self._newest: tuple[float, int] | None = None  # Unix seconds and bytes of the newest checkpoint of all runs

    def collect(self, gauges: Samples) -> None:
        spool = self._open_spool()
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
        if manifest.job is not None:  # step 0 of a run is made by no job
            size = sum(entry.size for entry in manifest.files.values())
            self._newest = max(self._newest or (0.0, 0), (manifest.created, size))
