"""The one place where Tandem chooses TCP ports (R11).

The usual way, bind port 0, read the number, close, hand the number on, lets anybody take the port in between. Here
the socket stays bound, without listening, until the holder closes it:

- the kernel gives a bound port to nobody else who asks for "any port", neither for listening nor for connecting;
- who asks for this very number gets EADDRINUSE, unless with SO_REUSEADDR: Linux then allows it while no socket on it
  *listens*. Servers (asyncio, uvicorn, vLLM, torch's TCPStore) set it, so the program that was given the number binds
  and listens beside the holder, and from then on nobody can;
- two Tandem processes that were told the same number are kept apart by a file lock per port, which the kernel frees
  when the holder dies.

A program that can take a bound socket should rather be given the socket (`HeldPort.socket`, `pass_fds`). Rendezvous
of the ranks needs none of this: torchrun's store (endpoint `localhost:0`) and the fork launcher's listen on a port of
the kernel's choice and are never closed in between.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tandem.errors import Conflict


@dataclass
class HeldPort:
    """A port nobody else gets while this object is open."""

    host: str
    port: int
    socket: socket.socket = field(repr=False)
    _lock: int = field(repr=False)

    def close(self) -> None:
        """Give the port up; call it when the program it is for listens, or has ended."""
        self.socket.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def reserve(preferred: int = 0, *, host: str = "127.0.0.1", name: str = "port") -> HeldPort:
    """Hold `preferred`, or a free port if it is 0, for a program that is about to listen on it.

    Raises Conflict (field `name`) when somebody listens on it or holds it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        held = socket.socket(family, socket.SOCK_STREAM)
        try:
            if preferred:
                # A port in TIME_WAIT from the program's last life must not refuse its next one.
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((host, preferred))
            # After a bind to port 0, which looked for a port that is wholly free.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port = held.getsockname()[1]
            lock = _lock(port)
        except OSError as error:
            held.close()
            raise Conflict(
                f"can't use port {preferred} of {host}: {error.strerror}; stop who uses it or choose another",
                field=name,
            ) from error
        if lock is not None:
            return HeldPort(host=host, port=port, socket=held, _lock=lock)
        held.close()
        if preferred:
            raise Conflict(f"port {preferred} is held by another Tandem process; choose another", field=name)


def loopback(host: str) -> str:
    """How a server that listens on `host` is reached from this machine, as it stands in a URL."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _lock(port: int) -> int | None:
    directory = Path(tempfile.gettempdir()) / f"tandem-ports-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(directory / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # flock, not lockf: it belongs to the open file, so that two holders within one process exclude each other too.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
