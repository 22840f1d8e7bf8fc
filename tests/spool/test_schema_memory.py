"""What was read of jobs that are gone is freed."""

import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from spool.spool_tools import spool_with_run, submit
from tandem.spool.schema import Event, Job

NAME = "a-name-that-no-other-job-has"


@pytest.mark.parametrize("kind", ["job", "event"])
def test_records_leave_nothing(tmp_path: Path, kind: str) -> None:
    spool = spool_with_run(tmp_path)
    job = submit(spool, NAME)
    event = spool.events.append(NAME, "step", attempt=1, of=NAME)
    text, parse = (job.model_dump_json(), Job.model_validate_json) if kind == "job" else (
        event.model_dump_json(), Event.model_validate_json)  # fmt: skip
    assert growth(lambda number: parse(text.replace(NAME, f"{kind}-{number:026d}"))) < 20_000


def test_listings_of_directories_that_are_gone_leave_nothing(memory_path: Path) -> None:
    spool = spool_with_run(memory_path)
    top = str(spool.paths.state_dir("failed"))

    def list_an_hour(number: int) -> None:
        os.mkdir(directory := f"{top}/hour-{number}")  # noqa: PTH102 (pathlib keeps the names)
        for job in range(5):
            os.close(os.open(f"{directory}/{job:016d},00000000,r,job-{number}-{job}.json", os.O_CREAT))
        assert spool.jobs.index.count("failed") == 5
        shutil.rmtree(directory)

    assert growth(list_an_hour) < 1_000_000


def growth(read: Callable[[int], object]) -> int:
    """Bytes that stay of 2,000 records with names of their own."""
    for number in range(200):
        read(number)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(200, 2200):
            read(number)
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
