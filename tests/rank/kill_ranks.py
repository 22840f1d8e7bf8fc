"""Trains cases undisturbed, and again with ranks that are killed: kill_ranks.py DIRECTORY [[kind,
topology], ...].

A run is two jobs; the second continues from what the first has written. In each job's first
attempts one rank kills itself at a random file operation or heartbeat. Then all ranks are killed,
and the job is tried again as the runner does. DIRECTORY/<kind> is a model. Prints a line of JSON
for each case: where its ranks were killed, and the names of files that differ from the undisturbed
run's.
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

import torch

sys.path.append(str(Path(__file__).parents[1]))
from free_ports import free_ports
from rank import jobs
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.spool.schema import Job, JobError, JobResult
from tandem.trainer.rank import entry
from tandem.trainer.rank.heartbeat import Heartbeat

RANKS, JOBS, KILLS = 2, 2, 2
FORK = multiprocessing.get_context("fork")


def rank_main(rank: int, port: int, root: Path, job: Job, kill_at: int, moments: Any) -> None:
    """Counts this rank's file operations on the spool and its heartbeats in `moments`, and dies at
    `kill_at`."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_PORT": str(port),
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TANDEM_TRAINER_RANKS": str(RANKS)}
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


def attempt(spool: Spool, job: Job, killed: int, kill_at: int) -> list[int]:
    """One attempt; each rank's moments. Every rank is dead afterwards. `killed`: the rank that dies
    at `kill_at`."""
    # Without a lock between processes: a rank that is killed while one of its threads holds it
    # would keep it for ever.
    [port], moments = free_ports(1), FORK.Array("i", RANKS, lock=False)
    ranks = [
        FORK.Process(
            target=rank_main,
            args=(rank, port, spool.root, job, kill_at if rank == killed else 0, moments),
        )
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
        time.sleep(0.005)
    for rank in ranks:
        rank.kill()
        rank.join()
    return list(moments)


def train(
    spool: Spool, run: str, kind: str, model: Path, most: list[list[int]], rng: random.Random
) -> dict[str, Any]:
    """Train a run of two jobs. `most`: of each job each rank's moments, to kill at one of them;
    none: undisturbed."""
    jobs.make_run(spool, model, run, seed=3, full=kind.startswith("full"))
    found: dict[str, Any] = {"moments": [], "killed": [], "files": {}}
    for number in range(JOBS):
        job_id = jobs.submit_sft(
            spool, run, f"{run}-{number}", grad_accumulation_sequences=2, epochs=2
        )
        for _ in range(KILLS if most else 0):
            rank = rng.randrange(RANKS)
            at = rng.randint(1, most[number][rank])
            job = jobs.claim(spool, job_id)
            reached = attempt(spool, job, rank, at)[rank] >= at
            if spool.checkpoints.newest(run) > number:  # it was committed before the end
                spool.queue.finish(
                    job, JobResult(state="succeeded", step=number + 1, finished=time.time())
                )
                found["killed"] += [f"rank {rank} at {at}, after the commit"] if reached else []
                break
            beats = Attempt(spool, job_id, job.attempt).beats()
            found["killed"].append(
                f"rank {rank} at {at}, {beats[rank].phase if rank in beats else 'start'}"
            )
            spool.queue.requeue(
                job, JobError(type="rank_died", message="killed", retriable=True), counts=False
            )
        if spool.checkpoints.newest(run) == number:
            job = jobs.claim(spool, job_id)
            found["moments"].append(attempt(spool, job, killed=-1, kill_at=0))
            jobs.finish(spool, job)
        made = jobs.files(spool.checkpoints.path(run, number + 1))
        found["files"] |= {f"{number + 1}/{name}": content for name, content in made.items()}
    return found


def main(directory: Path, cases: list[tuple[str, str]]) -> None:
    entry.preload(jobs.settings().device)
    spool = Spool.create(directory / "spool")
    for kind, topology in cases:
        rng = random.Random(f"{os.environ['SAMPLE_SEED']} {kind} {topology}")
        weights, transport = (
            ("merged", "volume") if kind.startswith("full") else ("adapter", "auto")
        )
        os.environ |= {"TANDEM_WEIGHTS": weights, "TANDEM_TRANSPORT": transport}
        os.environ |= jobs.TOPOLOGIES[topology].variables()
        model = directory / kind
        whole = train(spool, f"{kind}-{topology}-whole", kind, model, [], rng)
        again = train(spool, f"{kind}-{topology}-again", kind, model, whole["moments"], rng)
        names = whole["files"].keys() | again["files"].keys()
        differ = sorted(
            name for name in names if whole["files"].get(name) != again["files"].get(name)
        )
        print(
            json.dumps({"killed": again["killed"], "differ": differ, "files": len(names)}),
            flush=True,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
