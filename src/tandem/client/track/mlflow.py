"""Writes to a run of MLflow. A tag of the run has the last row's position.

For each row, MLflow first writes the metrics in one transaction, and then the tag. If the tag was
not written, the row is sent again. MLflow's database drops a metric that it already has with the
same step, time and value.
"""

import os
import tempfile
from hashlib import sha256
from pathlib import Path

from tandem.client import RunSpec
from tandem.client.track.rows import Position, Row, open_alone, optional

_RUN, _POSITION = "tandem.run", "tandem.position"


class Mlflow:
    """A run of MLflow in the experiment MLFLOW_EXPERIMENT_NAME (default: "tandem"). After a
    rollback, a new run of MLflow begins."""

    replaces = False

    def __init__(self, run: RunSpec, where: str) -> None:
        self._mlflow = optional("mlflow")
        self._name, self._key = run.name, f"{run.name}-{run.created:.0f}"
        digest = sha256(f"{where} {self._key}".encode()).hexdigest()[:16]
        self._lock = open_alone(
            Path(tempfile.gettempdir()) / f"tandem-track-{os.getuid()}-{digest}.lock"
        )
        self._client = client = self._mlflow.MlflowClient(tracking_uri=where)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "tandem")
        found = client.get_experiment_by_name(name)
        self._experiment = found.experiment_id if found else client.create_experiment(name)
        query, order = f"tags.`{_RUN}` = '{self._key}'", ["attributes.start_time DESC"]
        runs = client.search_runs([self._experiment], query, order_by=order, max_results=1)
        self._id = runs[0].info.run_id if runs else ""
        position = runs[0].data.tags.get(_POSITION) if runs else None
        self.position = Position.parse(position) if position else None

    def write(self, row: Row) -> None:
        entities, new = self._mlflow.entities, not self._id or not self.position
        if not self._id:
            tags = {_RUN: self._key} | ({_POSITION: str(self.position)} if self.position else {})
            self._id = self._client.create_run(
                self._experiment, run_name=self._name, tags=tags
            ).info.run_id
        time, step = int(row.time * 1000), row.position.step
        metrics = [entities.Metric(name, value, time, step) for name, value in row.values.items()]
        parameters = (
            [entities.Param(name, value) for name, value in row.parameters.items()] if new else []
        )
        if row.samples:
            self._client.log_text(self._id, row.markdown(), f"samples/{step:06d}.md")
        self._client.log_batch(
            self._id, metrics, parameters, [entities.RunTag(_POSITION, str(row.position))]
        )

    def rewind(self, step: int) -> None:
        self._client.set_terminated(self._id)
        self._id, self._name = "", f"{self._name} from {step}"

    def close(self) -> None:
        if self._id:
            self._client.set_terminated(self._id)
        self._lock.close()
