"""Reads a metric with each tracker's own reader: (optimizer step, value), in the order of steps."""

import json
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2 as messages

from tandem.client.track.wandb import records

Curve = list[tuple[int, float]]
MLFLOW = "sqlite:///{directory}/mlflow.db"


def place(kind: str, directory: Path) -> str:
    """The option `--to` for a tracker in a test's directory."""
    where = {"tensorboard": directory / "tb", "wandb": "project"}
    return f"{kind}:{where.get(kind) or MLFLOW.format(directory=directory)}"


def make_mlflow(directory: Path) -> None:
    """Makes MLflow's empty database, which takes seconds."""
    _mlflow_client(directory).search_experiments()


def _mlflow_client(directory: Path) -> Any:
    # the import of mlflow takes 3 s, so it must not slow processes that only collect the tests
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=MLFLOW.format(directory=directory))


def accumulator(directory: Path, run: str) -> EventAccumulator:
    return EventAccumulator(str(directory / "tb" / run), size_guidance={"scalars": 0}).Reload()


def curves(kind: str, directory: Path, run: str, metric: str) -> list[Curve]:
    """A curve for each of the tracker's runs. A tracker that can't remove rows has several runs
    after a rollback."""
    return READERS[kind](directory, run, metric)


def _tensorboard(directory: Path, run: str, metric: str) -> list[Curve]:
    loaded = accumulator(directory, run)
    if metric not in loaded.Tags()["scalars"]:
        return [[]]
    return [[(event.step, round(event.value, 6)) for event in loaded.Scalars(metric)]]


def _wandb(directory: Path, run: str, metric: str) -> list[Curve]:
    found: dict[str, list[tuple[int, int, float]]] = {}
    paths = (directory / "wandb").glob("offline-run-*/*.wandb")
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns):
        rows = found.setdefault(path.stem, [])
        for data in records(path):
            record = messages.Record.FromString(data)  # type: ignore[attr-defined]
            items = record.history.item
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items
            }
            if metric in row:
                rows.append((row["_step"], row["optimizer_step"], row[metric]))
    # W&B's server accepts only rows whose step is above the step of the row before.
    for rows in found.values():
        assert [row[0] for row in rows] == sorted({row[0] for row in rows})
    return [[row[1:] for row in rows] for _, rows in sorted(found.items())]


def _mlflow(directory: Path, run: str, metric: str) -> list[Curve]:
    client = _mlflow_client(directory)
    experiment = client.get_experiment_by_name("tandem").experiment_id
    runs = client.search_runs([experiment], order_by=["attributes.start_time ASC"])
    histories = [client.get_metric_history(found.info.run_id, metric) for found in runs]
    return [[(point.step, point.value) for point in history] for history in histories]


def tables(directory: Path, run: str) -> dict[str, list[tuple[int, Any]]]:
    """The tables of samples in each tracker. For W&B and MLflow, a table is (optimizer step, rows).
    For TensorBoard, a table is (optimizer step, last line of the text)."""
    loaded = accumulator(directory, run)
    texts = loaded.Tensors("samples") if "samples" in loaded.Tags()["tensors"] else []
    found: dict[str, list[tuple[int, Any]]] = {"wandb": [], "mlflow": []}
    found["tensorboard"] = [
        (event.step, event.tensor_proto.string_val[0].decode().splitlines()[-1]) for event in texts
    ]
    for path in sorted((directory / "wandb").glob("offline-run-*/*.wandb")):
        for data in records(path):
            record = messages.Record.FromString(data)  # type: ignore[attr-defined]
            row = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            if "samples/path" in row:
                file = path.parent / "files" / json.loads(row["samples/path"])
                table = json.loads(file.read_text())
                found["wandb"].append((json.loads(row["optimizer_step"]), table["data"]))
    client = _mlflow_client(directory)
    experiment = client.get_experiment_by_name("tandem").experiment_id
    for made in client.search_runs([experiment]):
        for file in client.list_artifacts(made.info.run_id, "samples"):
            text = Path(client.download_artifacts(made.info.run_id, file.path)).read_text()
            found["mlflow"].append((int(Path(file.path).stem), text.splitlines()[-1]))
    return found


READERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
