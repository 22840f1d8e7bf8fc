"""What was read of jobs that are gone is freed."""

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
    assert growth(kind, text, parse) < 20_000


def growth(kind: str, text: str, parse: Callable[[str], object]) -> int:
    """Bytes that stay of 2,000 records with names of their own."""

    def read(number: int) -> None:
        parse(text.replace(NAME, f"{kind}-{number:026d}"))

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
