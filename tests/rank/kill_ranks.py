"""Trains cases undisturbed, and again with ranks that are killed: kill_ranks.py DIRECTORY [[kind,
topology], ...].

A case is a run of two jobs. The second job continues from the first job's checkpoint. In each of a
job's first two attempts, one rank kills itself at a random file operation or heartbeat. After the
death of this rank, all other ranks are killed, and the job is tried again, as the runner would do.
DIRECTORY/<kind> is the model of a case. Prints a line of JSON for each case. The line has the
places where ranks were killed, and the names of the files that differ from the undisturbed run's
files.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from rank import jobs
from rank.killed_attempt import attempt
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.spool.schema import JobError, JobResult
from tandem.trainer.rank import entry

RANKS, JOBS, KILLS = 2, 2, 2


def train(
    spool: Spool, run: str, kind: str, model: Path, most: list[list[int]], rng: random.Random
) -> dict[str, Any]:
    """Trains a run of two jobs. `most`: for each job, the number of moments of each rank in an
    undisturbed run. A moment is a file operation or a heartbeat, and a rank is killed at a random
    moment. If `most` is empty, no rank is killed."""
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
            reached = attempt(spool, job, RANKS, rank, at)[rank] >= at
            # The checkpoint was committed before the rank died or the job ended.
            if spool.checkpoints.newest(run) > number:
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
            found["moments"].append(attempt(spool, job, RANKS, killed=-1, kill_at=0))
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
