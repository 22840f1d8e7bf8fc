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

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tandem.system.environment import omp_waiting
from tandem.system.processes import Process, die_with_parent

if TYPE_CHECKING:
    from tandem.config import Settings

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
    def from_json(cls, text: str | bytes) -> Launch:
        fields = json.loads(text)
        return cls(**fields | {"root": Path(fields["root"]), "work": Path(fields["work"])})


class Handle(Protocol):
    """The processes of one attempt."""

    def poll(self) -> int | None:
        """None while the attempt runs, then its exit status (negative: a signal). Never blocks."""

    def terminate(self) -> None:
        """Send SIGTERM to the ranks' parent, which forwards it."""

    def processes(self) -> list[Process]:
        """Every living process of this attempt."""

    def kill_all(self, timeout: float) -> list[Process]:
        """SIGKILL all of them; returns those still alive after `timeout` seconds."""


class Launcher(Protocol):
    def prepare(self) -> None:
        """Start what can be started ahead of a job. Doesn't block."""

    def launch(self, launch: Launch) -> Handle:
        """Start the ranks without waiting for them. Raises OSError when a process can't be started."""

    @property
    def holds_devices(self) -> bool:
        """Whether ranks stay on the devices between jobs."""

    def close(self) -> None:
        """End the processes that stay between jobs."""


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


def rank_environment(settings: Settings) -> dict[str, str]:
    """The variables that every launcher starts ranks with.

    The number of threads decides the order of floating-point sums, so it is fixed here instead of by each library:
    OMP_NUM_THREADS if it is set, else the machine's cores divided by the number of ranks.
    """
    environment = dict(os.environ)
    cores = len(os.sched_getaffinity(0))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // settings.trainer_ranks)))
    environment |= omp_waiting(environment)
    # Otherwise importing numpy starts OpenBLAS's threads, and the fork server must have none.
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A rank compiles few kernels, once: starting a pool of compiler processes takes longer than it saves.
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # All ranks are on this host, whose name may not resolve inside a container.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment["PYTHONUNBUFFERED"] = "1"
    if settings.trainer_devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(settings.trainer_devices)
    return environment


def make_launcher(settings: Settings, entry: str, marker: tuple[str, str]) -> Launcher:
    """The launcher that `settings.launch` names.

    `marker`: an environment variable and its value for every process that it starts, by which a later runner finds
    processes that outlived this one.
    """
    environment = rank_environment(settings) | dict([marker])
    if settings.launch == "torchrun":
        from tandem.trainer.launch.torchrun import TorchrunLauncher

        return TorchrunLauncher(environment)
    from tandem.trainer.launch.standby import StandbyLauncher

    if settings.launch == "fork":
        from tandem.trainer.launch.fork import ForkServer

        return StandbyLauncher(ForkServer, entry, environment)
    from tandem.trainer.launch.resident import ResidentRanks

    # One heap for all threads. Otherwise every job's threads leave fragments in heaps of their own, which grow.
    environment.setdefault("MALLOC_ARENA_MAX", "1")
    return StandbyLauncher(partial(ResidentRanks, settings.trainer_ranks), entry, environment)
