"""Starts ranks under torchrun: new processes for each job, or ranks that stay between jobs.

With `--standalone`, the agent's store listens on a port that the kernel chooses, and the ranks
connect to this store. So no process has to reserve a port and then release the port for another
process.
"""

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

from tandem.system import processes
from tandem.system.processes import Process
from tandem.trainer.launch import EXITS, LAUNCHER_LOG, Launch, start_child


class Torchrun:
    """An agent of torchrun and the agent's ranks, which run `launch.bootstrap`. The agent never
    restarts ranks, because attempts are counted only in the spool.

    Args:
        directory: the directory to which LAUNCHER_LOG and EXITS are written.
        ranks: the number of ranks.
        arguments: the arguments of `launch.bootstrap`.
        environment: all environment variables of the agent and the ranks.
    """

    def __init__(
        self, directory: Path, ranks: int, arguments: list[str], environment: dict[str, str]
    ) -> None:
        command = [
            sys.executable,
            "-m",
            "tandem.trainer.launch.torchrun_agent",
            str(directory),
            "--standalone",
            "--nnodes=1",
            f"--nproc-per-node={ranks}",
            "--max-restarts=0",
            "--monitor-interval=0.1",
            "--local-addr=localhost",
            "-m",
            "tandem.trainer.launch.bootstrap",
            *arguments,
        ]
        with (directory / LAUNCHER_LOG).open("ab") as log:
            self._agent = start_child(command, environment, stdout=log, stderr=subprocess.STDOUT)

    def poll(self) -> int | None:
        """The attempt's exit status (-N: ended by signal N); None while the attempt runs. Never
        blocks."""
        return self._agent.poll()

    def terminate(self) -> None:
        """Send SIGTERM to the ranks' parent, which forwards it to the ranks."""
        self._agent.terminate()

    def processes(self) -> list[Process]:
        """All living descendants of the runner. The runner adopts orphans. While the runner uses
        torchrun, all of its child processes belong to torchrun."""
        return [process for process in processes.descendants(os.getpid()) if not process.zombie]

    def kill_all(self, timeout: float) -> list[Process]:
        """Send SIGKILL to all processes that `processes` returns. Returns the processes that are
        still alive after `timeout` seconds."""
        left = processes.kill_all(self.processes, timeout=timeout, known=[self._agent.pid])
        if not left:
            self._agent.wait(timeout)
            # Reaps ranks that ended before the agent, because the agent can no longer collect their
            # status.
            processes.reap_orphans()
        return left


class ResidentRanks(Torchrun):
    """Ranks that start before the first job and receive their jobs over a Unix socket
    (`bootstrap.stay` is the ranks' side).

    After each job the ranks release their device memory, except the CUDA context and NCCL's
    buffers, which a living process can't release. If a job does not succeed, the ranks end too, and
    the next job gets new ranks.

    Args:
        count: the number of ranks.
        entry: the module whose `main` runs a rank.
        device: the setting of the device: "auto", "cpu" or "cuda".
        environment: all environment variables of the agent and the ranks; TMPDIR must be among
            them.
    """

    name = "resident ranks"

    def __init__(self, count: int, entry: str, device: str, environment: dict[str, str]) -> None:
        # The socket's directory is on this host, because the volume's file system may not support
        # sockets. The directory's name is short, because the length of a socket's path is limited.
        self._directory = Path(tempfile.mkdtemp(prefix="resident-", dir=environment["TMPDIR"]))
        path = self._directory / "socket"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(count)
        self._count = count
        self._busy: list[socket.socket] = []
        self._idle: list[socket.socket] = []
        self._launch: Launch | None = None
        self._exit: int | None = None
        super().__init__(self._directory, count, [entry, device, str(path)], environment)

    @property
    def alive(self) -> bool:
        return self._agent.poll() is None

    def launch(self, launch: Launch) -> Self:
        self._launch, self._exit = launch, None
        idle, self._idle = self._idle, []
        for rank in idle:
            self._send_job(rank)
        return self

    def _send_job(self, rank: socket.socket) -> None:
        assert self._launch is not None
        self._busy.append(rank)
        with suppress(OSError):  # the rank has ended, so the agent will end too
            rank.send(self._launch.model_dump_json().encode())

    def poll(self) -> int | None:
        """Returns None while the ranks work, and 0 after every rank has answered that the job is
        done. Any other result is the exit status of torchrun's agent, or 1 if the agent exited
        with 0."""
        if self._exit is not None or self._launch is None:
            return self._exit
        while readable := select.select([self._listener, *self._busy], [], [], 0)[0]:
            for ready in readable:
                if ready is self._listener:
                    self._send_job(self._listener.accept()[0])
                    continue
                self._busy.remove(ready)
                with suppress(ConnectionError):
                    if ready.recv(1):
                        self._idle.append(ready)
        if len(self._idle) == self._count:
            self._exit = 0
        elif (code := self._agent.poll()) is not None:
            # The agent exits with 0 even if all ranks exited with 0 in the middle of the job.
            self._exit = code or 1
            for name in (LAUNCHER_LOG, EXITS):
                with suppress(OSError):
                    shutil.copyfile(self._directory / name, self._launch.work / name)
        return self._exit

    def kill_all(self, timeout: float) -> list[Process]:
        if self._exit != 0:
            return super().kill_all(timeout)
        # Resident ranks stay alive. Only the processes that ranks started for the job are killed.
        agent = self._agent.pid
        return processes.kill_all(
            lambda: [
                process
                for process in self.processes()
                if agent not in (process.pid, process.parent)
            ],
            timeout=timeout,
        )

    def close(self) -> None:
        super().kill_all(10)
        for connection in (*self._busy, *self._idle, self._listener):
            connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)
