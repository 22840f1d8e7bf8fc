"""Network namespaces that stand for hosts. A cable or a router joins two hosts. The router can be
slow, drop packets without a message, or have a small MTU. A namespace does not see the loopback
addresses of another namespace."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ADDRESSES = ("10.231.77.1", "10.231.77.2")
ADDRESSES_6 = ("fd77::1", "fd77::2")


@contextmanager
def two_hosts(*, six: bool = False) -> Iterator[list[str]]:
    """Two namespaces that one cable joins. Yields their names. `six`: the namespaces have IPv6
    addresses only."""
    names = [f"tandem-{os.getpid()}-{end}{6 if six else 4}" for end in "ab"]
    cables = [f"td{os.getpid() % 10**7}{end}{6 if six else 4}" for end in "ab"]
    with _namespaces(names):
        commands = [f"ip link add {cables[0]} type veth peer name {cables[1]}"]
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
            done(command)
        yield names


@contextmanager
def _namespaces(names: list[str]) -> Iterator[None]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip`, which makes network namespaces")
    made = subprocess.run(
        ["ip", "netns", "add", names[0]], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
    try:
        for name in names[1:]:
            done(f"ip netns add {name}")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def done(command: str) -> str:
    """Runs a command. Returns its output."""
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Routed:
    """Two hosts, and the namespace of the router between them. The router's interfaces are `port0`
    and `port1`. Each method that is a context manager changes the network until its context
    ends."""

    hosts: list[str]
    router: str

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Unplugs host 1's cable. The other end of a connection gets no message about the cut."""
        done(f"ip -n {self.hosts[1]} link set eth0 down")
        try:
            yield
        finally:
            done(f"ip -n {self.hosts[1]} link set eth0 up")
            done(f"ip -n {self.hosts[1]} route add default via {_GATEWAYS[1]}")

    @contextmanager
    def silence(self, *rules: str, chain: str = "forward") -> Iterator[None]:
        """The router drops the packets that match the nft `rules`, and sends no message about the
        drop."""
        if shutil.which("nft") is None:
            pytest.skip("there is no `nft`, which drops packets")
        nft = f"ip netns exec {self.router} nft"
        done(f"{nft} add table inet silence")
        try:
            where = f"{{ type filter hook {chain} priority 0 ; }}"
            done(f"{nft} add chain inet silence {chain} {where}")
            for rule in rules:
                done(f"{nft} add rule inet silence {chain} {rule} counter drop")
            yield
        finally:
            done(f"{nft} delete table inet silence")

    @contextmanager
    def slow(self, rate: str) -> Iterator[None]:
        """Limits both directions of the router to `rate`, in the notation of `tc`."""
        for port in range(2):
            bucket = f"tbf rate {rate} burst 16kb latency 400ms"
            done(f"tc -n {self.router} qdisc add dev port{port} root {bucket}")
        try:
            yield
        finally:
            for port in range(2):
                done(f"tc -n {self.router} qdisc delete dev port{port} root")

    @contextmanager
    def far(self, seconds: float) -> Iterator[None]:
        """Each packet takes `seconds` longer, in both directions."""
        links = [json.loads(done(f"ip -n {name} -j link show eth0"))[0] for name in self.hosts]
        words = [str(seconds), "port0", "port1", *(link["address"] for link in links)]
        script = str(Path(__file__).with_name("frame_relay.py"))
        command = [*inside(self.router), sys.executable, script, *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as relay:
            assert relay.stdout is not None
            assert relay.stdout.readline() == "relays\n"
            self._forward(False)
            try:
                yield
                assert relay.poll() is None
            finally:
                self._forward(True)
                relay.kill()

    @contextmanager
    def narrow(self, mtu: int) -> Iterator[None]:
        """The router drops packets of more than `mtu` bytes, and also the ICMP messages that would
        report the drops."""
        with self.silence("ip protocol icmp icmp type destination-unreachable", chain="output"):
            self._mtu(mtu)
            try:
                yield
            finally:
                self._mtu(1500)

    def _mtu(self, mtu: int) -> None:
        """Sets the MTU on the router's routes. The router's ports keep their MTU, because a port
        with a small MTU would report refused packets to the sender."""
        for port, address in enumerate(ROUTED):
            network = f"{address.rpartition('.')[0]}.0/24"
            done(f"ip -n {self.router} route replace {network} dev port{port} mtu {mtu}")

    def _forward(self, on: bool) -> None:
        done(f"ip netns exec {self.router} sysctl -qw net.ipv4.ip_forward={int(on)}")

    def counted(self) -> int:
        """The number of packets that `silence` has dropped until now."""
        text = done(f"ip netns exec {self.router} nft -j list table inet silence")
        rules: list[Any] = [one["rule"] for one in json.loads(text)["nftables"] if "rule" in one]
        return sum(part.get("counter", {}).get("packets", 0) for r in rules for part in r["expr"])


ROUTED = ("10.231.77.1", "10.231.78.1")
"""Addresses of the two hosts of a `Routed`."""
_GATEWAYS = ("10.231.77.254", "10.231.78.254")


@contextmanager
def routed_hosts() -> Iterator[Routed]:
    names = [f"tandem-{os.getpid()}-r{end}" for end in "abm"]
    *hosts, router = names
    with _namespaces(names):
        done(f"ip -n {router} link set lo up")
        for host, (name, address, gateway) in enumerate(zip(hosts, ROUTED, _GATEWAYS, strict=True)):
            cables = [f"tr{os.getpid() % 10**7}{end}{host}" for end in "hp"]
            for command in (
                f"ip link add {cables[0]} type veth peer name {cables[1]}",
                f"ip link set {cables[0]} netns {name}",
                f"ip link set {cables[1]} netns {router}",
                f"ip -n {name} link set {cables[0]} name eth0",
                f"ip -n {router} link set {cables[1]} name port{host}",
                f"ip -n {name} link set lo up",
                f"ip -n {name} addr add {address}/24 dev eth0",
                f"ip -n {router} addr add {gateway}/24 dev port{host}",
                f"ip -n {name} link set eth0 up",
                f"ip -n {router} link set port{host} up",
                f"ip -n {name} route add default via {gateway}",
                f"ip netns exec {name} sysctl -qw net.ipv4.tcp_mtu_probing=0",
            ):
                done(command)
        routed = Routed(hosts, router)
        routed._forward(True)
        yield routed


def within[T](name: str, action: Callable[[], T]) -> T:
    """The result of `action`, run in the namespace. Sockets that `action` opens stay in the
    namespace."""

    def run() -> T:
        with Path("/run/netns", name).open() as namespace:
            os.setns(namespace.fileno(), os.CLONE_NEWNET)
        return action()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def inside(name: str) -> list[str]:
    """The beginning of a command that runs in the namespace."""
    return ["ip", "netns", "exec", name]
