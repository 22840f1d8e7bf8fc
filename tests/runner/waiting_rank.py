"""A rank that sleeps for as many seconds as its job is named."""

import time
from pathlib import Path


def main(root: Path, job_id: str, attempt: int) -> None:
    time.sleep(float(job_id))
