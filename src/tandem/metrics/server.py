"""The exporter's HTTP server: `/metrics`, `/health`, and `/` for people. It answers a scrape without waiting."""

import json
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from socket import AF_INET6
from socketserver import ThreadingTCPServer
from typing import Any, override

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector as PrometheusCollector


class MetricsServer(ThreadingTCPServer):
    """`about`: what `/` shows. Raises OSError if the address is taken.

    Not an HTTPServer, which looks up the host's name as it starts; that may take seconds.
    """

    daemon_threads = True
    allow_reuse_address = True  # `tandem up` holds the port for us, and it may have a connection in TIME_WAIT

    def __init__(self, host: str, port: int, page: PrometheusCollector, about: Mapping[str, str]) -> None:
        if ":" in host:
            self.address_family = AF_INET6
        super().__init__((host, port), _Handler)
        self.page = page
        self.about = about
        self.began = time.monotonic()
        self.server_port = int(self.server_address[1])

    def serve_in_background(self) -> None:
        threading.Thread(target=self.serve_forever, name="http", daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = 10.0  # seconds that a client may take to send its request
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self.server.page))
        elif path == "/health":
            seconds = round(time.monotonic() - self.server.began, 3)
            self._answer(200, "application/json", json.dumps({"status": "ok", "up_seconds": seconds}).encode())
        elif path == "/":
            lines = [f"{key}: {value}" for key, value in self.server.about.items()]
            self._answer(200, "text/plain; charset=utf-8", "\n".join([*lines, "see /metrics and /health\n"]).encode())
        else:
            self._answer(404, "text/plain; charset=utf-8", f"{path} is none of /, /metrics, /health\n".encode())

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: a line per scrape would bury everything else."""
