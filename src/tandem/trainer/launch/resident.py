"""Ranks that stay between jobs, under one torchrun: the runner's side (the other side: `rank.stay`).

They are started ahead of the first job and get their jobs over a Unix socket. After each they give back their device
memory, all but what a process can't give back while it lives (a CUDA context, NCCL's buffers). Whatever ends a job in
another way than success ends them too: the next job starts with new ones, and so does one for which the code or the
settings changed.
"""

from __future__ import annotations

import contextlib
import json
import select
import shutil
import socket
import tempfile
from pathlib import Path

from tandem.system import processes
from tandem.system.logs import Log
from tandem.system.processes import Process
from tandem.trainer.launch import Launch
from tandem.trainer.launch.fingerprint import fingerprint
from tandem.trainer.launch.torchrun import TorchrunHandle, torchrun

log = Log("runner")


class ResidentLauncher:
    name = "resident"

    def __init__(self, environment: dict[str, str], *, entry: str, ranks: int) -> None:
        # One heap for all threads: each job's threads leave pieces in those that they take, which then grow for ever.
        self._environment = {"MALLOC_ARENA_MAX": "1"} | environment
        self._entry = entry
        self._count = ranks
        self._ranks: _Ranks | None = None

    def prepare(self) -> None:
        """Start the ranks, or replace them where they ended or are out of date."""
        current = fingerprint(self._entry, self._environment)
        if self._ranks is not None:
            if self._ranks.alive and self._ranks.fingerprint == current:
                return
            if self._ranks.alive:
                log.warning("replacing the resident ranks: the code changed")
            self._ranks.close()
        self._ranks = _Ranks(self._entry, self._count, self._environment, current)

    def launch(self, launch: Launch) -> ResidentHandle:
        self.prepare()
        assert self._ranks is not None
        return ResidentHandle(self._ranks, launch)

    def kept(self) -> list[Process]:
        return self._ranks.agent.processes() if self._ranks is not None and self._ranks.alive else []

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


class _Ranks:
    """torchrun's agent, its ranks, and a connection to each of them."""

    def __init__(self, entry: str, count: int, environment: dict[str, str], fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.count = count
        # On this machine, of this user alone: the volume may be none that sockets can lie on. A socket's path is short.
        parent = tempfile.gettempdir()
        self._directory = Path(tempfile.mkdtemp(prefix="tandem-ranks-", dir=parent if len(parent) < 70 else "/tmp"))
        path = self._directory / "socket"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(count)
        self._connections: list[_Connection] = []
        self._message = b""
        rank = ["-m", "tandem.trainer.launch.bootstrap", "--entry", entry, "--control", str(path)]
        self.agent = TorchrunHandle(self._directory, [*torchrun(count, "resident"), *rank], environment)
        self._closed = False

    @property
    def alive(self) -> bool:
        return not self._closed and self.agent.poll() is None

    def send(self, launch: Launch) -> None:
        """Give the ranks a job. Those that are not there yet get it as they come."""
        self._message = json.dumps(launch.request()).encode() + b"\n"
        for connection in self._connections:
            connection.send(self._message)

    def succeeded(self) -> bool:
        """Whether every rank has said that the job it was given is done. Never blocks."""
        while select.select([self._listener], [], [], 0)[0]:
            connection = _Connection(self._listener.accept()[0])
            self._connections.append(connection)
            connection.send(self._message)
        answers = [connection.answered() for connection in self._connections]
        return len(answers) == self.count and all(answers)

    def close(self) -> None:
        self._closed = True
        self.agent.kill_all(10)
        for connection in self._connections:
            connection.close()
        self._listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class _Connection:
    """The runner's end of one rank's socket."""

    def __init__(self, rank: socket.socket) -> None:
        self._socket = rank
        self._answered = True

    def send(self, message: bytes) -> None:
        self._answered = False
        with contextlib.suppress(OSError):  # the rank is gone; its agent tells
            self._socket.sendall(message)

    def answered(self) -> bool:
        if not self._answered and select.select([self._socket], [], [], 0)[0]:
            with contextlib.suppress(ConnectionError):
                self._answered = bool(self._socket.recv(1))  # nothing is its end, which its agent tells
        return self._answered

    def close(self) -> None:
        self._socket.close()


class ResidentHandle:
    def __init__(self, ranks: _Ranks, launch: Launch) -> None:
        self._ranks = ranks
        self._work = launch.work
        self._code: int | None = None
        ranks.send(launch)

    def poll(self) -> int | None:
        if self._code is None:
            if self._ranks.succeeded():
                self._code = 0
            elif (code := self._ranks.agent.poll()) is not None:
                # An agent whose ranks all ended with 0, though nobody asked them to, ended with 0 too.
                self._code = code or 1
                with contextlib.suppress(OSError):
                    shutil.copyfile(self._ranks.agent.log, self._work / "launcher.log")
        return self._code

    def terminate(self) -> None:
        self._ranks.agent.terminate()

    def processes(self) -> list[Process]:
        return self._ranks.agent.processes()

    def kill_all(self, timeout: float) -> list[Process]:
        agent = self._ranks.agent
        if self._code != 0:
            return agent.kill_all(timeout)
        # The ranks stay; what they started for the job does not.
        return processes.kill_all(
            lambda: [process for process in agent.processes() if agent.pid not in (process.pid, process.parent)],
            timeout=timeout,
        )

    def rank_exits(self) -> dict[int, int]:
        return self._ranks.agent.rank_exits()
