"""Ranks forked from a process that has everything imported: the runner's side (the other side: `forkserver`).

The fork server is started ahead of the first job, stays between jobs, and is replaced when it died or when the code or
its environment changed. A launch never waits for it: the request lies in the socket until the imports are done.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Any

from tandem.system import processes
from tandem.system.logs import Log
from tandem.system.processes import Process
from tandem.trainer.launch import Launch
from tandem.trainer.launch.fingerprint import fingerprint

log = Log("runner")


class ForkLauncher:
    name = "fork"

    def __init__(self, environment: dict[str, str], *, entry: str) -> None:
        self._environment = environment | {
            # Ask NVML, not the CUDA runtime, whether there are devices: the runtime's state does not survive a fork.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        self._entry = entry
        self._server: _Server | None = None

    def prepare(self) -> None:
        """Start the fork server, or replace it where it died or is out of date."""
        current = fingerprint(self._entry, self._environment)
        if self._server is not None:
            if self._server.alive and self._server.fingerprint == current:
                return
            reason = "the code changed" if self._server.alive else "it died"
            log.warning("replacing the fork server", reason=reason, pid=self._server.pid)
            self._server.close()
        self._server = _Server(self._entry, self._environment, current)

    def launch(self, launch: Launch) -> ForkHandle:
        self.prepare()
        assert self._server is not None
        return ForkHandle(self._server, launch)

    def kept(self) -> list[Process]:
        return []

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class _Server:
    """The fork server process and the runner's end of its socket."""

    def __init__(self, entry: str, environment: dict[str, str], fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._launches = 0
        self._received = b""
        self._closed = False
        self._socket, theirs = socket.socketpair()
        parent = os.getpid()
        arguments = ["--socket", str(theirs.fileno()), "--entry", entry, "--parent", str(parent)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tandem.trainer.launch.forkserver", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=lambda: processes.die_with_parent(parent),  # noqa: PLW1509 (takes no lock of another thread)
            )
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None and not self._closed

    def send(self, request: dict[str, str | int]) -> int:
        """Ask for a launch; the number by which the server's answers name it."""
        self._launches += 1
        self._socket.sendall(json.dumps({"launch": request, "number": self._launches}).encode() + b"\n")
        return self._launches

    def receive(self, number: int) -> list[dict[str, Any]]:
        """What the server has said about a launch since the last call; never blocks. What it still has to say about
        an earlier one, whose processes were seen to be gone, is of no use to anyone."""
        heard: list[dict[str, Any]] = []
        while not self._closed and select.select([self._socket], [], [], 0)[0]:
            try:
                chunk = self._socket.recv(1 << 16)
            except ConnectionError:
                chunk = b""
            if not chunk:
                self._closed = True
                break
            *lines, self._received = (self._received + chunk).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "ready" in message:
                    log.info("fork server is ready", pid=self.pid, seconds=message["seconds"])
                    # NVML's, by which torch and Megatron look for devices; CUDA's own has such a name too, but where
                    # CUDA was touched no child can use it, so that would not go unnoticed.
                    others = [name for name in message["threads"] if not name.startswith("cuda")]
                    if others:
                        log.warning("the fork server has threads before it forks", threads=",".join(others))
                elif message["number"] == number:
                    heard.append(message)
        return heard

    def children(self) -> list[Process]:
        return [process for process in processes.descendants(self.pid) if not process.zombie]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()
        self._closed = True
        processes.kill_all(self.children, timeout=10)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)


class ForkHandle:
    def __init__(self, server: _Server, launch: Launch) -> None:
        self._server = server
        self._exits = launch.work / "exits.json"
        self._leader: Process | None = None
        self._code: int | None = None
        self._stop = False
        self._number = 0
        try:
            self._number = server.send(launch.request())
        except OSError:
            self._code = -signal.SIGKILL  # it died since it was looked at; `poll` tells

    def poll(self) -> int | None:
        if self._code is not None:
            return self._code
        for message in self._server.receive(self._number):
            if "started" in message:
                self._leader = processes.read(message["started"])
            if "exited" in message:
                self._code = message["exited"]
        if self._code is None and not self._server.alive:
            self._code = -signal.SIGKILL  # the server died, and with it, by their own wish, leader and ranks
        if self._code is None and self._stop and self._leader is None:
            # Asked to stop before the imports were done: there is no job yet, only the request, which goes with it.
            self._server.close()
        return self._code

    def terminate(self) -> None:
        self._stop = True
        if self.poll() is None and self._leader is not None:
            processes.send(self._leader, signal.SIGTERM)

    def processes(self) -> list[Process]:
        return self._server.children()

    def kill_all(self, timeout: float) -> list[Process]:
        left = processes.kill_all(self._server.children, timeout=timeout, known=[self._server.pid])
        if self.poll() is None and self._leader is None:
            self._server.close()
        return left

    def rank_exits(self) -> dict[int, int]:
        try:
            return {int(rank): code for rank, code in json.loads(self._exits.read_text()).items()}
        except (OSError, ValueError):
            return {}
