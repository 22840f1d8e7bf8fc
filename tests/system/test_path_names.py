"""A path's names are freed with it."""

import subprocess
import sys
from pathlib import Path

import pytest

GROWTH = """
import sys, tracemalloc
from pathlib import Path
{begin}
tracemalloc.start()
def use(number):
    file = Path("/a") / f"job-{{number:030d}}" / "file.json"
    return str(file), Path("/a").glob("*"), Path.cwd()
for number in range(100): use(number)
before = tracemalloc.get_traced_memory()[0]
for number in range(100, 5100): use(number)
print(tracemalloc.get_traced_memory()[0] - before)
"""


def growth(begin: str) -> int:
    """Bytes that stay of 5,000 paths, each with a name of its own."""
    command = [sys.executable, "-c", GROWTH.format(begin=begin)]
    return int(
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    )


def test_paths_leave_nothing() -> None:
    assert (
        growth("from tandem.system.path_names import free_path_names; free_path_names()") < 100_000
    )


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 12), reason="later versions free the names themselves"
)
def test_python_keeps_each_name() -> None:
    """When this fails, `path_names.py` can go."""
    assert growth("") > 300_000


@pytest.mark.parametrize(
    "program",
    [
        "controller/__main__",
        "trainer/runner/__main__",
        "inference/publisher/__main__",
        "metrics/exporter",
        "trainer/rank/entry",
        "trainer/launch/forkserver",
    ],
)
def test_each_program_that_handles_jobs_calls_it(program: str) -> None:
    assert (
        "    free_path_names()\n"
        in (Path(__file__).parents[2] / f"src/tandem/{program}.py").read_text()
    )
