"""Sessions whose ranks are killed: kill_sessions.py MODEL DIRECTORY {"<name>": [topology, kills],
...}.

The ranks compute the same requests in an undisturbed session, and in sessions in which ranks kill
themselves. The sessions with kills have `kills` kills in all, each at a random file operation or
heartbeat. Prints a line of JSON for each case. The line has the places where ranks were killed, and
the differences from the undisturbed session. The line also has the distance of the undisturbed
session's log-probs from the log-probs of a single rank.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from rank import jobs, sessions
from rank.killed_attempt import attempt
from rank.sessions import Client, differing, outcome, program
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.spool.schema import JobError, JobResult
from tandem.trainer.rank import entry
from tandem.trainer.rank import train as train_module


def train(
    spool: Spool, model: Path, ranks: int, kills: int, most: list[int], rng: random.Random
) -> dict[str, Any]:
    client = Client(spool, sessions.open_session(spool, model))
    calls = program(client)
    found: dict[str, Any] = {"killed": [], "crashed": 0, "moments": []}
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
        if at:
            found["killed"].append(f"rank {rank} at {at}, {phase}, {answered} answered")
        # On the CPU torch sometimes crashes in a thread that only a rank on a GPU has.
        else:
            found["crashed"] += 1
            assert found["crashed"] == 1, files.log(0)
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
    # This stand-in for a GPU makes the ranks call `Policy.rehearse`.
    train_module.device = jobs.gpu_like()  # type: ignore[assignment]
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
