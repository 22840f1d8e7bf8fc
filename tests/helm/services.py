"""A Service with an address of its own: a forwarder that listens exactly while a pod behind it is ready."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable

from helm.cluster_store import Object
from helm.engine import docker
from helm.pod_life import PodLife, selects

# Reads one JSON object per line: for each port, the addresses behind it. Refuses connections to a port without any.
FORWARD = """
import asyncio, itertools, json, sys
behind, servers = {}, {}

async def pump(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.close()

def accept(port):
    async def one(reader, writer):
        try:
            there = await asyncio.open_connection(*behind[port][0])
        except OSError:
            return writer.transport.abort()
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))
        there[1].close()
        writer.close()
    return one

async def main():
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        behind.update(json.loads(line))
        for port, addresses in behind.items():
            if addresses and port not in servers:
                servers[port] = await asyncio.start_server(accept(port), "0.0.0.0", int(port))
            elif not addresses and port in servers:
                servers.pop(port).close()

asyncio.run(main())
"""


class ServiceProxy:
    """The forwarder of one Service."""

    def __init__(self, service: Object, name: str, label: str, network: str, aliases: list[str], image: str) -> None:
        self.service = service
        self.name = name
        words = [word for alias in aliases for word in ("--network-alias", alias)]
        self._process = subprocess.Popen(
            ["docker", "run", "--rm", "-i", "--name", name, "--label", label, "--network", network, *words,
             "--user", "65535:0", "--cap-drop", "ALL", "--entrypoint", "python3", image, "-u", "-c", FORWARD],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._told = ""

    def update(self, pods: Iterable[PodLife]) -> None:
        """Forwards to those of the pods that it selects and that may be asked."""
        spec = self.service["spec"]
        chosen = [pod for pod in pods if selects(spec.get("selector"), pod) and pod.address]
        chosen = [pod for pod in chosen if pod.ready or spec.get("publishNotReadyAddresses")]
        behind = {
            str(port["port"]): [[pod.address, target] for pod in chosen if (target := target_port(port, pod))]
            for port in spec["ports"]
        }
        line = json.dumps(behind, sort_keys=True)
        if line != self._told and self._process.stdin is not None:
            self._told = line
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Takes the address away."""
        docker("rm", "-f", self.name, check=False)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(30)


def target_port(port: Object, pod: PodLife) -> int | None:
    """The container port that a Service's port means in this pod."""
    target = port.get("targetPort", port["port"])
    if isinstance(target, int):
        return target
    ports = [p for container in pod.spec["containers"] for p in container.get("ports", [])]
    return next((p["containerPort"] for p in ports if p["name"] == target), None)
