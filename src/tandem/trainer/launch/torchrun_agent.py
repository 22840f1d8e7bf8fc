"""torchrun, with a record of how its ranks failed.

    python -m tandem.trainer.launch.torchrun_agent <directory> <torchrun's arguments>

torchrun's exit status is 1 whichever rank failed and however. This program calls torchrun's own `main` and writes the
failures that it raises to `exits.json` in `directory`.
"""

import os
import signal
import sys
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tandem.trainer.launch import SHUTDOWN_SECONDS, write_exits


def own_failures(failures: dict[int, ProcessFailure]) -> dict[int, int]:
    """Exit status by rank of the ranks that failed by themselves, first failure first.

    After the first failure the agent ends the other ranks: it sends SIGTERM, and SIGKILL when its timeout is over.
    """
    exits: dict[int, int] = {}
    ordered = sorted(failures.items(), key=lambda item: item[1].timestamp)  # Unix seconds, in whole numbers
    kill_time = ordered[0][1].timestamp + SHUTDOWN_SECONDS["torchrun"]
    for rank, failure in ordered:
        terminated = bool(exits) and failure.exitcode == -signal.SIGTERM
        killed = failure.exitcode == -signal.SIGKILL and failure.timestamp >= kill_time
        if not terminated and not killed:
            exits[rank] = failure.exitcode
    return exits


def main(work: str, *arguments: str) -> None:
    os.environ["TANDEM_AGENT_PID"] = str(os.getpid())
    try:
        run.main([*arguments])
    except ChildFailedError as error:
        write_exits(Path(work), own_failures(error.failures))
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
