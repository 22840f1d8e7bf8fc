"""Ranks that publish whole weights as a job's ranks do, but without training. A test gives the
ranks an adapter, and the ranks send the merged weights.

`python whole_weights_sender.py DIRECTORY TP PP` is one rank. The rank takes its orders from files
that `Senders` writes to DIRECTORY.
"""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Self

from free_ports import free_ports
from rank.jobs import submit_rl
from ranks import start_rank
from tandem.config import Settings
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.spool.schema import Job, JobResult, Manifest, VllmPlace
from tandem.system.network import network_name
from waiting import until


class Senders:
    """The ranks of one run, `tp` ranks in each of `pp` stages. `variables`: additional environment
    variables of the ranks. The end of a job moves the job's directory, so a job's meeting file can
    be read only until the next `offer` or the end of the `with` block."""

    def __init__(
        self,
        directory: Path,
        spool: Spool,
        run: str,
        way: str,
        tp: int = 1,
        pp: int = 1,
        **variables: str,
    ) -> None:
        self.directory, self.spool, self.run, self.tp, self.pp = directory, spool, run, tp, pp
        self._number = 0
        self._job: Job | None = None
        directory.mkdir()
        if not spool.inference.places():  # No publisher has written a `VllmPlace`.
            spool.inference.put_place(VllmPlace(address="127.0.0.1", network=network_name()))
        [port] = free_ports(1)
        self._environment = os.environ | {
            "PYTHONWARNINGS": "ignore",
            "WORLD_SIZE": str(tp * pp),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "TANDEM_ROOT": str(spool.root),
            "TANDEM_WEIGHTS": "merged",
            "TANDEM_TRANSPORT": way,
            **variables,
        }

    def __enter__(self) -> Self:
        command = __file__, str(self.directory), str(self.tp), str(self.pp)
        self.ranks = [
            start_rank(
                self._environment | {"RANK": rank, "LOCAL_RANK": rank},
                self.directory / f"log.{rank}",
                *command,
            )
            for rank in map(str, range(self.tp * self.pp))
        ]
        self.run_of(self.run)
        return self

    def __exit__(self, *_: object) -> None:
        self.end_job()
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join(30)
        print(self._logs())  # pytest shows this output when a test fails

    def run_of(self, run: str) -> None:
        """Wait until the ranks have a model for the run."""
        (self.directory / "run").write_text(run)
        self._until("ready")

    def offer(self, adapter: Path) -> str:
        """Ends the previous job and starts a job whose ranks offer these weights. Returns the job's
        id."""
        self.end_job()
        self._number += 1
        job = submit_rl(self.spool, self.run, f"{self.run}-{self.directory.name}-{self._number}")
        self._job = self.spool.queue.claim("runner")
        assert self._job is not None
        self._write("order", {"adapter": str(adapter), "job": job})
        self._until("offered")
        return job

    def end_job(self) -> None:
        if self._job is not None:
            made = self.spool.checkpoints.made_by(self._job)
            result = JobResult(state="succeeded" if made else "cancelled", finished=time.time())
            self.spool.queue.finish(self._job, result)
            self._job = None

    def send(self, step: int | None = None) -> None:
        """Lets the ranks begin to send the offered weights. `step`: the number of the checkpoint
        that has these weights."""
        self._write("send", {"step": step})

    def sent(self, seconds: float = 60.0) -> dict[str, Any]:
        """The ranks' report after they have sent the weights or given up."""
        self._until("sent", seconds)
        return dict(json.loads((self.directory / f"sent.{self._number}").read_text()))

    def signal(self, sig: signal.Signals) -> None:
        for rank in self.ranks:
            assert rank.pid is not None
            os.kill(rank.pid, sig)

    def _logs(self) -> str:
        return "\n".join(
            log.read_text(errors="replace")[-3000:] for log in sorted(self.directory.glob("log.*"))
        )

    def _write(self, name: str, order: dict[str, Any]) -> None:
        _write(self.directory / f"{name}.{self._number}", order)

    def _until(self, name: str, seconds: float = 200.0) -> None:
        path = self.directory / f"{name}.{self._number}"
        until(
            f"the ranks write {name}",
            lambda: path.exists() or not self.ranks[0].is_alive(),
            seconds,
            poll=0.01,
        )
        assert path.exists(), "a rank has ended:\n" + self._logs()


def _write(path: Path, value: object) -> None:
    temporary = path.with_suffix(f"{path.suffix}.tmp{os.getpid()}")
    temporary.write_text(json.dumps(value))
    temporary.rename(path)


def _read(path: Path) -> dict[str, Any]:
    while not path.exists():
        time.sleep(0.01)
    return dict(json.loads(path.read_text()))


def main(directory: Path, tp: int, pp: int) -> None:
    import torch

    from policies import make_policy
    from tandem.model import device, parallel
    from tandem.topology.sizes import Sizes
    from tandem.trainer.launch import RankSettings
    from tandem.trainer.rank import publication as module

    module.BUFFER_BYTES = int(os.environ.get("BUFFER_BYTES", module.BUFFER_BYTES))
    settings = RankSettings.of(Settings())
    device.activate(device.choose(settings.device), int(os.environ["LOCAL_RANK"]))
    top = parallel.init_parallel(Sizes(tensor=tp, pipeline=pp))
    spool = Spool(Settings().root)
    while not (directory / "run").exists():
        time.sleep(0.01)
    run = spool.runs.get((directory / "run").read_text())
    model = Path(run.base_model)
    dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    policy = make_policy(model, run.lora, dtype=dtype)
    events: list[dict[str, Any]] = []

    def event(kind: Any, **data: Any) -> None:
        events.append({"type": kind, **data})
        if top.rank == 0:
            spool.events.append(job, kind, attempt=1, **data)

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
        publication = module.Publication(
            settings, model, policy, attempt, beat=lambda: None, event=event
        )
        publication.offer()
        if top.rank == 0:
            _write(directory / f"offered.{number}", {})
        step = _read(directory / f"send.{number}")["step"]
        find = partial(spool.checkpoints.manifest, run.name, step)
        checkpoint: Manifest | None = find() if top.rank == 0 and step is not None else None
        publication.send(checkpoint)
        if top.rank == 0:
            _write(directory / f"sent.{number}", events[-1])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
