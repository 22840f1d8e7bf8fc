"""Ways to start the ranks of one job. The ranks' code is the same, and so are its results, bit for bit.

`torchrun`  bare `python -m torch.distributed.run`, fresh processes per job;
`fork`      processes forked from one that has torch and Megatron imported and has never touched CUDA;
`resident`  torchrun's processes, which stay, offloaded, and take the next job.

After the first two every process of a job has exited, and the device has nothing of it left.

What an attempt leaves in its work directory, whichever way it was started:

    launcher.log    what the parent of the ranks printed
    rank.<r>.log    what rank r printed, stdout and stderr
    exits.json      what `Handle.rank_exits` returns (fork; with torchrun it is read from launcher.log)
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from tandem.config import Settings
from tandem.system.environment import omp_waiting
from tandem.system.processes import Process

DEFAULT_ENTRY = "tandem.trainer.rank.worker"
"""Module whose `main(root: Path, job_id: str, attempt: int)` is a rank; `preload()` imports what a rank needs."""

SHUTDOWN_SECONDS = {"torchrun": 30, "fork": 10}
"""How long ranks that are left after one of them failed may take to stop before they are killed. torchrun's is its
agent's own and can't be set (TORCH_ELASTIC_SHUTDOWN_TIMEOUT is not used on this path)."""


@dataclass(frozen=True)
class Launch:
    """One attempt at one job."""

    root: Path
    job: str
    attempt: int
    ranks: int
    work: Path
    entry: str = DEFAULT_ENTRY

    def request(self) -> dict[str, str | int]:
        """The fields, as JSON has them."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}


class Handle(Protocol):
    """The processes of one attempt."""

    def poll(self) -> int | None:
        """None while the job's top process runs; then its exit status, negative for a signal. Never blocks."""

    def terminate(self) -> None:
        """Ask the ranks to stop (SIGTERM to the top process, which hands it on)."""

    def processes(self) -> list[Process]:
        """Every living process of this attempt."""

    def kill_all(self, timeout: float) -> list[Process]:
        """SIGKILL all of them; returns those that still live after `timeout` seconds."""

    def rank_exits(self) -> dict[int, int]:
        """Exit status of the ranks that failed by themselves (the others were ended after them), first failure first.
        Call it after the end."""


class Launcher(Protocol):
    name: str

    def prepare(self) -> None:
        """Do ahead of a job what can be done ahead of it. Doesn't block."""

    def launch(self, launch: Launch) -> Handle:
        """Start the ranks. Doesn't wait for them; raises OSError when a process can't be started."""

    def kept(self) -> list[Process]:
        """The ranks that stay between jobs; none where they exit."""

    def close(self) -> None:
        """End whatever the launcher itself keeps."""


def rank_environment(settings: Settings) -> dict[str, str]:
    """The environment ranks are started with, the same for every way to start them.

    The number of threads decides the order of floating-point sums, so it is fixed here and not left to each library:
    OMP_NUM_THREADS if it is set, else the machine's cores shared out among the ranks.
    """
    environment = dict(os.environ)
    cores = len(os.sched_getaffinity(0))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // settings.trainer_ranks)))
    environment |= omp_waiting(environment)
    # numpy's own pool; with it, importing numpy starts threads, which must not be before a fork.
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A rank compiles a handful of kernels, once: a pool of compiler processes costs more to start than it saves.
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # All ranks are on this host, whose name may not resolve inside a container.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment["PYTHONUNBUFFERED"] = "1"
    if settings.trainer_devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(settings.trainer_devices)
    return environment


def make_launcher(settings: Settings, *, entry: str = DEFAULT_ENTRY, marker: tuple[str, str]) -> Launcher:
    """The launcher `settings.launch` names. `marker`: (variable, value) put into the environment of every process it
    starts, by which a later runner finds what this one left."""
    environment = rank_environment(settings) | dict([marker])
    if settings.launch == "fork":
        from tandem.trainer.launch.fork import ForkLauncher

        return ForkLauncher(environment, entry=entry)
    if settings.launch == "resident":
        from tandem.trainer.launch.resident import ResidentLauncher

        return ResidentLauncher(environment, entry=entry, ranks=settings.trainer_ranks)
    from tandem.trainer.launch.torchrun import TorchrunLauncher

    return TorchrunLauncher(environment)
