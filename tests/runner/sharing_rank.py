"""`fake_rank` with memory on a fake GPU."""

import os
from pathlib import Path

from runner import fake_gpu, fake_rank
from tandem.spool.attempt import Attempt

preload = fake_rank.preload


def main(attempt: Attempt) -> int:
    gpu = Path(os.environ["FAKE_GPU"])
    fake_gpu.use(gpu, "rank", fake_gpu.RANK)
    fake_gpu.tell(gpu, "rank runs")
    return fake_rank.main(attempt)


def resident():
    """`main` for a rank that stays: after each job it keeps FAKE_RANK_KEEPS MiB."""

    def run(attempt: Attempt) -> int:
        status = main(attempt)
        fake_gpu.use(Path(os.environ["FAKE_GPU"]), "rank", int(os.environ["FAKE_RANK_KEEPS"]))
        return status

    return run
