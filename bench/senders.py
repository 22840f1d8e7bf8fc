"""Ranks that send whole weights to vLLM like a job's ranks, but do not train. `bench.swap` gives
the ranks the adapters.

    python -m bench.senders DIRECTORY RANKS     one rank; `Senders` writes its orders to DIRECTORY
"""

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Self

from bench.restart import RUN, submit
from tandem.config import Settings
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.spool.schema import Job, JobResult, Manifest
from tandem.system import ports

ROW = 64
"""Slots of the jobs' rows, which nobody computes."""
READY_SECONDS, SENT_SECONDS = 300.0, 120.0


class Senders:
    """Starts tensor-parallel ranks for the run of `bench.restart`. `variables`: environment
    variables with vLLM's address, the transport and other settings."""

    def __init__(
        self, directory: Path, spool: Spool, ranks: int, vocabulary: int, variables: dict[str, str]
    ) -> None:
        self._directory, self._spool, self._vocabulary = directory, spool, vocabulary
        self._number = 0
        self._job: Job | None = None
        directory.mkdir()
        with ports.reserve() as reserved:
            port = str(reserved.port)
        world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self._environment = os.environ | variables | world

    def __enter__(self) -> Self:
        ranks = self._environment["WORLD_SIZE"]
        command = [sys.executable, "-m", "bench.senders", str(self._directory), ranks]
        self._ranks = []
        for rank in map(str, range(int(ranks))):
            with (self._directory / f"log.{rank}").open("wb") as log:
                environment = self._environment | {"RANK": rank, "LOCAL_RANK": rank}
                self._ranks.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log)
                )
        self._until("ready", READY_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_job()
        for rank in self._ranks:
            rank.kill()
            rank.wait(30)

    def offer(self, adapter: Path) -> str:
        """Ends the previous job, and starts a job whose ranks offer these weights. Returns the new
        job's id."""
        self._end_job()
        self._number += 1
        job = f"{self._directory.name}-{self._number}"
        submit(self._spool, job, self._vocabulary, ROW)
        self._job = self._spool.queue.claim("bench")
        assert self._job is not None
        self._write("order", {"adapter": str(adapter), "job": job})
        self._until("offered", READY_SECONDS)
        return job

    def send(self, step: int) -> None:
        """Tells the ranks to send the offered weights, which belong to the checkpoint of `step`."""
        self._write("send", {"step": step})

    def sent(self) -> dict[str, Any]:
        """Waits until the ranks have sent the weights or have given up. Returns the ranks' event
        `sent`."""
        self._until("sent", SENT_SECONDS)
        return dict(json.loads((self._directory / f"sent.{self._number}").read_text()))

    def _end_job(self) -> None:
        if self._job is not None:
            made = self._spool.checkpoints.made_by(self._job)
            result = JobResult(state="succeeded" if made else "cancelled", finished=time.time())
            self._spool.queue.finish(self._job, result)
            self._job = None

    def _write(self, name: str, order: dict[str, Any]) -> None:
        _write(self._directory / f"{name}.{self._number}", order)

    def _until(self, name: str, seconds: float) -> None:
        path, end = self._directory / f"{name}.{self._number}", time.monotonic() + seconds
        while not path.exists():
            assert all(rank.poll() is None for rank in self._ranks), self._logs()
            assert time.monotonic() < end, f"not within {seconds} s: {name}\n{self._logs()}"
            time.sleep(0.01)

    def _logs(self) -> str:
        logs = sorted(self._directory.glob("log.*"))
        return "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)


def _write(path: Path, value: object) -> None:
    staged = path.with_suffix(f"{path.suffix}.tmp")
    staged.write_text(json.dumps(value))
    staged.rename(path)


def _read(path: Path) -> dict[str, Any]:
    while not path.exists():
        time.sleep(0.01)
    return dict(json.loads(path.read_text()))


def main(directory: Path, ranks: int) -> None:
    """Runs one rank, which follows the orders of `Senders` until it is killed."""
    import torch

    from tandem.families.registry import read_arch
    from tandem.model import device, parallel
    from tandem.model.build import build_policy
    from tandem.model.weights.base_weights import load_weights
    from tandem.topology.sizes import Sizes
    from tandem.trainer.launch import RankSettings
    from tandem.trainer.rank.publication import Publication

    settings = RankSettings.of(Settings())
    device.activate(device.choose(settings.device), int(os.environ["LOCAL_RANK"]))
    top = parallel.init_parallel(Sizes(tensor=ranks))
    spool = Spool(Settings().root)
    run = spool.runs.get(RUN)
    model = Path(run.base_model)
    dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    policy = build_policy(read_arch(str(model)), run.lora, dtype=dtype)
    load_weights(model, policy.arch, policy.base, policy.topology.sizes, policy.topology.place)
    told: dict[str, Any] = {}

    def event(kind: Any, **data: Any) -> None:
        told.clear()
        told.update(data)
        if top.rank == 0:
            spool.events.append(job, kind, **data)

    number = 0
    parallel.gather_objects(None)
    if top.rank == 0:
        _write(directory / "ready.0", {})
    while True:
        number += 1
        order = _read(directory / f"order.{number}")
        job = order["job"]
        policy.load_adapter(Path(order["adapter"]))
        attempt = Attempt(spool, job, 1)
        if top.rank == 0:
            attempt.work.mkdir(parents=True, exist_ok=True)
        publication = Publication(settings, model, policy, attempt, beat=lambda: None, event=event)
        publication.offer()
        if top.rank == 0:
            _write(directory / f"offered.{number}", {})
        step = _read(directory / f"send.{number}")["step"]
        find = partial(spool.checkpoints.manifest, RUN, step)
        checkpoint: Manifest | None = find() if top.rank == 0 else None
        publication.send(checkpoint)
        if top.rank == 0:
            _write(directory / f"sent.{number}", told)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
