"""A runner that shares a fake GPU with a fake vLLM, and a real publisher: all real processes."""

import os
import subprocess
import sys
from pathlib import Path

import httpx

from fake_vllm import ADMIN_TOKEN, API_KEY
from runner import fake_gpu
from runner.runner_stack import HERE, Stack
from tandem.system import ports, processes

MIB = 2**20


class SharedStack(Stack):
    def __init__(self, directory: Path, **variables: str) -> None:
        super().__init__(directory / "spool", "fork", entry="sharing_rank")
        self.gpu, programs = fake_gpu.install(directory)
        with ports.reserve() as port:
            self.url = f"http://127.0.0.1:{port.port}"
            self.environment |= {"TANDEM_INFERENCE_PORT": str(port.port)}
        self.environment |= {
            "TANDEM_GPU_MODE": "shared", "TANDEM_DEVICE": "cuda", "FAKE_GPU": str(self.gpu),
            "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": f"{self.environment['PYTHONPATH']}:{HERE.parent}",
            "TANDEM_API_KEY": API_KEY, "TANDEM_ADMIN_TOKEN": ADMIN_TOKEN, "XDG_RUNTIME_DIR": str(directory),
            "TANDEM_LEASE_SECONDS": "2", **variables,
        }  # fmt: skip
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)

    def program(self, name: str, module: str, **variables: str) -> subprocess.Popen[bytes]:
        with (self.spool.root / f"{name}.log").open("ab") as log:
            program = subprocess.Popen(
                [sys.executable, "-m", module], env=self.environment | variables, stdout=log, stderr=log
            )
        self._processes.insert(0, program)  # the last one is the runner
        return program

    def vllm(self, *, wait: bool = True, **variables: str) -> subprocess.Popen[bytes]:
        vllm = self.program("vllm", "shared_vllm", **variables)
        if wait:
            self.until(self.healthy, 30, f"vLLM\n{self.text('vllm')}")
        return vllm

    def publisher(self) -> subprocess.Popen[bytes]:
        return self.program("publisher", "tandem.inference.publisher")

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def asleep(self) -> bool:
        headers = {"x-tandem-admin-token": ADMIN_TOKEN}
        return bool(httpx.get(f"{self.url}/is_sleeping", headers=headers, timeout=20).json()["is_sleeping"])

    def text(self, name: str) -> str:
        return (self.spool.root / f"{name}.log").read_text()

    def journal(self) -> list[str]:
        path = self.gpu / "journal"
        return path.read_text().splitlines() if path.exists() else []

    def until_told(self, what: str, count: int = 1, timeout: float = 40) -> None:
        self.until(lambda: self.journal().count(what) >= count, timeout, f"{what!r} in {self.journal()}")

    def event(self, job_id: str, kind: str) -> dict:
        return next(event.data for event in self.spool.events.read(job_id) if event.type == kind)

    def close(self) -> None:
        super().close()
        for name in ("vllm", "publisher"):
            if (self.spool.root / f"{name}.log").exists():
                print(f"---- {name}\n{self.text(name)}")
        print("---- journal", *self.journal(), sep="\n")
        processes.kill_all(lambda: processes.marked("TANDEM_ROOT", str(self.spool.root)), timeout=10)
