"""The first code that a rank runs, before torch is imported. The rank ends when its parent ends,
and writes its output to its own log file.

`python -m tandem.trainer.launch.bootstrap <a Launch as JSON>` runs one job. With the arguments
`<entry module> <setting of the device> <socket>`, the process stays and runs the jobs that come
over the socket.
"""

import importlib
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from tandem.spool.attempt import Attempt
from tandem.system.processes import die_with_parent
from tandem.trainer.launch import Launch, RankSettings


def redirect(log: Path) -> None:
    """Append stdout and stderr, of Python and of C code, to `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def run(launch: Launch, main: Callable[[Attempt, RankSettings], int | None] | None = None) -> int:
    """Run this process's rank, with its output in the rank's log. Returns the rank's exit status.
    Raises the rank's error, and SpoolUnusable.

    `main`: the function that runs the rank; by default the `main` of the launch's entry module.
    """
    attempt = launch.open()
    redirect(attempt.log(int(os.environ["RANK"])))
    main = main or importlib.import_module(launch.entry).main
    return main(attempt, launch.settings) or 0


def stay(entry: str, device: str, control: str) -> int:
    """Run one job after another until a job fails or the runner closes the socket. Returns the exit
    status.

    The runner sends a `Launch` as JSON, in one packet. The rank answers with one byte when the job
    is done; a rank that fails sends no answer and ends.

    Args:
        entry: the module whose `main` runs a rank.
        device: the setting of the device: auto, cpu or cuda.
        control: the path of the runner's Unix socket.
    """
    runner = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    runner.connect(control)
    module = importlib.import_module(entry)
    module.preload(device)
    main = module.resident() if hasattr(module, "resident") else module.main
    own_output = os.dup(1)
    while request := runner.recv(1 << 16):
        status = run(Launch.model_validate_json(request), main)
        sys.stdout.flush()
        sys.stderr.flush()
        if status:
            return status
        # Output goes to the process's own log again, because the runner may now remove the job's
        # log.
        os.dup2(own_output, 1)
        os.dup2(own_output, 2)
        runner.send(b".")
    return 0


def main() -> int:
    # If the agent died during the imports, `os.getppid()` returns the process that adopts orphans.
    # So the agent passes its own pid in TANDEM_AGENT_PID.
    die_with_parent(int(os.environ.get("TANDEM_AGENT_PID") or os.getppid()))
    if len(sys.argv) > 2:
        return stay(*sys.argv[1:])
    return run(Launch.model_validate_json(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
