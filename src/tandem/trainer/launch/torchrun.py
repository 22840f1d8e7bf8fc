"""Ranks under torchrun: one agent process and its ranks (R2, R3).

The rendezvous endpoint is `localhost:0`: the agent's store listens on a port that the kernel chooses, and the ranks
connect to that same store. No port is closed and opened again (R11).
"""

import os
import subprocess
import sys
from pathlib import Path

from tandem.system import processes
from tandem.system.processes import Process
from tandem.trainer.launch import start_child


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

    def poll(self) -> int | None:
        """None while the attempt runs, then its exit status (negative: a signal). Never blocks."""
        return self._agent.poll()

    def terminate(self) -> None:
        """Send SIGTERM to the ranks' parent, which forwards it."""
        self._agent.terminate()

    def processes(self) -> list[Process]:
        """All living descendants of the runner: it adopts orphans and keeps no other process while it uses torchrun."""
        return [process for process in processes.descendants(os.getpid()) if not process.zombie]

    def kill_all(self, timeout: float) -> list[Process]:
        """SIGKILL all of them; returns those still alive after `timeout` seconds."""
        left = processes.kill_all(self.processes, timeout=timeout, known=[self._agent.pid])
        if not left:
            self._agent.wait(timeout)
            processes.reap_orphans()  # ranks that died before the agent, which can't collect their status any more
        return left
