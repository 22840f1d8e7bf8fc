"""The exporter's HTTP: `/metrics`, `/health`, and `/` for people. A scrape waits for nobody."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, SO_REUSEADDR, SOL_SOCKET
from typing import Any, override

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

SLOWEST_CLIENT_SECONDS = 10.0


def encode(page: Collector) -> bytes:
    """Always text: in OpenMetrics prometheus_client 0.26 makes "vllm_x" of a sample "vllm:x" for Prometheus 2."""
    return generate_latest(page)


class MetricsServer(ThreadingHTTPServer):
    """`pages`: path -> what a scrape of it tells. Raises OSError where the address is taken."""

    daemon_threads = True

    def __init__(self, host: str, port: int, pages: Mapping[str, Collector], about: Mapping[str, Any]) -> None:
        if ":" in host:
            self.address_family = AF_INET6
        super().__init__((host, port), _Handler)
        self.pages = pages
        self.about = about
        self.began = time.monotonic()

    @override
    def server_bind(self) -> None:
        # `tandem up` holds the number for us (tandem.system.ports), and a connection of before may still linger on it.
        self.socket.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)  # without looking up the host's name, which may take seconds
        self.server_address = self.socket.getsockname()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def serve_in_background(self) -> None:
        threading.Thread(target=self.serve_forever, name="http", daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = SLOWEST_CLIENT_SECONDS
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in self.server.pages:
            self._answer(200, CONTENT_TYPE_PLAIN_0_0_4, encode(self.server.pages[path]))
        elif path == "/health":
            seconds = round(time.monotonic() - self.server.began, 3)
            self._answer(200, "application/json", json.dumps({"status": "ok", "up_seconds": seconds}).encode())
        elif path == "/":
            lines = [f"{key}: {value}" for key, value in self.server.about.items()]
            lines += [f"see {page}" for page in (*self.server.pages, "/health")]
            self._answer(200, "text/plain; charset=utf-8", "".join(f"{line}\n" for line in lines).encode())
        else:
            known = ", ".join(("/", *self.server.pages, "/health"))
            self._answer(404, "text/plain; charset=utf-8", f"there is no {path}; there are {known}\n".encode())

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line per scrape would bury everything else."""
