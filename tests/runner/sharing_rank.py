"""A `fake_rank` that uses memory of a fake GPU."""

import os
from pathlib import Path

from runner import fake_gpu, fake_rank
from tandem.spool.attempt import Attempt
from tandem.trainer.launch import RankSettings

preload = fake_rank.preload


def main(attempt: Attempt, settings: RankSettings) -> int:
    gpu = Path(os.environ["FAKE_GPU"])
    fake_gpu.use(gpu, "rank", fake_gpu.RANK)
    fake_gpu.tell(gpu, "rank runs")
    return fake_rank.main(attempt, settings)


def resident():
    """A `main` for a resident rank. After each job the rank keeps FAKE_RANK_KEEPS MiB of the
    GPU."""

    def run(attempt: Attempt, settings: RankSettings) -> int:
        status = main(attempt, settings)
        fake_gpu.use(Path(os.environ["FAKE_GPU"]), "rank", int(os.environ["FAKE_RANK_KEEPS"]))
        return status

    return run
