"""The one place where Tandem chooses TCP ports.

The usual way is to bind port 0, read the number, close the socket and pass the number on; any process can take the port
in between. Here the socket stays bound, without listening, until its holder closes it:

- the kernel gives a bound port to no process that asks for "any port", neither for listening nor for connecting;
- a process that asks for this very number gets EADDRINUSE, unless it sets SO_REUSEADDR: Linux then allows it while no
  socket on the port *listens*. Servers (asyncio, uvicorn, vLLM, torch's TCPStore) set it, so the program that was given
  the number binds and listens beside the holder, and from then on no other process can;
- a file lock per port keeps two Tandem processes with the same number apart. The kernel frees it when its holder dies.

The ranks' rendezvous needs none of this: torchrun's store (endpoint `localhost:0`) and the fork launcher's listen on a
port of the kernel's choice and keep it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tandem.errors import Conflict


@dataclass
class HeldPort:
    """A port that no other process gets while this object is open."""

    port: int
    _socket: socket.socket
    _lock: IO[str]

    def close(self) -> None:
        """Give the port up. Call it when the program that the port is for listens, or has ended."""
        self._socket.close()
        self._lock.close()

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reserve(preferred: int = 0, *, host: str = "127.0.0.1", name: str = "port") -> HeldPort:
    """Hold `preferred`, or a free port if it is 0, for a program that is about to listen on it.

    Raises Conflict (field `name`) when another process listens on it or holds it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        held = socket.socket(family, socket.SOCK_STREAM)
        try:
            if preferred:
                # A port in TIME_WAIT from the program's last life must not refuse its next one.
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((host, preferred))
            # After a bind to port 0, because that one has to find a port that no socket uses.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port = held.getsockname()[1]
            lock = _lock(port)
        except OSError as error:
            held.close()
            raise Conflict(
                f"can't use port {preferred} of {host}: {error.strerror}; stop the program that uses it or choose "
                "another port", field=name,
            ) from error  # fmt: skip
        if lock is not None:
            return HeldPort(port, held, lock)
        held.close()
        if preferred:
            raise Conflict(f"port {preferred} is held by another Tandem process; choose another", field=name)


def local_url(host: str, port: int) -> str:
    """The URL at which this machine reaches a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _lock(port: int) -> IO[str] | None:
    directory = Path(tempfile.gettempdir()) / f"tandem-ports-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    lock = (directory / str(port)).open("a")
    try:
        # flock, not lockf: it belongs to the open file, so it keeps two holders within one process apart too.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock
