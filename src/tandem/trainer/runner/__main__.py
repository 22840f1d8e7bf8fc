"""`python -m tandem.trainer.runner [ENTRY]` runs the runner. ENTRY: the module that ranks run."""

import signal
import sys

from tandem.config import load_settings
from tandem.errors import TandemError
from tandem.system import logs
from tandem.trainer.launch import DEFAULT_ENTRY
from tandem.trainer.runner.loop import Runner, log


def main(entry: str = DEFAULT_ENTRY) -> int:
    """Run until SIGTERM; returns the exit status."""
    logs.configure()
    try:
        runner = Runner(load_settings(), entry)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, runner.stop.request)
        runner.run()
    except TandemError as error:
        log.error("the runner can't run", type=error.code, error=error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
