"""Ports for programs that a test starts."""

import random
from contextlib import ExitStack
from pathlib import Path

from tandem.errors import Conflict
from tandem.system import ports


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses, below those that the kernel gives to whoever asks for any: such a one can be taken
    before the test's program listens."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            try:
                port = held.enter_context(ports.reserve(random.SystemRandom().randrange(10_000, first)))
            except Conflict:
                continue
            found.append(port.port)
    return found
