"""Finds this machine's addresses. Finds the addresses of other machines to which TCP data is lost.
Checks whether two processes can reach one another over loopback."""

import array
import fcntl
import ipaddress
import os
import socket
import struct
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from tandem.errors import InvalidInput

LOOPBACK = "127.0.0.1"
_BOOT, _NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
# Addresses that are reserved for examples in documentation (RFC 5737, RFC 3849). No host has such
# an address, so a packet to it would take the default route, which leads to all other networks.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")


def network_name() -> str:
    """The name of this process's network namespace, which differs between machines and between
    boots; empty if the kernel does not provide it."""
    with suppress(OSError):
        return f"{_BOOT.read_text().strip()}:{_NETWORK.stat().st_ino}"
    return ""


def same_network(name: str) -> bool:
    """Whether this process can reach the process with this `network_name` over loopback."""
    return bool(name) and name == network_name()


def own_address(host: str, port: int = 80) -> str:
    """This machine's own address on the route to `host`. No packet is sent. Raises OSError if there
    is no route."""
    kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as towards:
        towards.connect(target)
        return str(towards.getsockname()[0])


def reachable_address() -> str:
    """The address by which other machines most likely reach this machine: the address of the
    interface that leads to other networks. If no interface leads to other networks, the address of
    this machine's host name is returned. If the host name has no address, loopback is returned."""
    for elsewhere in _ELSEWHERE:
        with suppress(OSError):
            return own_address(elsewhere)
    with suppress(OSError):
        return own_address(socket.gethostname())
    return LOOPBACK


def interface_addresses() -> list[tuple[str, str]]:
    """All addresses in this network namespace, as (interface, address), without link-local IPv6
    addresses."""
    buffer = array.array("B", bytes(40 * 256))  # struct ifreq of 64-bit Linux
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])  # struct ifconf
        length = struct.unpack("iP", fcntl.ioctl(any_socket.fileno(), 0x8912, request))[0]
    entries = [bytes(buffer[at : at + 40]) for at in range(0, length, 40)]
    found = [
        (entry[:16].rstrip(b"\0").decode().partition(":")[0], socket.inet_ntoa(entry[20:24]))
        for entry in entries
    ]
    with suppress(OSError):  # the kernel has no IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != "20":
                found.append((name, str(ipaddress.ip_address(bytes.fromhex(digits)))))
    return found


def host_address(chosen: str | None) -> tuple[str, str]:
    """The address by which other hosts reach this host, and the address's interface. The address is
    `chosen` if `chosen` is not None. If `chosen` is None, the address of the interface that leads
    to other networks is returned. If no interface leads to other networks, the first address that
    is not loopback is returned. The function looks up no host name. Raises InvalidInput if `chosen`
    is not an address of this host. Also raises InvalidInput if `chosen` is None and the host has
    only loopback addresses."""
    known = interface_addresses()
    names = ", ".join(f"{address} ({interface})" for interface, address in known)
    if chosen is None:
        outside = [one for one in known if not ipaddress.ip_address(one[1]).is_loopback]
        for elsewhere in _ELSEWHERE:
            with suppress(OSError):
                way = own_address(elsewhere)
                outside.sort(key=lambda one: one[1] != way)
                break
        if outside:
            return outside[0][1], outside[0][0]
        problem = f"this host has no address that others reach, only {names}; name one"
        raise InvalidInput(problem, field="TANDEM_HOST_ADDRESS")
    for interface, address in known:
        with suppress(ValueError):
            if ipaddress.ip_address(address) == ipaddress.ip_address(chosen):
                return address, interface
    raise InvalidInput(
        f"{chosen} is not an address of this host, which has {names}; name one of these",
        field="TANDEM_HOST_ADDRESS",
    )


def check_interface_names() -> None:
    """Raises InvalidInput if GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names an interface that this
    host does not have."""
    known = sorted({name for name, _ in interface_addresses()})
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        wanted = value.removeprefix("=").split(",")
        exact = value.startswith("=") or variable.startswith("GLOO")
        if not value or value.startswith("^"):
            continue
        if not any(
            name == one or (name.startswith(one) and not exact) for name in known for one in wanted
        ):
            raise InvalidInput(
                f"{value} names no interface with an address; this host has {', '.join(known)}."
                " Unset it, or name one of these",
                field=variable,
            )


_FEWEST_TRIES = 3
"""The number of times that the kernel must have sent data again before the data counts as lost:
about 1.5 s."""


def lost_data(addresses: Collection[str]) -> dict[str, str]:
    """Finds those of `addresses` that do not acknowledge TCP data from this network namespace.
    Returns a description of the problem for each of them, by address. Connections of processes that
    have exited also count."""
    known = {ipaddress.ip_address(address): address for address in addresses}
    tries = defaultdict[str, list[int]](list)
    for table in ("tcp", "tcp6"):
        with suppress(OSError):  # the kernel has no IPv6
            for line in Path("/proc/thread-self/net", table).read_text().splitlines()[1:]:
                _, _, remote, _, queues, _, sent_again, *_ = line.split()
                address = known.get(_address(remote.partition(":")[0]))
                waits = int(queues.partition(":")[0], 16) and int(sent_again, 16) >= _FEWEST_TRIES
                if address is not None and waits:
                    tries[address].append(int(sent_again, 16))
    return {
        address: f"TCP to {address} was sent again up to {max(counts)} times, and nobody"
        f" acknowledged it (connections: {len(counts)}): the network loses it. If small packets"
        " arrive, the MTU is too large for a part of the way: `ping -M do -s"
        f" {_mtu(address) - (48 if ':' in address else 28)} {address}` tells"
        for address, counts in tries.items()
    }


def _address(digits: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address whose notation in /proc/net/tcp is `digits`: 32-bit words in the machine's byte
    order."""
    words = (int(digits[at : at + 8], 16) for at in range(0, len(digits), 8))
    address = ipaddress.ip_address(b"".join(struct.pack("=I", word) for word in words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _mtu(address: str) -> int:
    """The MTU that the kernel uses for packets to `address`."""
    six = ":" in address
    with socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((address, 9))
        # The numbers of the options IPV6_MTU and IP_MTU on Linux.
        option = (socket.IPPROTO_IPV6, 24) if six else (socket.IPPROTO_IP, 14)
        return towards.getsockopt(*option)
