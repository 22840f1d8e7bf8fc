"""A real vLLM on the CPU, started as a deployment starts it. The start takes half a minute, so
tests share one server.

With TANDEM_TEST_GPU=0 vLLM runs on GPU 0, and the ranks that send weights to vLLM run on GPU 1.
With TANDEM_TEST_GPU=1 vLLM runs on GPU 1 and the ranks on GPU 0.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from tandem.config import Settings
from tandem.system import ports
from tandem.vllm_client.client import VllmClient
from waiting import answers, until

API_KEY, ADMIN_TOKEN = "the-api-key", "the-admin-token"
GPU = os.environ.get("TANDEM_TEST_GPU")
# A cache of keys and values for 32,768 tokens. At each start vLLM writes zeros to the whole cache.
# A deployment on the CPU has a cache of 1 GiB by default, and writing zeros to 1 GiB takes 1.2 s of
# CPU time.
SMALL_CACHE = {"TANDEM_VLLM_ARGS": "--num-gpu-blocks-override=256"}
WHERE = {"TANDEM_DEVICE": "cpu"} | SMALL_CACHE
SENDERS: dict[str, str] = {}  # Environment variables of the ranks that send weights to the server.
if GPU is not None:
    WHERE = {
        "TANDEM_DEVICE": "cuda",
        "TANDEM_INFERENCE_DEVICES": GPU,
        "TANDEM_DTYPE": "float32",
        "TANDEM_ENFORCE_EAGER": "1",
        "TANDEM_GPU_MEMORY_UTILIZATION": "0.2",
    }
    SENDERS = {"TANDEM_DTYPE": "float32", "CUDA_VISIBLE_DEVICES": str(1 - int(GPU))}


class VllmServer:
    """`python -m tandem.inference.server.serve` for one model, on a port of its own."""

    def __init__(self, directory: Path, model: Path, **variables: str) -> None:
        self.model = model
        self.log = directory / "vllm.log"
        self._port = ports.reserve(name="vllm")
        self.url = f"http://127.0.0.1:{self._port.port}"
        self._environment = os.environ | {
            "TANDEM_ROOT": str(directory),
            "TANDEM_BASE_MODEL": str(model),
            **WHERE,
            "TANDEM_INFERENCE_PORT": str(self._port.port),
            "TANDEM_API_KEY": API_KEY,
            "TANDEM_ADMIN_TOKEN": ADMIN_TOKEN,
            "TANDEM_MAX_LORAS": "2",
            **variables,
        }

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tandem.inference.server.serve"]
        health = f"{self.url}/health"
        with self.log.open("wb") as log:
            pipes = {"stdout": log, "stderr": log}
            self._process = subprocess.Popen(
                command, env=self._environment, start_new_session=True, **pipes
            )
        try:
            until(
                "vLLM ends or answers",
                lambda: self._process.poll() is not None or answers(health),
                500,
                poll=0.1,
            )
            assert answers(health), "vLLM did not start"
        except BaseException:
            self.__exit__()
            print(self.log.read_text(errors="replace")[-5000:])
            raise
        return self

    @property
    def pid(self) -> int:
        """The process id of vLLM's API server."""
        return self._process.pid

    def ended(self) -> bool:
        return self._process.poll() is not None

    def restart(self) -> None:
        """End the remaining processes of the server, and start a new server on the same port."""
        self._kill()
        self.__enter__()

    def __exit__(self, *_: object) -> None:
        """Sends SIGKILL to the server and to all processes of its process group."""
        self._kill()
        self._port.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def client(self, **settings: object) -> VllmClient:
        keys = {"inference_url": self.url, "api_key": API_KEY, "admin_token": ADMIN_TOKEN}
        return VllmClient(Settings(**{**keys, **settings}))  # type: ignore[arg-type]
