"""What every Python process that a test starts does first: tests/conftest.py puts this directory
into its PYTHONPATH.

By default Python's garbage collector looks for cycles at every 700 new objects. While torch and
vLLM are imported nothing is garbage, and the search takes an eighth of a start's CPU; of all tests
together it took a tenth.
"""

import gc

gc.set_threshold(50_000, 20, 100)
