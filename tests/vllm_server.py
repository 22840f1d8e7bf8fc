"""A real vLLM on the CPU, started as a deployment starts it. Slow: tests share one through the `vllm` fixture."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tandem.system import ports

API_KEY, ADMIN_TOKEN = "the-api-key", "the-admin-token"


class VllmServer:
    """`python -m tandem.inference.server.serve` for one model, on a port of its own, which it keeps over restarts."""

    def __init__(self, directory: Path, model: Path, **environment: str) -> None:
        self.model = model
        self.log = directory / "vllm.log"
        self._held = ports.reserve(name="vllm")
        self.port = self._held.port
        self.url = f"http://127.0.0.1:{self.port}"
        self.start_seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = {
            **os.environ,
            "TANDEM_ROOT": str(directory),
            "TANDEM_BASE_MODEL": str(model),
            "TANDEM_DEVICE": "cpu",
            "TANDEM_INFERENCE_PORT": str(self.port),
            "TANDEM_API_KEY": API_KEY,
            "TANDEM_ADMIN_TOKEN": ADMIN_TOKEN,
            "TANDEM_MAX_LORAS": "2",
            **environment,
        }

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, timeout: float = 300.0) -> None:
        """Start it and wait until it answers; fails with the end of its log when it dies or takes too long."""
        began = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tandem.inference.server.serve"],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        while not self.healthy():
            if self._process.poll() is not None or time.monotonic() - began > timeout:
                self.kill()
                raise AssertionError("vLLM did not start:\n" + self.log.read_text(errors="replace")[-5000:])
            time.sleep(0.1)
        self.start_seconds = time.monotonic() - began

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """SIGKILL to the server and all it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)

    def close(self) -> None:
        self.kill()
        self._held.close()
