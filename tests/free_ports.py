"""Ports for programs that a test starts."""

import random
import socket
from contextlib import ExitStack
from pathlib import Path

from tandem.errors import Conflict
from tandem.system import ports

_marks: list[socket.socket] = []
"""Marks of the ports that this process has got. As long as this process lives, no other process of
tests gets these ports, although the programs that use them listen later."""


def free_ports(count: int) -> list[int]:
    """Unused ports below the kernel's range of ephemeral ports. An ephemeral port could be given to
    another program before the test's program listens."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            number = random.SystemRandom().randrange(10_000, first)
            with ExitStack() as refused:
                mark = refused.enter_context(socket.socket(socket.AF_UNIX))
                try:
                    mark.bind(f"\0tandem-test-port-{number}")
                    held.enter_context(ports.reserve(number))
                except (Conflict, OSError):
                    continue
                refused.pop_all()
            _marks.append(mark)
            found.append(number)
    return found
