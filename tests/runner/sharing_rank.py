"""`fake_rank` with memory on a fake GPU."""

import os
from pathlib import Path

from runner import fake_gpu, fake_rank

preload = fake_rank.preload


def main(root: Path, job_id: str, attempt: int) -> int:
    gpu = Path(os.environ["FAKE_GPU"])
    fake_gpu.use(gpu, "rank", fake_gpu.RANK)
    fake_gpu.tell(gpu, "rank runs")
    return fake_rank.main(root, job_id, attempt)


def resident():
    """`main` for a rank that stays: after each job it keeps FAKE_RANK_KEEPS MiB."""

    def run(root: Path, job_id: str, attempt: int) -> int:
        status = main(root, job_id, attempt)
        fake_gpu.use(Path(os.environ["FAKE_GPU"]), "rank", int(os.environ["FAKE_RANK_KEEPS"]))
        return status

    return run
