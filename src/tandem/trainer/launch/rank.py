"""The first thing that runs in a rank, before torch is imported: die with the parent, log to the rank's own file.

python -m tandem.trainer.launch.rank --entry <module> --root <spool> --job <id> --attempt <n> --work <dir>
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from pathlib import Path

from tandem.processes import die_with_parent


def redirect(log: Path) -> None:
    """Send stdout and stderr, Python's and C's, to `log` (appended)."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def run(entry: str, root: Path, job: str, attempt: int) -> int:
    """Run the rank in this process; its exit status."""
    try:
        result = importlib.import_module(entry).main(root, job, attempt)
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
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--work", type=Path, required=True)
    arguments = parser.parse_args()
    if os.getppid() == 1:
        return 1  # the agent died before the call above could matter
    redirect(arguments.work / f"rank.{os.environ['RANK']}.log")
    return run(arguments.entry, arguments.root, arguments.job, arguments.attempt)


if __name__ == "__main__":
    sys.exit(main())
