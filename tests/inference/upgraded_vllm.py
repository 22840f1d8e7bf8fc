"""`python upgraded_vllm.py VERSION`: the fake vLLM as a program, one of several servers. The
program answers clients only with its publisher's permission, as the middleware of the real vLLM
does. The field `seconds` of a request is the time that the streamed answer takes. SIGTERM ends the
program and its running answers at once."""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

from fake_vllm import ADMIN_TOKEN, READY, FakeVllm
from tandem.vllm_client.names import READY_MARGIN_SECONDS


class UpgradedVllm(FakeVllm):
    def __init__(self, version: str) -> None:
        super().__init__()
        self._version, self._running, self._lock = version, 0, threading.Lock()

    def _answer(self, request: BaseHTTPRequestHandler, body: Any) -> None:
        admin = request.headers.get("X-Tandem-Admin-Token") == ADMIN_TOKEN
        margin = READY_MARGIN_SECONDS if request.path == READY else 0.0
        answers = time.monotonic() < self.ready_until - margin
        asked = request.path == "/v1/completions"
        if not admin and (asked or request.path == READY) and not answers:
            request.send_response(503)
            request.send_header("Content-Length", "0")
            request.end_headers()
        elif not admin and asked:
            with self._lock:
                self._running += 1
            try:
                self._stream(request, body)
            finally:
                with self._lock:
                    self._running -= 1
        else:
            super()._answer(request, body)

    def _stream(self, request: BaseHTTPRequestHandler, body: Any) -> None:
        known = body["model"] in self.adapters
        request.send_response(200 if known else 404)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        told = json.dumps({"version": self._version}).encode()
        for part in (told[:4], told[4:], b""):
            request.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            request.wfile.flush()
            if part == told[:4]:
                time.sleep(body["seconds"])

    def _metrics(self) -> str:
        _, *others = super()._metrics().split("\n")
        running = f'vllm:num_requests_running{{engine="0",model_name="base"}} {self._running}.0'
        return "\n".join([running, *others])


if __name__ == "__main__":
    UpgradedVllm(sys.argv[1]).start(int(os.environ["TANDEM_INFERENCE_PORT"]))
    while True:
        time.sleep(60)
