"""Ways to start the ranks of a job. Each runs the same code in the ranks and gives the same results, bit for bit.

`torchrun`  torch's own launcher with new processes for each job;
`fork`      processes forked from one that has imported torch and Megatron and has never touched CUDA;
`resident`  ranks under torchrun that stay between jobs and give back what device memory a process can.

With the first two, every process of a job exits and nothing of it stays on the device.

An attempt's work directory holds, however its ranks were started:

    launcher.log    output of the ranks' parent
    rank.<r>.log    stdout and stderr of rank r
    exits.json      exit statuses of failed ranks, see `read_exits`
"""

import json
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from tandem.system.processes import die_with_parent

DEFAULT_ENTRY = "tandem.trainer.rank.worker"
"""Module whose `main(root: Path, job_id: str, attempt: int)` is a rank; its `preload()` imports what a rank needs."""

SHUTDOWN_SECONDS = {"torchrun": 30, "fork": 10}
"""How long the other ranks may take to stop after one failed, before SIGKILL. torchrun's value is built into torch:
TORCH_ELASTIC_SHUTDOWN_TIMEOUT has no effect here."""


@dataclass(frozen=True)
class Launch:
    """One attempt at one job."""

    root: Path
    job: str
    attempt: int
    ranks: int
    work: Path
    entry: str = DEFAULT_ENTRY

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        fields = json.loads(text)
        return cls(**fields | {"root": Path(fields["root"]), "work": Path(fields["work"])})


def start_child(command: list[str], environment: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own that the kernel kills when this process dies."""
    parent = os.getpid()
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 (takes no lock of another thread)
        **options,
    )  # fmt: skip


def write_exits(work: Path, exits: dict[int, int]) -> None:
    (work / "exits.json").write_text(json.dumps(exits))


def read_exits(work: Path) -> dict[int, int]:
    """Exit status by rank of the ranks that failed by themselves, first failure first (negative: a signal).

    Ranks that their parent ended after the first failure are left out. Empty when no rank failed or the parent was
    killed.
    """
    try:
        return {int(rank): status for rank, status in json.loads((work / "exits.json").read_text()).items()}
    except (OSError, ValueError):
        return {}
