"""`python frame_relay.py SECONDS A B MAC_A MAC_B` forwards IPv4 packets between the interfaces A
and B. Each packet is delayed by SECONDS.

The program adds the latency of a long distance between two hosts, on kernels without `netem`. MAC_A
and MAC_B are the addresses of the hosts behind A and B.
"""

import contextlib
import heapq
import itertools
import select
import socket
import sys
import time

ETHERNET_BYTES, HEADER_BYTES = 14, 10
SOL_PACKET, PACKET_VNET_HDR = 263, 15
SO_RCVBUFFORCE = 33
ETH_P_IP = 0x0800
LONGEST = 70_000


def opened(interface: str) -> socket.socket:
    """A raw socket on the interface. Each frame keeps the kernel's header, so that unfinished
    checksums and segments pass unchanged."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_IP))
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 25)
    end.bind((interface, ETH_P_IP))
    end.setblocking(False)
    return end


def main() -> None:
    seconds, names, hosts = float(sys.argv[1]), sys.argv[2:4], sys.argv[4:6]
    ends = [opened(name) for name in names]
    own = [end.getsockname()[4] for end in ends]
    targets = [bytes.fromhex(host.replace(":", "")) for host in hosts]
    waiting: list[tuple[float, int, int, bytes]] = []
    count = itertools.count()
    print("relays", flush=True)
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], pause)[0]:
            at = ends.index(end)
            with contextlib.suppress(BlockingIOError):
                while True:
                    content, about = end.recvfrom(LONGEST)
                    # The packet type PACKET_HOST excludes the frames that this process has sent.
                    if about[2] == socket.PACKET_HOST:
                        due = time.monotonic() + seconds
                        heapq.heappush(waiting, (due, next(count), 1 - at, content))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, content = heapq.heappop(waiting)
            ethernet = targets[to] + own[to] + ETH_P_IP.to_bytes(2)
            body = content[HEADER_BYTES + ETHERNET_BYTES :]
            with contextlib.suppress(OSError):  # a full queue loses packets, as networks do
                ends[to].send(content[:HEADER_BYTES] + ethernet + body)


if __name__ == "__main__":
    main()
