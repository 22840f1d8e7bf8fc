"""The only module that chooses TCP ports.

A port that is only looked up can be taken before its program listens. Here a socket stays bound to
it, without listening, until its holder closes it:

- the kernel gives a bound port to no process that asks for "any port";
- a process that asks for this very number gets EADDRINUSE, unless it sets SO_REUSEADDR: Linux then
  allows it while no socket on the port *listens*. Servers (asyncio, uvicorn, vLLM, torch's
  TCPStore) set it, so the program that was given the number listens beside the holder, and from
  then on no other process can;
- an abstract Unix socket of the network namespace, with the number in its name, keeps two Tandem
  processes apart."""

import socket
from contextlib import ExitStack

from tandem.errors import Conflict


class HeldPort(ExitStack):
    """A port that no other process gets until `close`. Close it when its program listens, or has
    ended."""

    port = 0


def reserve(preferred: int = 0, *, host: str = "127.0.0.1", name: str = "port") -> HeldPort:
    """Holds `preferred`, or a free port if it is 0, for a program that is about to listen on it.
    Raises Conflict (field `name`) when another process listens on it or holds it."""
    while True:
        held = HeldPort()
        tcp = held.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
        mark = held.enter_context(socket.socket(socket.AF_UNIX))
        try:
            if preferred:
                # A port in TIME_WAIT from the program's last life must not refuse its next one.
                tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tcp.bind((host, preferred))
            # After a bind to port 0, because that one has to find a port that no socket uses.
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
