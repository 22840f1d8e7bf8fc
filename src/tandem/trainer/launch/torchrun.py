"""Bare torchrun: `python -m torch.distributed.run`, one agent process and its ranks, all new for each job (R2, R3).

The rendezvous endpoint is `localhost:0`: the agent's store listens on a port of the kernel's choice, tells the ranks
its number, and they connect to that same store, so no port is ever closed and opened again (R11).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tandem.system import processes
from tandem.system.processes import Process
from tandem.trainer.launch import Launch

_MARKER = "TANDEM_ATTEMPT"


class TorchrunLauncher:
    name = "torchrun"

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment

    def prepare(self) -> None:
        pass

    def launch(self, launch: Launch) -> TorchrunHandle:
        return TorchrunHandle(launch.work, command(launch), self._environment)

    def kept(self) -> list[Process]:
        return []

    def close(self) -> None:
        pass


class TorchrunHandle:
    """torchrun's agent and its ranks; the agent prints to `work`/launcher.log."""

    def __init__(self, work: Path, command: list[str], environment: dict[str, str]) -> None:
        self.log = work / "launcher.log"
        # Unique over runners and attempts: the ranks sit in sessions of their own, but all inherit this.
        self._mark = f"{work}:{os.getpid()}:{time.monotonic_ns()}"
        parent = os.getpid()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=environment | {_MARKER: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: processes.die_with_parent(parent),  # noqa: PLW1509 (takes no lock of another thread)
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def terminate(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def processes(self) -> list[Process]:
        found = {process.pid: process for process in processes.marked(_MARKER, self._mark)}
        for process in processes.descendants(self._process.pid):
            found.setdefault(process.pid, process)
        return [process for process in found.values() if not process.zombie]

    def kill_all(self, timeout: float) -> list[Process]:
        left = processes.kill_all(self.processes, timeout=timeout, known=[self._process.pid])
        if not left:
            self._process.wait(timeout)
            processes.reap_orphans()  # ranks that died before their agent did, and were its to wait for
        return left

    def rank_exits(self) -> dict[int, int]:
        return rank_exits(self.log)


def command(launch: Launch) -> list[str]:
    """The whole command line of one attempt."""
    return [
        *torchrun(launch.ranks, f"{launch.job}-{launch.attempt}"), "-m", "tandem.trainer.launch.bootstrap",
        "--entry", launch.entry, "--root", str(launch.root), "--job", launch.job, "--attempt", str(launch.attempt),
        "--work", str(launch.work),
    ]  # fmt: skip


def torchrun(ranks: int, name: str) -> list[str]:
    """torchrun for `ranks` ranks, up to what it should run. The agent doesn't restart ranks: attempts are counted in
    one place, the spool."""
    return [
        sys.executable, "-m", "torch.distributed.run",
        "--nnodes=1", f"--nproc-per-node={ranks}", "--max-restarts=0", "--monitor-interval=0.1",
        "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={name}", "--local-addr=localhost",
    ]  # fmt: skip


_FAILURE = re.compile(r"^\s*rank\s*:\s*(\d+)\b.*?^\s*exitcode\s*:\s*(-?\d+)\s*\(pid:\s*(\d+)\)", re.M | re.S)
_ENDED_BY_AGENT = re.compile(r"Sending process (\d+) closing signal")


def rank_exits(log: Path) -> dict[int, int]:
    """Exit status of the ranks that failed by themselves, from the agent's report, the first failure first.

    torchrun tells its caller only 1; which rank failed and how stands in the table it prints. Ranks that the agent
    ended after the first failure stand there too, and are left out here.
    """
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return {}
    ended = set(_ENDED_BY_AGENT.findall(text))
    others, _, first = text.rpartition("Root Cause (first observed failure)")
    exits: dict[int, int] = {}
    for rank, code, pid in _FAILURE.findall(first) + _FAILURE.findall(others):
        if pid not in ended:
            exits.setdefault(int(rank), int(code))
    return exits
