"""Ranks under torchrun: one agent process and its ranks, all new for each job (R2, R3).

The rendezvous endpoint is `localhost:0`: the agent's store listens on a port that the kernel chooses, and the ranks
connect to that same store. No port is closed and opened again (R11).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tandem.system import processes
from tandem.system.processes import Process
from tandem.trainer.launch import Launch, start_child


class TorchrunLauncher:
    holds_devices = False

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment

    def prepare(self) -> None:
        pass

    def launch(self, launch: Launch) -> Torchrun:
        name = f"{launch.job}-{launch.attempt}"
        return Torchrun(launch.work, launch.ranks, name, [launch.to_json()], self._environment)

    def close(self) -> None:
        pass


class Torchrun:
    """An agent and its ranks, which run `launch.bootstrap` with `arguments`. `work` gets launcher.log and exits.json.

    `name` is the rendezvous' name. The agent restarts no ranks: attempts are counted only in the spool.
    """

    def __init__(self, work: Path, ranks: int, name: str, arguments: list[str], environment: dict[str, str]) -> None:
        command = [
            sys.executable, "-m", "tandem.trainer.launch.agent", str(work),
            "--nnodes=1", f"--nproc-per-node={ranks}", "--max-restarts=0", "--monitor-interval=0.1",
            "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={name}", "--local-addr=localhost",
            "-m", "tandem.trainer.launch.bootstrap", *arguments,
        ]  # fmt: skip
        with (work / "launcher.log").open("ab") as log:
            self._agent = start_child(command, environment, stdout=log, stderr=subprocess.STDOUT)
        self.pid = self._agent.pid

    def poll(self) -> int | None:
        return self._agent.poll()

    def terminate(self) -> None:
        if self._agent.poll() is None:
            self._agent.send_signal(signal.SIGTERM)

    def processes(self) -> list[Process]:
        """All descendants of the runner: it adopts orphans and keeps no other process while it uses torchrun."""
        return [process for process in processes.descendants(os.getpid()) if not process.zombie]

    def kill_all(self, timeout: float) -> list[Process]:
        left = processes.kill_all(self.processes, timeout=timeout, known=[self.pid])
        if not left:
            self._agent.wait(timeout)
            processes.reap_orphans()  # ranks that died before the agent, which can't collect their status any more
        return left
