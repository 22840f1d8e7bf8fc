"""A fake vLLM server answers GET /<name> with the content of the file FAKE_VLLM/<name>. If the file
does not exist, the server answers 404. The program also has an "engine" process."""

import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ANSWERS = Path(os.environ["FAKE_VLLM"])


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        print(f"asked for {self.path}", flush=True)
        file = ANSWERS / self.path.strip("/")
        if (
            self.path == "/is_paused"
            and self.headers["X-Tandem-Admin-Token"] != os.environ["TANDEM_ADMIN_TOKEN"]
        ):
            file = ANSWERS / "absent"
        self.send_response(200 if file.exists() else 404)
        self.end_headers()
        self.wfile.write(file.read_bytes() if file.exists() else b"")


if __name__ == "__main__":
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    print(f"vLLM runs with engine {engine.pid}", flush=True)
    ThreadingHTTPServer(
        ("127.0.0.1", int(os.environ["TANDEM_INFERENCE_PORT"])), Handler
    ).serve_forever()
