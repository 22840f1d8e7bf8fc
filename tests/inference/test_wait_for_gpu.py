"""The program that becomes vLLM first kills the processes of an earlier vLLM and waits until vLLM's
GPUs are free. The program refuses to start while another vLLM server runs."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from fake_nvml import MIB, FakeNvml, gpu
from tandem.system import processes
from waiting import alive, until

# A program that, like `tandem.inference.server.serve`, waits for the GPUs and then becomes "vLLM".
# In this test "vLLM" is a shell with a child that runs in a session of its own.
START = """
import os, sys
from tandem.config import load_settings
from tandem.errors import TandemError
from tandem.inference.server.serve import wait_for_gpu
from tandem.system.logs import configure
configure()
try:
    marker = wait_for_gpu(load_settings(), free_seconds=float(os.environ["FREE_SECONDS"]))
except TandemError as error:
    sys.exit(str(error))
print("starts", flush=True)
os.execvpe("sh", ["sh", "-c", "setsid sleep 3600 & echo child $!; wait"], os.environ | marker)
"""


class Servers:
    """Starts the program `START` on a machine with a fake driver of GPUs."""

    def __init__(self, directory: Path) -> None:
        self.driver = FakeNvml(directory)
        self.environment = os.environ | {
            **self.driver.variables,
            "TANDEM_ROOT": str(directory / "root"),
            "TANDEM_DEVICE": "cuda",
            "TANDEM_INFERENCE_DEVICES": "1",
            "FREE_SECONDS": "20",
            "XDG_RUNTIME_DIR": str(directory),
        }
        self.marker = ("TANDEM_VLLM_OF", f"{directory / 'root'}:8000")
        self.running: list[subprocess.Popen[str]] = []

    def use(self, mib: int) -> None:
        """Sets the memory in use on the second GPU, which belongs to vLLM. The first GPU does not
        belong to vLLM and is always full."""
        self.driver.set(gpu("GPU-aaaa", 80000 * MIB), gpu("GPU-bbbb", mib * MIB))

    def start(self, **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", START]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.running.append(
            subprocess.Popen(command, env=self.environment | variables, text=True, **pipes)
        )
        return self.running[-1]

    def child(self, server: subprocess.Popen[str]) -> int:
        """The pid of the child of a server that has started."""
        assert server.stdout is not None
        assert server.stdout.readline() == "starts\n"
        return int(server.stdout.readline().split()[1])


@pytest.fixture
def servers(tmp_path):
    servers = Servers(tmp_path)
    servers.use(5)
    yield servers
    for server in servers.running:
        server.kill()
    # The children keep the pipes open, so the children are killed before the pipes are read to the
    # end.
    processes.kill_all(lambda: processes.marked(*servers.marker), timeout=30)
    for server in servers.running:
        server.communicate(timeout=60)


def test_a_child_that_outlived_its_server_is_killed_before_the_next_server_starts(servers):
    first = servers.start()
    child = servers.child(first)
    first.kill()
    first.wait()
    assert alive(child)
    assert servers.child(servers.start()) != child
    until("the child of the first has ended", lambda: not alive(child), timeout=5)


def test_a_second_server_is_refused_and_kills_no_process_of_the_first(servers):
    child = servers.child(servers.start())
    second = servers.start()
    assert "already runs" in second.communicate(timeout=120)[1]
    assert second.returncode == 1
    assert alive(child)


def test_it_gives_up_and_names_the_gpu_and_the_bytes(servers):
    servers.use(70000)
    refused = servers.start(FREE_SECONDS="0.2")
    complaint = refused.communicate(timeout=120)[1]
    assert f"GPU-bbbb ({70000 * MIB} bytes in use)" in complaint
    assert "GPU-aaaa" not in complaint
    assert refused.returncode == 1


def test_it_waits_until_its_gpu_is_free(servers):
    servers.use(70000)
    server = servers.start()
    assert "waiting until the devices are free" in server.stderr.readline()
    assert not select.select([server.stdout], [], [], 0.5)[0], "it starts on a GPU that is not free"
    servers.use(5)
    assert servers.child(server)


def test_on_the_cpu_no_gpu_is_looked_at(servers):
    servers.use(70000)
    assert servers.child(servers.start(TANDEM_DEVICE="cpu"))
