"""Signs of life: whether the loop at the heart of a program still turns. For the liveness probe, which must not take
"the port answers" for it, nor a model that loads or a job that trains for a hang.

`tandem up` names a directory of its own in TANDEM_ALIVE_DIR; a program touches a file there every time round its loop.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "TANDEM_ALIVE_DIR"
LONGEST_SECONDS = {
    # Its loop waits for nothing.
    "up": 60.0,
    # Ending ranks takes half a minute, removing a job's data from a slow volume longer.
    "runner": 600.0,
    # Between two runs: one step's files are hashed and copied, and vLLM is asked to load it and to score it.
    "publisher": 1800.0,
}
"""How long a program's loop may take."""


def beat(program: str, directory: Path | None = None) -> None:
    """The loop of `program` has come round. `directory`: by default the one TANDEM_ALIVE_DIR names, else nothing."""
    if directory is None:
        name = os.environ.get(VARIABLE)
        if not name:
            return
        directory = Path(name)
    with suppress(OSError):  # a full tmpfs must not end who is alive
        (directory / f"{program}.alive").touch()


def silent(program: str, directory: Path) -> str | None:
    """Words for a loop that has not come round for too long; None if it has, or has not begun."""
    try:
        age = time.time() - (directory / f"{program}.alive").stat().st_mtime
    except FileNotFoundError:
        return None
    longest = LONGEST_SECONDS[program]
    return f"{program} has not come round its loop for {age:.0f} s (at most {longest:.0f})" if age > longest else None
