"""Ranks forked from a process that has everything imported: the runner's side (the other side: `forkserver`)."""

import json
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Self

from tandem.system import processes
from tandem.system.logs import Log
from tandem.system.processes import Process
from tandem.trainer.launch import Launch, start_child

log = Log("runner")


class ForkServer:
    """The fork server, and the handle of its latest launch. For what a handle's methods do see `Torchrun`.

    A launch never waits for the server's imports: the request stays in the socket until they are done.
    """

    name = "fork server"

    def __init__(self, entry: str, environment: dict[str, str]) -> None:
        # torch then asks NVML whether there are devices, not the CUDA runtime, whose state does not survive a fork.
        environment = environment | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tandem.trainer.launch.forkserver", str(theirs.fileno()), entry]
            self._process = start_child(command, environment, pass_fds=[theirs.fileno()])
        self.pid = self._process.pid
        self._work = ""
        self._exit: int | None = None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None and self._socket.fileno() >= 0

    def launch(self, launch: Launch) -> Self:
        self._work, self._exit = str(launch.work), None
        with suppress(OSError):  # the server has just died, which `poll` notices
            self._socket.send(launch.to_json().encode())
        return self

    def poll(self) -> int | None:
        while self._socket.fileno() >= 0 and select.select([self._socket], [], [], 0)[0]:
            packet = b""
            with suppress(ConnectionError):
                packet = self._socket.recv(1 << 16)
            if not packet:
                self._socket.close()
                break
            message = json.loads(packet)
            if ready := message.get("ready"):
                (log.warning if ready["threads"] else log.info)("fork server is ready", pid=self.pid, **ready)
            elif message["work"] == self._work:  # otherwise it is about an earlier launch, which was killed
                self._exit = message["exited"]
        if self._exit is None and not self.alive:
            self._exit = -signal.SIGKILL  # leader and ranks die with the server
        return self._exit

    def terminate(self) -> None:
        leaders = [process for process in self.processes() if process.parent == self.pid]
        for leader in leaders:
            processes.send(leader, signal.SIGTERM)
        if not leaders and self.poll() is None:
            self.close()  # during its imports: the job has no process yet, and its request goes with the server

    def processes(self) -> list[Process]:
        return [process for process in processes.descendants(self.pid) if not process.zombie]

    def kill_all(self, timeout: float) -> list[Process]:
        return processes.kill_all(self.processes, timeout=timeout, known=[self.pid])

    def close(self) -> None:
        self._socket.close()
        self.kill_all(10)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
