"""A kill soak: real programs on the CPU die and freeze at random moments while their volume and
clocks misbehave.

    python -m tests.soak [--kills 1000] [--seed N]     the soak; `--help` has the options
    python -m tests.soak.check ROOT LEDGER             checks a spool's files again

The module `stack` starts the programs and finds their processes. The module `disturb` sends signals
to programs and damages files. The module `client` submits jobs and records the API's answers in the
ledger. The module `vllm` replaces vLLM. The module `check` checks the files and shares no code with
Tandem.
"""

import sys
from pathlib import Path

# `python -m tests.soak` finds the tests' modules as pytest does, by `pythonpath` in pyproject.toml.
_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS.parent / "examples")]
