"""Fuzzers that run for as long as one likes.

    python -m tests.fuzz.api [--minutes 30] [--seed N]      requests against a controller
    python -m tests.fuzz.files [--minutes 30] [--seed N]    damaged files against every program

Each fuzzer prints the seed that repeats its run. `stage` makes a spool with every kind of file,
`damage` damages one file, and `readers` lets the programs read the spool.
"""

import sys
from pathlib import Path

# A fuzzer that is run as a program finds the tests' modules as pytest does (`pythonpath` in
# pyproject.toml).
_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS.parent / "examples")]
