"""The first thing that runs in a rank, before torch is imported: die with the parent, log to the rank's own file.

    python -m tandem.trainer.launch.bootstrap --entry <module> --root <spool> --job <id> --attempt <n> --work <dir>

or, to stay and get its jobs over a socket (`launch.resident`), one after another:

    python -m tandem.trainer.launch.bootstrap --entry <module> --control <socket>
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tandem.system.processes import die_with_parent


def redirect(log: Path) -> None:
    """Send stdout and stderr, Python's and C's, to `log` (appended)."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def run(entry: str, root: Path, job: str, attempt: int) -> int:
    """Run the rank in this process; its exit status."""
    return _status(lambda: importlib.import_module(entry).main(root, job, attempt))


def stay(entry: str, control: Path) -> int:
    """Run job after job, until one fails, whose status is this process's, or until the runner closes its end.

    Protocol over the socket: the fields of a `Launch`, a line of JSON; a byte back when the job is done. A rank that
    fails says nothing and ends.
    """
    runner = socket.socket(socket.AF_UNIX)
    runner.connect(str(control))
    module = importlib.import_module(entry)
    if hasattr(module, "preload"):
        module.preload()
    main = module.resident() if hasattr(module, "resident") else module.main
    own = os.dup(1)
    with runner.makefile("rb") as requests:
        for line in requests:
            request = json.loads(line)
            redirect(Path(request["work"]) / f"rank.{os.environ['RANK']}.log")
            status = _status(partial(main, Path(request["root"]), request["job"], request["attempt"]))
            sys.stdout.flush()
            sys.stderr.flush()
            if status:
                return status
            # The job's log is whole, and may be removed.
            os.dup2(own, 1)
            os.dup2(own, 2)
            runner.sendall(b"\n")
    return 0


def _status(main: Callable[[], object]) -> int:
    try:
        result = main()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return result if isinstance(result, int) else 0


def main() -> int:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--entry", required=True)
    parser.add_argument("--control", type=Path)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--job")
    parser.add_argument("--attempt", type=int)
    parser.add_argument("--work", type=Path)
    arguments = parser.parse_args()
    if os.getppid() == 1:
        return 1  # the agent died before the call above could matter
    if arguments.control is not None:
        return stay(arguments.entry, arguments.control)
    redirect(arguments.work / f"rank.{os.environ['RANK']}.log")
    return run(arguments.entry, arguments.root, arguments.job, arguments.attempt)


if __name__ == "__main__":
    sys.exit(main())
