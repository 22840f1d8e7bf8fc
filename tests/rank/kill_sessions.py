"""Sessions whose ranks are killed: kill_sessions.py MODEL DIRECTORY {"<name>": [topology, kills],
...}.

The same requests are computed undisturbed, and in other sessions, in which a rank kills itself
`kills` times in all, at a random file operation or heartbeat. Prints a line of JSON for
each case: where ranks were killed, what differs from the undisturbed session, and how far its
log-probs are from those of a rank alone.
"""

import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1]))
from free_ports import free_ports
from rank import jobs, sessions
from rank.sessions import Client, differing, outcome, program
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.spool.schema import Job, JobError, JobResult
from tandem.trainer.rank import entry
from tandem.trainer.rank import train as train_module
from tandem.trainer.rank.heartbeat import Heartbeat

FORK = multiprocessing.get_context("fork")


def rank_main(
    rank: int, ranks: int, port: int, root: Path, job: Job, kill_at: int, moments: Any
) -> None:
    """Counts this rank's file operations on the spool and its heartbeats in `moments`, and dies at
    `kill_at`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TANDEM_TRAINER_RANKS"] = str(ranks)
    torch.set_num_threads(1)
    one_thread = threading.RLock()

    def moment() -> None:
        with one_thread:
            moments[rank] += 1
            if moments[rank] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove") and str(root) in str(
            arguments[0]
        ):
            moment()

    beat = Heartbeat.__call__

    def call(self: Heartbeat, phase: str) -> None:
        moment()
        beat(self, phase)

    Heartbeat.__call__ = call  # type: ignore[method-assign]
    sys.addaudithook(audit)
    os._exit(entry.main(Attempt(Spool(root), job.spec.id, job.attempt), jobs.settings()))


def attempt(spool: Spool, job: Job, ranks: int, killed: int, kill_at: int) -> list[int]:
    """One attempt; each rank's moments. Every rank is dead afterwards."""
    [port], moments = free_ports(1), FORK.Array("i", ranks, lock=False)
    started = [
        FORK.Process(
            target=rank_main,
            args=(rank, ranks, port, spool.root, job, kill_at * (rank == killed), moments),
        )
        for rank in range(ranks)
    ]
    for rank in started:
        rank.start()
    while any(rank.is_alive() for rank in started) and not any(r.exitcode for r in started):
        time.sleep(0.005)
    for rank in started:
        rank.kill()
        rank.join()
    return list(moments)


def train(
    spool: Spool, model: Path, ranks: int, kills: int, most: list[int], rng: random.Random
) -> dict[str, Any]:
    client = Client(spool, sessions.open_session(spool, model))
    calls = program(client)
    found: dict[str, Any] = {"killed": [], "moments": []}
    while spool.requests.pending(client.run):
        job = sessions.claim(spool)
        rank = rng.randrange(ranks)
        at = rng.randint(1, most[rank]) if len(found["killed"]) < kills else 0
        found["moments"] = attempt(spool, job, ranks, rank, at)
        files = Attempt(spool, job.spec.id, job.attempt)
        if files.left.exists():
            step = spool.checkpoints.newest(client.run)
            spool.queue.finish(job, JobResult(state="succeeded", step=step, finished=time.time()))
            continue
        answered = len(calls) - len(spool.requests.pending(client.run))
        beats = files.beats()
        phase = beats[rank].phase if rank in beats else "start"
        assert at, files.log(0)
        found["killed"].append(f"rank {rank} at {at}, {phase}, {answered} answered")
        spool.queue.requeue(job, JobError(type="rank_died", message="killed", retriable=True))
    return found | {"outcome": outcome(client, calls)}


def logprobs(found: dict[str, Any]) -> np.ndarray:
    parts = [
        np.frombuffer(part, "<f4")
        for name, value in sorted(found["outcome"].items())
        if name.startswith("log-probs")
        for part in value
    ]
    return np.concatenate(parts)


def main(model: Path, directory: Path, cases: dict[str, tuple[str | None, int]]) -> None:
    os.environ["TANDEM_SESSION_IDLE_SECONDS"] = "0"
    train_module.device = jobs.gpu_like()  # type: ignore[assignment]  # so that ranks rehearse
    entry.preload(jobs.settings().device)
    spool = Spool.create(directory / "spool")
    rng = random.Random(os.environ["SAMPLE_SEED"])
    alone = train(spool, model, 1, 0, [], rng)
    for name, (topology, kills) in cases.items():
        ranks, whole = 1, alone
        if topology is not None:
            os.environ |= jobs.TOPOLOGIES[topology].variables()
            ranks = 2
            whole = train(spool, model, ranks, 0, [], rng)
        again = list[dict[str, Any]]()
        while (left := kills - sum(len(one["killed"]) for one in again)) > 0:
            again.append(train(spool, model, ranks, min(left, 3), whole["moments"], rng))
        told = {
            "name": name,
            "killed": [place for one in again for place in one["killed"]],
            "differ": [d for one in again for d in differing(whole["outcome"], one["outcome"])],
            "compared": len(whole["outcome"]),
            "from_one_rank": float(np.abs(logprobs(alone) - logprobs(whole)).max()),
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
