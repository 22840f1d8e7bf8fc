"""A rank that waits for as long as its job's name says."""

import time
from pathlib import Path


def main(root: Path, job_id: str, attempt: int) -> None:
    time.sleep(float(job_id))
