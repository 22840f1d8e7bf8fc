"""Runs whose events the tests write. The tests read the tracked rows with each tracker's own
reader."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

import api_server as api
from api_server import KEY, Server, no_jobs_left, root, server  # noqa: F401
from integrations.track.readers import make_mlflow
from tandem.client import Tandem
from tandem.spool.schema import Job

_numbers = count()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Tandem]:  # noqa: F811
    with Tandem(server.url, KEY, patience=5) as client:
        yield client


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mlflow")
    make_mlflow(directory)
    return directory / "mlflow.db"


@dataclass
class History:
    """One run. The test's calls begin, continue and end the run's jobs."""

    server: Server
    client: Tandem
    run: str
    directory: Path
    job: Job | None = None

    def begin(self) -> None:
        """Submit a job and claim it."""
        self.client.train(self.run, api.rl_request())
        self.job = api.claim(self.server.spool)

    def event(self, kind: str, **data: object) -> None:
        assert self.job is not None
        append = self.server.spool.events.append
        append(self.job.spec.id, kind, attempt=self.job.attempt, **data)  # type: ignore[arg-type]

    def steps(self, first: int, *losses: float) -> None:
        """Writes optimizer steps of the running job. `first`: the number of the first step within
        the run."""
        for step, loss in enumerate(losses, first):
            memory = {"memory_optimizer_peak_bytes": None}
            metrics = {
                "loss": loss,
                "reward_mean": 1 - loss,
                "optimizer_step": float(step),
                **memory,
            }
            self.event("step", step=step, steps=len(losses), metrics=metrics)

    def succeed(self, **evaluated: float) -> None:
        assert self.job is not None
        if evaluated:
            self.event("evaluated", step=1, metrics=evaluated)
        api.commit(self.server.spool, self.job)
        last, highest = {"optimizer": {"peak": 1000}}, {"optimizer": {"peak": 3000}}
        self.event("checkpoint", step=self.job.spec.base_step + 1, bytes=640, seconds=0.5)
        self.event("released", memory={"0": {"uuid": "cpu", "phases": last, "highest": highest}})
        api.succeed(self.server.spool, self.job)

    def serve(self, error: float = 0.002) -> None:
        self.event("served", step=1, model=f"{self.run}@1", mean_abs_logprob_error=error)

    def train(self, first: int, *losses: float) -> None:
        """Runs a job from its submission until its step is served."""
        self.begin()
        self.steps(first, *losses)
        self.succeed()
        self.serve()

    def fail(self) -> None:
        assert self.job is not None
        api.fail(self.server.spool, self.job)


@pytest.fixture
def history(server, client, database, tmp_path, monkeypatch) -> History:  # noqa: F811
    shutil.copyfile(database, tmp_path / "mlflow.db")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = client.create_run(f"run-{next(_numbers)}", lora={"rank": 2}).spec.name
    return History(server, client, run, tmp_path)
