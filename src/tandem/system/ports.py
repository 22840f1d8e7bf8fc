"""The only module that chooses TCP ports.

Another process can take a free port before the program listens on the port. A socket of this module
therefore stays bound to the port, without listening, until the holder closes the socket:

- if a process asks for "any port", the kernel does not give it a bound port;
- a process that binds this port number without SO_REUSEADDR gets EADDRINUSE. With SO_REUSEADDR,
  Linux allows the bind while no socket *listens* on the port. Servers (asyncio, uvicorn, vLLM,
  torch's TCPStore) set SO_REUSEADDR. So the program for which the port is held can listen on the
  port. Once the program listens, no other process can listen on the port;
- an abstract Unix socket, whose name contains the port's number, prevents two Tandem processes in
  the same network namespace from holding the same port."""

import socket
from contextlib import ExitStack

from tandem.errors import Conflict


class HeldPort(ExitStack):
    """A port that no other process can get until `close`. Close a `HeldPort` once its program
    listens or has ended."""

    port = 0


def reserve(preferred: int = 0, *, host: str = "127.0.0.1", name: str = "port") -> HeldPort:
    """Holds a port for a program that will listen on it. Raises Conflict if another process listens
    on the port or holds it.

    Args:
        preferred: the port; 0: a free port.
        host: the address to bind.
        name: the `field` of the error Conflict.
    """
    while True:
        held = HeldPort()
        tcp = held.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
        mark = held.enter_context(socket.socket(socket.AF_UNIX))
        try:
            if preferred:
                # A port in TIME_WAIT from an earlier run of the program must not prevent the next
                # bind.
                tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tcp.bind((host, preferred))
            # For port 0, SO_REUSEADDR is set after the bind, because the bind must find a port that
            # no socket uses.
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.port = tcp.getsockname()[1]
            mark.bind(f"\0tandem-port-{held.port}")
            return held
        except OSError as error:
            held.close()
            if preferred or not held.port:
                user = "another Tandem process" if held.port else "another program"
                message = (
                    f"{user} uses port {preferred} of {host} ({error.strerror}); stop it or choose"
                    " another port"
                )
                raise Conflict(message, field=name) from error


def local_url(host: str, port: int) -> str:
    """The URL at which this machine reaches a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
