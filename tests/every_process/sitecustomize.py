"""What every Python process that a test starts does first: tests/conftest.py puts this directory
into its PYTHONPATH.

By default Python's garbage collector looks for cycles at every 700 new objects. While torch and
vLLM are imported nothing is garbage, and the search takes an eighth of a start's CPU; of all tests
together it took a tenth.

TEST_CLOCK_SECONDS: by how much the clock of the host is wrong that the process stands for.
"""

import gc
import os
import time

gc.set_threshold(50_000, 20, 100)
if wrong := float(os.environ.get("TEST_CLOCK_SECONDS", "0")):
    _time, _time_ns = time.time, time.time_ns
    time.time = lambda: _time() + wrong
    time.time_ns = lambda: _time_ns() + round(wrong * 1e9)
