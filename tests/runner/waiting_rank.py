"""A rank that sleeps for as many seconds as its job is named."""

import time
from pathlib import Path


def preload() -> None:
    """There is nothing to import."""


def main(root: Path, job_id: str, attempt: int) -> None:
    time.sleep(float(job_id))
