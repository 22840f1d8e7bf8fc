"""Network namespaces that stand for hosts: joined by one cable, neither sees the other's
loopback."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ADDRESSES = ("10.231.77.1", "10.231.77.2")
ADDRESSES_6 = ("fd77::1", "fd77::2")


@contextmanager
def two_hosts(*, six: bool = False) -> Iterator[list[str]]:
    """Their names. `six`: they have IPv6 addresses only."""
    names = [f"tandem-{os.getpid()}-{end}{6 if six else 4}" for end in "ab"]
    cables = [f"td{os.getpid() % 10**7}{end}{6 if six else 4}" for end in "ab"]
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip`, which makes network namespaces")
    made = subprocess.run(
        ["ip", "netns", "add", names[0]], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
    try:
        commands = [
            f"ip netns add {names[1]}",
            f"ip link add {cables[0]} type veth peer name {cables[1]}",
        ]
        addresses = [f"{one}/64 nodad" for one in ADDRESSES_6] if six else ADDRESSES
        for name, cable, address in zip(names, cables, addresses, strict=True):
            inside = f"ip -n {name} link set"
            commands += [
                f"ip link set {cable} netns {name}",
                f"{inside} {cable} name eth0",
                f"{inside} lo up",
                f"ip -n {name} addr add {address if six else f'{address}/24'} dev eth0",
                f"{inside} eth0 up",
            ]
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True, text=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def inside(name: str) -> list[str]:
    """The beginning of a command that runs in the namespace."""
    return ["ip", "netns", "exec", name]
