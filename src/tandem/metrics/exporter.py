"""Serves the metrics of a trainer or inference container to Prometheus (`python -m
tandem.metrics.exporter`). The exporter also lists the address of each vLLM of the container.

The exporter does not depend on the programs that it watches: it imports no torch, creates no CUDA
context, and writes nothing but a probe file on the shared volume. TANDEM_ROLE (`trainer` or
`inference`) selects the metrics that the exporter collects; without TANDEM_ROLE the exporter
collects the metrics of both roles. The exporter can start before the spool and the programs exist;
`tandem_collector_success` is 0 until they exist. The exporter exits with 0 on SIGTERM, with 2 if
the settings are wrong, and with 1 if its address is taken.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from functools import cache, partial
from http.server import BaseHTTPRequestHandler
from socket import AF_INET6
from socketserver import ThreadingTCPServer
from typing import Any, override
from urllib.parse import urlsplit

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector as PrometheusCollector

from tandem.config import Settings, load_settings
from tandem.errors import TandemError
from tandem.metrics.collector import Collector, Page
from tandem.metrics.container import (
    BuildCollector,
    SupervisorCollector,
    VolumesCollector,
    local_directories,
)
from tandem.metrics.gpus import NvmlCollector
from tandem.metrics.jobs import JobsCollector
from tandem.metrics.metric import BOTH, Exporter
from tandem.metrics.policy import CheckpointsCollector, PolicyCollector
from tandem.metrics.publish import MergedCollector, PublishCollector, ReplicasCollector
from tandem.metrics.ranks import RanksCollector
from tandem.spool import Spool
from tandem.supervise.supervisord import inference_ports
from tandem.system.environment import current_role
from tandem.system.logs import Log, configure

log = Log("exporter")


def exported_sides() -> tuple[Exporter, ...]:
    """The sides (trainer, inference) whose metrics this process exports. TANDEM_ROLE selects the
    sides."""
    role = current_role()
    return BOTH if role == "all" else (role,)


def make_collectors(settings: Settings, sides: tuple[Exporter, ...]) -> list[Collector]:
    # A spool on a full or read-only volume can still be read.
    open_spool = cache(partial(Spool, settings.root))
    # The trainer's container may also see the devices of the inference container, and vice versa.
    selected = getattr(settings, f"{sides[0]}_devices") if len(sides) == 1 else ()
    # A runner that starts Kubernetes Jobs has no GPU; the ranks' GPUs belong to the Jobs' pods.
    device = (
        "cpu" if sides == ("trainer",) and settings.executor == "kubernetes" else settings.device
    )
    collectors: list[Collector] = [
        BuildCollector(),
        NvmlCollector(device, selected),
        PolicyCollector(open_spool, sides),
        SupervisorCollector(settings),
        VolumesCollector(open_spool, local_directories()),
    ]
    if "trainer" in sides:
        collectors += [
            RanksCollector(open_spool, settings.trainer_ranks),
            JobsCollector(open_spool),
        ]
        collectors.append(CheckpointsCollector(open_spool))
    if "inference" in sides:
        collectors.append(PublishCollector(open_spool))
        if settings.inference_replicas > 1 or settings.replica is not None:
            collectors.append(ReplicasCollector(open_spool, settings))
        if settings.weights == "merged":
            collectors.append(MergedCollector(open_spool, settings))
    return collectors


class MetricsServer(ThreadingTCPServer):
    """Serves `page` at `/metrics`. `/targets` lists the vLLM servers of this container, in the
    format of Prometheus' HTTP service discovery. Raises OSError if the address is taken.

    The class is not an HTTPServer, because an HTTPServer looks up the host's name when it starts,
    and this lookup may take seconds.

    Args:
        host: the IPv4 or IPv6 address to listen on.
        port: the port to listen on; 0: any free port, which is then in `server_port`.
        targets: each vLLM's name and port, as in `inference_ports`.
    """

    daemon_threads = True
    # Without address reuse, the bind fails while `tandem up` holds the port for this process. It
    # also fails while an old connection of the port is in TIME_WAIT.
    allow_reuse_address = True

    def __init__(
        self, host: str, port: int, page: PrometheusCollector, targets: Mapping[str, int]
    ) -> None:
        if ":" in host:
            self.address_family = AF_INET6
        super().__init__((host, port), _Handler)
        self.page, self.targets = page, targets
        self.server_port = int(self.server_address[1])

    def serve_in_background(self) -> None:
        threading.Thread(target=self.serve_forever, name="http", daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = 10.0  # seconds that a client may take to send its request
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        status, kind, body = 404, CONTENT_TYPE_PLAIN_0_0_4, b"see /metrics\n"
        if path == "/metrics":
            status, body = 200, generate_latest(self.server.page)
        elif path == "/targets":
            status, kind, body = 200, "application/json", json.dumps(self._targets()).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _targets(self) -> list[dict[str, Any]]:
        """Each vLLM's address, with the host name by which Prometheus has reached this server."""
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or "127.0.0.1"
        host = f"[{host}]" if ":" in host else host
        return [
            {"targets": [f"{host}:{port}"], "labels": {"replica": name} if name else {}}
            for name, port in self.server.targets.items()
        ]

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing, because one line per scrape would hide all other lines."""


def main() -> int:
    """Serves until SIGTERM or Ctrl-C; returns the exit status."""
    configure()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        settings, sides = load_settings(), exported_sides()
    except TandemError as error:
        log.error(f"the exporter can't start: {error}")
        return 2
    collectors = make_collectors(settings, sides)
    try:
        targets = inference_ports(settings) if "inference" in sides else {}
        page = Page(collectors)
        server = MetricsServer(settings.metrics_host, settings.metrics_port, page, targets)
    except OSError as error:
        log.error(
            f"can't listen on {settings.metrics_host}:{settings.metrics_port}: {error}; set"
            " TANDEM_METRICS_PORT"
        )
        return 1
    for collector in collectors:
        collector.start(stop)
    server.serve_in_background()
    names = ", ".join(collector.name for collector in collectors)
    log.info(
        "exporter is up", address=f"{settings.metrics_host}:{server.server_port}", collectors=names
    )
    stop.wait()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    # A normal exit would wait for a collector that hangs in a driver or on a volume.
    os._exit(status)
