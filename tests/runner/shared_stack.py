"""A real runner shares a fake GPU with a fake vLLM that has a real publisher. Runner, vLLM and
publisher are processes of their own. The runner knows neither vLLM's address nor the admin
token."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from fake_vllm import ADMIN_TOKEN, API_KEY
from free_ports import free_ports
from runner import fake_gpu
from runner.runner_stack import HERE, Stack
from tandem.system import processes
from waiting import answers

MIB = 2**20
_ADMIN = {"x-tandem-admin-token": ADMIN_TOKEN}


class SharedStack(Stack):
    def __init__(self, directory: Path, launch: str = "fork", **variables: str) -> None:
        super().__init__(directory / "spool", launch, entry="sharing_rank")
        self.gpu, driver = fake_gpu.install(directory)
        self._journal_start = 0
        self._publisher: subprocess.Popen[bytes] | None = None
        [port] = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.environment |= {"TANDEM_INFERENCE_PORT": str(port)}
        self.environment |= {
            "TANDEM_GPU_MODE": "shared",
            "TANDEM_DEVICE": "cuda",
            "FAKE_GPU": str(self.gpu),
            **driver.variables,
            "PYTHONPATH": f"{HERE}:{HERE.parent}:{driver.variables['PYTHONPATH']}",
            "TANDEM_API_KEY": API_KEY,
            "TANDEM_ADMIN_TOKEN": ADMIN_TOKEN,
            "XDG_RUNTIME_DIR": str(directory),
            "TANDEM_LEASE_SECONDS": "2",
            **variables,
        }
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)

    def start(self) -> subprocess.Popen[bytes]:
        whole = self.environment
        unknown = ("TANDEM_INFERENCE_PORT", "TANDEM_ADMIN_TOKEN")
        self.environment = {name: v for name, v in whole.items() if name not in unknown}
        try:
            return super().start()
        finally:
            self.environment = whole

    def program(self, name: str, module: str) -> subprocess.Popen[bytes]:
        with (self.spool.root / f"{name}.log").open("ab") as log:
            program = subprocess.Popen(
                [sys.executable, "-m", module], env=self.environment, stdout=log, stderr=log
            )
        self._processes.insert(0, program)  # The last process of the list is the runner.
        return program

    def vllm(self, *, wait: bool = True) -> None:
        """Starts a vLLM. With `wait`, waits until the vLLM is healthy."""
        self._vllm = self.program("vllm", "shared_vllm")
        if wait:
            self.until(self.healthy, f"vLLM\n{self.text('vllm')}")

    def kill_vllm(self) -> None:
        self._vllm.kill()
        self._vllm.wait()

    def vllm_does(self, **orders: float) -> None:
        """Sets the behaviour of vLLM from now on. The docstring of `shared_vllm` explains the
        orders."""
        (self.gpu / "orders").write_text(json.dumps(orders))

    def publisher(self) -> None:
        """Start a publisher."""
        self._publisher = self.program("publisher", "tandem.inference.publisher")

    @property
    def publishes(self) -> bool:
        return self._publisher is not None and self._publisher.poll() is None

    def signal_publisher(self, number: signal.Signals) -> None:
        assert self._publisher is not None
        self._publisher.send_signal(number)
        if number == signal.SIGKILL:
            self._publisher.wait()

    def healthy(self) -> bool:
        return answers(f"{self.url}/health")

    def asleep(self) -> bool:
        return bool(
            httpx.get(f"{self.url}/is_sleeping", headers=_ADMIN, timeout=60).json()["is_sleeping"]
        )

    def wake_vllm(self) -> None:
        httpx.post(f"{self.url}/wake_up", headers=_ADMIN, timeout=60).raise_for_status()

    def text(self, name: str) -> str:
        return (self.spool.root / f"{name}.log").read_text()

    def journal(self) -> list[str]:
        """The actions of vLLM and ranks since the last call of `forget`, in their order."""
        path = self.gpu / "journal"
        return path.read_text().splitlines()[self._journal_start :] if path.exists() else []

    def forget(self) -> None:
        super().forget()
        self._journal_start += len(self.journal())

    def until_journal(self, line: str, count: int = 1) -> None:
        self.until(lambda: self.journal().count(line) >= count, f"{line!r} in {self.journal()}")

    def close(self) -> None:
        super().close()
        for name in ("vllm", "publisher"):
            if (self.spool.root / f"{name}.log").exists():
                print(f"---- {name}\n{self.text(name)}")
        self._journal_start = 0
        print("---- journal", *self.journal(), sep="\n")
        processes.kill_all(
            lambda: processes.marked("TANDEM_ROOT", str(self.spool.root)), timeout=10
        )
