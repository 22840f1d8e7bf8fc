"""This machine's addresses, and whether two processes reach one another over loopback."""

import socket
from contextlib import suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"
_BOOT, _NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
# Addresses for documentation (RFC 5737, RFC 3849): on the way to every other network.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")


def network_name() -> str:
    """The name of this process's network namespace, different on every machine and after every
    boot; empty where the kernel does not tell."""
    with suppress(OSError):
        return f"{_BOOT.read_text().strip()}:{_NETWORK.stat().st_ino}"
    return ""


def same_network(name: str) -> bool:
    """Whether this process reaches over loopback the one that has this `network_name`."""
    return bool(name) and name == network_name()


def own_address(host: str, port: int = 80) -> str:
    """This machine's address on the way to `host`. Sends nothing. OSError where there is no way."""
    kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as towards:
        towards.connect(target)
        return str(towards.getsockname()[0])


def reachable_address() -> str:
    """The address by which other machines most likely reach this one: of the interface that leads
    elsewhere, else of this machine's name; loopback without any."""
    for elsewhere in _ELSEWHERE:
        with suppress(OSError):
            return own_address(elsewhere)
    with suppress(OSError):
        return own_address(socket.gethostname())
    return LOOPBACK
