"""`python -m tandem.trainer.runner [ENTRY]`: the runner as a program."""

import sys

from tandem.trainer.runner.loop import main

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
