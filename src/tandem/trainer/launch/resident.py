"""Ranks that stay between jobs, under one torchrun: the runner's side (the other side: `bootstrap.stay`).

They start ahead of the first job and get their jobs over a Unix socket. After each job they free their device memory,
all but what a process can't free while it lives (its CUDA context, NCCL's buffers). When a job ends in any other way
than success, they end too, and the next job gets new ones.
"""

import select
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

from tandem.system import processes
from tandem.system.processes import Process
from tandem.trainer.launch import Launch
from tandem.trainer.launch.torchrun import Torchrun


class ResidentRanks(Torchrun):
    """torchrun's agent, its ranks, a connection to each of them, and the handle of their latest job."""

    name = "resident ranks"

    def __init__(self, count: int, entry: str, environment: dict[str, str]) -> None:
        # Local, because the volume's file system may not support sockets; short, because a socket's path is limited.
        parent = tempfile.gettempdir()
        self._directory = Path(tempfile.mkdtemp(prefix="tandem-ranks-", dir=parent if len(parent) < 70 else "/tmp"))
        path = self._directory / "socket"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(count)
        self._count = count
        self._busy: list[socket.socket] = []
        self._idle: list[socket.socket] = []
        self._launch: Launch | None = None
        self._exit: int | None = None
        super().__init__(self._directory, count, "resident", [entry, str(path)], environment)

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
        with suppress(OSError):  # the rank ended, and so will the agent
            rank.send(self._launch.to_json().encode())

    def poll(self) -> int | None:
        """0 when every rank has answered that the job is done. Any other end is the agent's."""
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
            # The agent ends with 0 when all ranks left with 0 in the middle of the job.
            self._exit = code or 1
            for name in ("launcher.log", "exits.json"):
                with suppress(OSError):
                    shutil.copyfile(self._directory / name, self._launch.work / name)
        return self._exit

    def kill_all(self, timeout: float) -> list[Process]:
        if self._exit != 0:
            return super().kill_all(timeout)
        # The ranks stay. Processes that they started for the job don't.
        agent = self._agent.pid
        return processes.kill_all(
            lambda: [process for process in self.processes() if agent not in (process.pid, process.parent)],
            timeout=timeout,
        )

    def close(self) -> None:
        super().kill_all(10)
        for connection in (*self._busy, *self._idle, self._listener):
            connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)
