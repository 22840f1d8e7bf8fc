"""Ways to start the ranks of a job (docs/architecture.md). All give the same results, bit for bit.

An attempt's work directory holds, however its ranks were started:

    launcher.log    output of the ranks' parent
    rank.<r>.log    stdout and stderr of rank r
    exits.json      exit statuses of failed ranks, see `read_exits`
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tandem.spool import fs
from tandem.spool.schema import Record
from tandem.system.plain_files import read_plain
from tandem.system.processes import die_with_parent

DEFAULT_ENTRY = "tandem.trainer.rank.worker"
"""Module whose `main(root: Path, job_id: str, attempt: int)` is a rank; its `preload()` imports
what a rank needs."""

SHUTDOWN_SECONDS = {"torchrun": 30, "fork": 10}
"""How long the other ranks may take to stop after one failed, before SIGKILL. torchrun's value is
built into torch: TORCH_ELASTIC_SHUTDOWN_TIMEOUT has no effect here."""


class Launch(Record):
    """One attempt at one job."""

    root: Path
    job: str
    attempt: int
    ranks: int
    work: Path
    entry: str = DEFAULT_ENTRY


def start_child(
    command: list[str], environment: dict[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own that the kernel kills when this process dies."""
    parent = os.getpid()
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # `die_with_parent` takes no lock of another thread.
        preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509
        **options,
    )


def write_exits(work: Path, exits: dict[int, int]) -> None:
    (work / "exits.json").write_text(json.dumps(exits))


def read_exits(work: Path) -> dict[int, int]:
    """Exit status by rank of the ranks that failed by themselves, first failure first (negative: a
    signal).

    Ranks that their parent ended after the first failure are left out. Empty when no rank failed or
    the parent was killed.
    """
    try:
        exits = json.loads(read_plain(work / "exits.json", most=fs.RECORD_BYTES))
        return {int(rank): status for rank, status in exits.items()}
    except (OSError, ValueError):
        return {}
