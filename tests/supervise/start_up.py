"""python -m start_up: `tandem up`, with short bounds, of the role and programs (as JSON) that the environment names."""

import json
import os
import sys

from tandem.config import Settings
from tandem.supervise import stack, watchdog
from tandem.supervise.programs import Program
from tandem.supervise.up import up

if __name__ == "__main__":
    stack.MOST_CRASHES = int(os.environ.get("FAKE_CRASHES", "1"))
    stack.TRY_AGAIN_SECONDS = 1
    watchdog._TIMEOUT_SECONDS = 0.5
    programs = [Program(priority=n, stop_seconds=2, **p) for n, p in enumerate(json.loads(os.environ["PROGRAMS"]), 1)]
    sys.exit(up(Settings(), os.environ["ROLE"], programs))
