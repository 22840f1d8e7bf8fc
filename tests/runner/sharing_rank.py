"""`fake_rank` with memory on a fake GPU, and none of the imports that take seconds."""

import os
from pathlib import Path

from runner import fake_gpu, fake_rank


def main(root: Path, job_id: str, attempt: int) -> int:
    gpu = Path(os.environ["FAKE_GPU"])
    fake_gpu.use(gpu, "rank", fake_gpu.RANK)
    fake_gpu.tell(gpu, "rank runs")
    return fake_rank.main(root, job_id, attempt)
